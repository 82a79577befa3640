"""The Llama family: which HF tensor lies where in Megatron-core and in vLLM.

Shapes (rows x columns): h hidden, d head_dim, q query heads, k key/value heads, f ffn width, v vocabulary.
Megatron names are those of `get_gpt_layer_local_spec`, layers counted from 0 within the stage.

| HF                                       | Megatron                             | vLLM                           |
|------------------------------------------|--------------------------------------|--------------------------------|
| model.embed_tokens [v,h]                 | embedding.word_embeddings (padded v) | model.embed_tokens (padded v)  |
| ...self_attn.{q,k,v}_proj [q|k|k *d, h]  | self_attention.linear_qkv            | self_attn.qkv_proj             |
| ...self_attn.o_proj [h, q*d]             | self_attention.linear_proj           | self_attn.o_proj               |
| ...mlp.{gate,up}_proj [f,h]              | mlp.linear_fc1 (gate, then up)       | mlp.gate_up_proj               |
| ...mlp.down_proj [h,f]                   | mlp.linear_fc2                       | mlp.down_proj                  |
| ...input_layernorm [h]                   | input_layernorm                      | input_layernorm                |
| ...post_attention_layernorm [h]          | pre_mlp_layernorm                    | post_attention_layernorm       |
| model.norm [h]                           | decoder.final_layernorm              | model.norm                     |
| lm_head [v,h]; tied: model.embed_tokens  | output_layer (padded v)              | lm_head (padded v)             |
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_stream.layout.blocks import Block, rows, whole
from megatron_stream.model.hf import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def hf_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint and its shape. A tied head is not a tensor of its own."""
    h, d, f = spec.hidden_size, spec.head_dim, spec.ffn_hidden_size
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, h), "model.norm.weight": (h,)}
    for layer in range(spec.num_layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (q, h),
            f"{name}self_attn.k_proj.weight": (kv, h),
            f"{name}self_attn.v_proj.weight": (kv, h),
            f"{name}self_attn.o_proj.weight": (h, q),
            f"{name}mlp.gate_proj.weight": (f, h),
            f"{name}mlp.up_proj.weight": (f, h),
            f"{name}mlp.down_proj.weight": (h, f),
            f"{name}input_layernorm.weight": (h,),
            f"{name}post_attention_layernorm.weight": (h,),
        }
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, h)
    return shapes


def head_tensor(spec: ModelSpec) -> str:
    """The HF tensor that the output layer computes with."""
    return EMBEDDING if spec.tied else HEAD


def _same(hf: str, local: str, shape: tuple[int, ...]) -> Block:
    """The whole HF tensor, from row 0 of the local one (which may be padded below)."""
    return Block(hf, whole(shape), local, whole(shape))


def _stacked(parts: list[str], local: str, shapes: dict[str, tuple[int, ...]]) -> Iterator[Block]:
    """HF tensors one below the other: [a; b; ...]."""
    at = 0
    for hf in parts:
        shape = shapes[hf]
        yield Block(hf, whole(shape), local, rows(at, at + shape[0], shape))
        at += shape[0]


def _query_groups(layer: str, local: str, spec: ModelSpec) -> Iterator[Block]:
    """Megatron's linear_qkv: for each kv head, its query heads, then its key, then its value.

    Row order: [(q/k query heads, key, value) x k] x d, as megatron/core/transformer/attention.py splits it.
    """
    d, h = spec.head_dim, spec.hidden_size
    per_group = spec.num_heads // spec.num_kv_heads
    for group in range(spec.num_kv_heads):
        at = group * (per_group + 2) * d
        for kind, first, count in (("q", group * per_group, per_group), ("k", group, 1), ("v", group, 1)):
            hf_box = rows(first * d, (first + count) * d, (0, h))
            yield Block(f"{layer}self_attn.{kind}_proj.weight", hf_box, local, rows(at, at + count * d, (0, h)))
            at += count * d


def megatron_blocks(spec: ModelSpec, first_layer: int, num_layers: int, pre: bool, post: bool) -> list[Block]:
    """What the stage with layers `first_layer` to `first_layer + num_layers` holds.

    `pre`: it has the embedding; `post`: it has the final norm and the output layer.
    """
    shapes = hf_shapes(spec)
    blocks: list[Block] = []
    if pre:
        blocks.append(_same(EMBEDDING, "embedding.word_embeddings.weight", shapes[EMBEDDING]))
    for index in range(num_layers):
        hf, local = f"model.layers.{first_layer + index}.", f"decoder.layers.{index}."
        for theirs, ours in (
            ("input_layernorm", "input_layernorm"),
            ("self_attn.o_proj", "self_attention.linear_proj"),
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("mlp.down_proj", "mlp.linear_fc2"),
        ):
            name = f"{hf}{theirs}.weight"
            blocks.append(_same(name, f"{local}{ours}.weight", shapes[name]))
        blocks += _query_groups(hf, f"{local}self_attention.linear_qkv.weight", spec)
        gate_up = [f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"]
        blocks += _stacked(gate_up, f"{local}mlp.linear_fc1.weight", shapes)
    if post:
        blocks.append(_same("model.norm.weight", "decoder.final_layernorm.weight", shapes["model.norm.weight"]))
        if not (spec.tied and pre):  # one stage holds both ends: the head is the embedding itself
            head = head_tensor(spec)
            blocks.append(_same(head, "output_layer.weight", shapes[head]))
    return blocks


def vllm_blocks(spec: ModelSpec, names: list[str]) -> list[Block]:
    """What a vLLM worker with the parameters `names` holds; a name that is not known here is left out.

    The caller compares the names of the result with the worker's, so that nothing is skipped silently.
    """
    shapes = hf_shapes(spec)
    blocks: list[Block] = []
    for name in names:
        if name == HEAD:
            head = head_tensor(spec)
            blocks.append(_same(head, name, shapes[head]))
        elif name.endswith("self_attn.qkv_proj.weight"):
            parts = [name.replace("qkv_proj", f"{kind}_proj") for kind in "qkv"]
            blocks += _stacked(parts, name, shapes)
        elif name.endswith("mlp.gate_up_proj.weight"):
            parts = [name.replace("gate_up_proj", f"{kind}_proj") for kind in ("gate", "up")]
            blocks += _stacked(parts, name, shapes)
        elif name in shapes:
            blocks.append(_same(name, name, shapes[name]))
    return blocks
