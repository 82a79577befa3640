"""From a name to a folder: made once, whole or not at all, whoever asks at the same time."""

import threading
import time

import pytest
import torch

from megatron_stream.errors import UserError
from megatron_stream.model import prepare
from megatron_stream.model.hf import open_tensors, read_spec
from megatron_stream.model.prepare import resolve_model
from megatron_stream.model.tiny import tiny_spec, write_tiny_model

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_STREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_little(folder):
    write_tiny_model(folder, tiny_spec(tied=True, num_layers=1))


def test_a_known_name_is_made_in_the_cache(cache):
    folder = resolve_model("tiny")
    assert folder == cache / "models" / "tiny"
    assert read_spec(folder).tied and not read_spec(resolve_model("tiny-untied")).tied


def test_it_is_made_once_even_by_concurrent_callers(monkeypatch):
    made = []

    def slow(folder):
        made.append(folder)
        time.sleep(0.2)
        write_little(folder)

    monkeypatch.setitem(prepare.MAKERS, "slow", slow)
    found: list[object] = []
    callers = [threading.Thread(target=lambda: found.append(resolve_model("slow"))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(made) == 1
    assert len(found) == 4 and len(set(found)) == 1
    resolve_model("slow")
    assert len(made) == 1


def test_a_failure_leaves_nothing_that_looks_finished(cache, monkeypatch):
    def dies(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setitem(prepare.MAKERS, "frail", dies)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("frail")
    assert not (cache / "models" / "frail").exists()
    monkeypatch.setitem(prepare.MAKERS, "frail", write_little)
    folder = resolve_model("frail")
    assert read_spec(folder).num_layers == 1
    assert sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) == ["frail"]


def test_a_path_is_checked(tmp_path):
    write_little(tmp_path / "mine")
    assert resolve_model(str(tmp_path / "mine")) == tmp_path / "mine"
    (tmp_path / "mine" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        resolve_model(str(tmp_path / "mine"))


def test_an_unknown_name_is_one_line():
    with pytest.raises(UserError, match="not a folder and not a known model name"):
        resolve_model("smollm3")


@pytest.mark.parametrize("tied", [True, False])
def test_the_tiny_model_is_what_its_spec_says(tmp_path, tied):
    spec = tiny_spec(tied)
    write_tiny_model(tmp_path, spec)
    assert read_spec(tmp_path) == spec
    with open_tensors(tmp_path) as tensors:
        assert ("lm_head.weight" in tensors) is not tied
        assert tensors.get("model.embed_tokens.weight").shape == (1003, 64)
        assert tensors.get("model.layers.3.self_attn.k_proj.weight").shape == (32, 64)
        assert tensors.get("model.norm.weight").dtype is torch.bfloat16


def test_the_tiny_model_depends_on_the_seed_alone(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    before = torch.random.get_rng_state()
    weights = []
    for i, seed in enumerate((0, 0, 1)):
        write_tiny_model(tmp_path / str(i), tiny_spec(True, num_layers=1), seed)
        with open_tensors(tmp_path / str(i)) as tensors:
            weights.append(tensors.get(name))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's random numbers go on as before


def test_the_tiny_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    write_little(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "12 + 34 = 46. Yes?"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 0 and tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_dict=False
    )
    assert 0 in prompt and max(prompt) < 1003
    assert tokenizer.decode(prompt, skip_special_tokens=True) == "user 1+1=assistant "
    assert tokenizer.decode([5, 900, 6]) is not None  # ids beyond the tokenizer's words are sampled, too
