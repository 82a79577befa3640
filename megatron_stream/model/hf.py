"""A Hugging Face model folder: what the model is, and its tensors. Reads config.json and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_stream.errors import UserError

# architectures[0] of config.json -> family, a module of megatron_stream.layout
FAMILIES = {"LlamaForCausalLM": "llama"}


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and switches of a decoder, independent of any framework."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    tied: bool
    max_position_embeddings: int
    pad_id: int = 0


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from error


def _refuse_unsupported(config: dict[str, Any], where: Path) -> None:
    """What a Llama checkpoint may ask for and this release does not compute."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"{where}: {key}=true is not supported in this release")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act={config['hidden_act']} is not supported; Llama uses silu")
    if config.get("quantization_config"):
        raise UserError(f"{where} is quantised; give a folder with plain bfloat16 or float32 weights")


def read_spec(folder: Path) -> ModelSpec:
    """The model in `folder`, from config.json alone.

    Raises UserError for a missing or broken file, a family or a feature that is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json; model.path must be a Hugging Face model folder")
    config = _read_json(path)
    architecture = (config.get("architectures") or ["(none named)"])[0]
    if architecture not in FAMILIES:
        raise UserError(f"{path}: {architecture} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(config, path)
    # transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: rope scaling {kind!r} is not supported in this release")
    try:
        heads = config["num_attention_heads"]
        pad = config.get("pad_token_id")
        return ModelSpec(
            family=FAMILIES[architecture],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            pad_id=pad if isinstance(pad, int) else 0,
        )
    except KeyError as error:
        raise UserError(f"{path} has no {error.args[0]!r}; is it a complete model folder?") from error


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint. Raises UserError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        if not (isinstance(content, dict) and isinstance(content.get("weight_map"), dict) and content["weight_map"]):
            raise UserError(f"{index} has no weight_map, the list of tensors and their files; download it again")
        files = [folder / name for name in sorted(set(content["weight_map"].values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(f"{folder} lacks {missing[0]}, which its index names; download the model again")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{folder} has no model.safetensors and no index of shards; only safetensors are read")
    return [single]


def check_model_folder(folder: Path) -> None:
    """Everything that trainer, engine and actor will read is there. Raises UserError otherwise."""
    if not folder.is_dir():
        raise UserError(f"model.path={folder} is not a folder and not a known model name")
    read_spec(folder)
    shard_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json; the actor needs the model's tokenizer")


class Tensors:
    """Named tensors over all shards, read when asked for."""

    def __init__(self, shards: list[Any]) -> None:
        self._where = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118

    def names(self) -> set[str]:
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """The checkpoint's tensors. Raises UserError for a missing or damaged file."""
    with ExitStack() as stack:
        shards = []
        for file in shard_files(folder):
            try:
                shards.append(stack.enter_context(safe_open(file, "pt")))
            except Exception as error:  # safetensors' own error type is not exported
                raise UserError(f"{file} cannot be read as safetensors ({error}); download it again") from error
        yield Tensors(shards)
