"""What flows from the actor to the trainer: completions, samples and groups.

Tokens are the only currency: the prompt is tokenised once (`tasks.py`), the engine takes and returns
token ids, and the trainer trains on exactly those. Text exists only to be scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True)
class Completion:
    """What the engine generated for one request; the three lists have one entry per token.

    `logprobs` are natural logarithms of the probability with which the engine sampled the token;
    `versions` are the weights that produced it. Raises ValueError when the lengths differ.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.logprobs), len(self.versions))
        if len(set(lengths)) != 1:
            raise ValueError("a completion has {} tokens, {} logprobs and {} versions".format(*lengths))

    @property
    def version_spans(self) -> list[list[int]]:
        """`[[version, start], ...]`: from token `start` on, `version` produced the tokens."""
        spans: list[list[int]] = []
        for start, version in enumerate(self.versions):
            if not spans or spans[-1][0] != version:
                spans.append([version, start])
        return spans


@dataclass(frozen=True)
class Sample:
    """A scored completion."""

    completion: Completion
    reward: float


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, the unit of GRPO and of the sample stream.

    `prompt_index` counts prompts over the whole run; `attempt` counts how often this prompt was generated
    again because its samples had become too old.
    """

    prompt_index: int
    attempt: int
    prompt_ids: list[int]
    samples: list[Sample]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int | None:
        """The smallest version of any token; None when no sample has a token."""
        return min((v for s in self.samples for v in s.completion.versions), default=None)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Group:
        """Raises msgspec.ValidationError or DecodeError when `data` is not a group."""
        return msgspec.json.decode(data, type=cls)
