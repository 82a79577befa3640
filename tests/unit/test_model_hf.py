"""Reading a Hugging Face folder: the sizes in both config dialects, and one line for every mistake."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_stream.errors import UserError
from megatron_stream.model.hf import ModelSpec, check_model_folder, open_tensors, read_spec, shard_files

pytestmark = pytest.mark.unit

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "pad_token_id": 7,
}


def make(folder, config=CONFIG, tokenizer=True, weights=True):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    if weights:
        save_file({"a": torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
    return folder


def without(*keys):
    return {key: value for key, value in CONFIG.items() if key not in keys}


def test_spec_of_a_transformers_4_config(tmp_path):
    assert read_spec(make(tmp_path)) == ModelSpec(
        family="llama",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        norm_eps=1e-5,
        rope_theta=5000.0,
        tied=False,
        max_position_embeddings=256,
        pad_id=7,
    )


def test_spec_of_a_transformers_5_config(tmp_path):
    config = without("rope_theta") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    spec = read_spec(make(tmp_path, config))
    assert (spec.rope_theta, spec.head_dim, spec.tied) == (123.0, 32, True)


def test_old_configs_have_one_kv_head_per_head(tmp_path):
    assert read_spec(make(tmp_path, without("num_key_value_heads"))).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "(none named) is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope scaling 'yarn' is not supported"),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"mlp_bias": True}, "mlp_bias=true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"quantization_config": {"bits": 4}}, "is quantised"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, change, says):
    with pytest.raises(UserError) as refused:
        check_model_folder(make(tmp_path, CONFIG | change))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_size_is_named(tmp_path):
    with pytest.raises(UserError, match="has no 'hidden_size'"):
        read_spec(make(tmp_path, without("hidden_size")))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        check_model_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no config\.json"):
        check_model_folder(tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        check_model_folder(make(tmp_path / "a", tokenizer=False))
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        check_model_folder(make(tmp_path / "b", weights=False))
    check_model_folder(make(tmp_path / "c"))


def test_broken_json_is_a_users_mistake(tmp_path):
    make(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(UserError, match="not valid JSON"):
        read_spec(tmp_path)


def shards(folder):
    make(folder, weights=False)
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((4,), 2.0)}, folder / "model-00002-of-00002.safetensors")
    where = {"a": 1, "b": 1, "c": 2}
    index = {"weight_map": {name: f"model-0000{i}-of-00002.safetensors" for name, i in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_tensors_of_one_file_and_of_shards(tmp_path):
    with open_tensors(make(tmp_path / "one")) as tensors:
        assert tensors.names() == {"a"}
        assert torch.equal(tensors.get("a"), torch.arange(6.0).reshape(2, 3))
    with open_tensors(shards(tmp_path / "two")) as tensors:
        assert tensors.names() == {"a", "b", "c"}
        assert "c" in tensors and "d" not in tensors
        assert torch.equal(tensors.get("c"), torch.full((4,), 2.0))


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": {}}'])
def test_an_index_without_its_list(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match="has no weight_map"):
        shard_files(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    folder = shards(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_model_folder(folder)


def test_a_cut_off_file_is_named(tmp_path):
    file = make(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"), open_tensors(tmp_path):
        pass
