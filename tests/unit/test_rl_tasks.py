"""Prompts and scores from reasoning-gym, with a real (tiny) tokenizer."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_stream.config import TaskConfig
from megatron_stream.errors import UserError
from megatron_stream.rl.tasks import Task, extract_answer, make_verifier

pytestmark = pytest.mark.unit

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template=TEMPLATE):
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


def config(**changes):
    fields = {
        "dataset": "chain_sum",
        "dataset_config": {"max_terms": 3, "max_digits": 2},
        "size": 5,
        "system_prompt": "Be brief.",
    }
    return TaskConfig(**{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        (" 12.\n", "12"),
        ("3.5.", "3.5"),
        ("The answer is 12.", "12"),
        ("the Answer is: 12", "12"),
        ("The answer is 7. No.\nThe answer is 12.", "12"),
        ("The answer is 7 <answer> 12. </answer> so.", "12"),
        ("5 + 7 = 12", "12"),
        ("5 + 7 = 12.\n\nThis", "12"),
        ("The answer is 5 + 7 = 12.", "12"),
        ("5 + 7 =", "5 + 7 ="),
        ("<answer>x = 5</answer>", "x = 5"),
        ("", ""),
    ],
)
def test_answer_extraction(text, answer):
    assert extract_answer(text) == answer


def test_prompts_use_the_chat_template_and_repeat_in_order():
    task = Task(config(), byte_tokenizer())
    entry = task.entry(1)
    assert task.decode(task.prompt(1)) == f"<system>Be brief.<user>{entry['question']}<assistant>"
    assert task.prompt(6) == task.prompt(1) != task.prompt(2)
    assert Task(config(), byte_tokenizer()).prompt(1) == task.prompt(1)
    assert Task(config(seed=1), byte_tokenizer()).prompt(1) != task.prompt(1)
    assert task.decode(Task(config(system_prompt=""), byte_tokenizer()).prompt(0)).startswith("<user>")


def test_scores_and_the_verifier_of_the_reward_process_agree():
    task, verify = Task(config(), byte_tokenizer()), make_verifier(config())
    right = task.entry(3)["answer"]
    for text, least, most in (
        (f"The answer is {right}.", 1, 1),
        ("no idea", 0, 0),
        (f"{right} or 1", 0.01, 0.99),
    ):
        assert least <= task.score(3, text) <= most
        assert verify(task.entry(3), text) == task.score(3, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_sums"}, "did you mean chain_sum?"),
        ({"dataset_config": {"max_term": 3}}, "max_term is not an option of chain_sum; did you mean"),
        ({"dataset_config": {"min_terms": 3, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"dataset_config": {"max_terms": "many"}}, "does not fit chain_sum"),
        ({"dataset_config": {"seed": 3}}, "set task.seed"),
    ],
)
def test_mistakes_in_the_configuration_are_named(changes, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        Task(config(**changes), byte_tokenizer())


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(UserError, match="chat template"):
        Task(config(), byte_tokenizer(template=None))
