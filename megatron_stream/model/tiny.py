"""A tiny random Llama with a tokenizer: a complete model folder for tests and first tries."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_stream.model.hf import ModelSpec

EOS = "<|im_end|>"
_WORDS = [
    EOS,
    "<|im_start|>",
    "<|unknown|>",
    *"0123456789+-*/=(). abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,:?",
]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def tiny_spec(tied: bool, num_layers: int = 4) -> ModelSpec:
    """4 layers, hidden 64, 2 heads of 32 with 1 kv head, vocabulary 1003."""
    return ModelSpec(
        family="llama",
        num_layers=num_layers,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=1003,
        norm_eps=1e-5,
        rope_theta=10000.0,
        tied=tied,
        max_position_embeddings=512,
    )


def write_tiny_model(folder: Path, spec: ModelSpec, seed: int = 0) -> None:
    """Write config, random bfloat16 weights and a character tokenizer. Deterministic in `seed`."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        num_hidden_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied,
        max_position_embeddings=spec.max_position_embeddings,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,  # large enough that different weights sample visibly different tokens
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(dict.fromkeys(_WORDS))}, "<|unknown|>"))
    backend.pre_tokenizer = Split("", "isolated")
    backend.decoder = Fuse()  # without it words are joined by blanks: "12" would come back as "1 2"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=EOS,
        unk_token="<|unknown|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
