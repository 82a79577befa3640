"""The task: reasoning-gym as generator of prompts and verifier of answers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Protocol

from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer as tagged_answer

from megatron_stream.config import TaskConfig
from megatron_stream.errors import UserError

Entry = dict[str, Any]  # reasoning-gym's question, answer and metadata
Verifier = Callable[[Entry, str], float]

_CONFIG_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that a task uses."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


def extract_answer(text: str) -> str:
    """The answer in a completion's text.

    The content of the last `<answer>` tag if there is one. Else what follows the last "answer is" on its line,
    or the whole text, and of that what follows the last "=" on its line. Blanks around it and one full stop at
    its end are dropped: "The answer is 12.", "5 + 7 = 12" and " 12." all give "12".
    """
    answer: str | None = tagged_answer(text)
    if answer is None:
        answer = text
        for mark, said in ((r"\banswer is:?", r"[^\n]+"), ("=", r"[^\n=]+")):
            if found := re.findall(rf"{mark}[ \t]*({said})", answer, flags=re.IGNORECASE):
                answer = found[-1]
    return answer.strip().removesuffix(".").rstrip()


def make_dataset(config: TaskConfig) -> Any:
    """The reasoning-gym data set of `config`. Raises UserError for an unknown name or a bad configuration."""
    name, options = config.dataset, dict(config.dataset_config)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"task.dataset={name} is not a reasoning-gym data set{hint}")
    for key in ("size", "seed"):
        if key in options:
            raise UserError(f"task.dataset_config.{key} is not used: set task.{key}")
    known = list(DATASETS[name][1].__dataclass_fields__)
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise UserError(f"task.dataset_config.{key} is not an option of {name}; {hint}")
    try:
        dataset = create_dataset(name, **options, size=config.size, seed=config.seed)
        dataset[0]  # some options are only refused when the first entry is generated
    except _CONFIG_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"task.dataset_config does not fit {name}: {reason}") from error
    return dataset


def make_verifier(config: TaskConfig) -> Verifier:
    """`verify(entry, text) -> reward`. Runs in a reward process (`rewards.py`), which has no tokenizer."""
    dataset = make_dataset(config)

    def verify(entry: Entry, text: str) -> float:
        return float(dataset.score_answer(extract_answer(text), entry))

    return verify


class Task:
    """Prompts by index, and the verifier's view of them.

    Index i is entry `i % size` of the data set, so prompts repeat in order when they run out.
    Raises UserError for an unknown data set, bad options, or a tokenizer without a chat template.
    """

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template; add chat_template.jinja to its folder")
        self._config = config
        self._tokenizer = tokenizer
        self._dataset = make_dataset(config)

    def entry(self, index: int) -> Entry:
        """Question, answer and metadata of prompt `index`."""
        entry: Entry = self._dataset[index % self._config.size]
        return entry

    def encode(self, entry: Entry) -> list[int]:
        """Token ids of the entry's prompt, up to where the assistant speaks: a run's only tokenisation."""
        messages = [{"role": "user", "content": entry["question"]}]
        if self._config.system_prompt:
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return list(
            self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def prompt(self, index: int) -> list[int]:
        """Token ids of prompt `index`."""
        return self.encode(self.entry(index))

    def decode(self, token_ids: list[int]) -> str:
        """The text of a completion, for scoring only."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def score(self, index: int, text: str) -> float:
        """Reward of `text` for prompt `index`, in this process and without a time limit; see `Scorer`."""
        return float(self._dataset.score_answer(extract_answer(text), self.entry(index)))
