"""The plan moves every element to its place, once, whatever the cuts of trainer and engine are."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stream.layout.blocks import Block, intersect, shift, whole
from megatron_stream.layout.llama import EMBEDDING, hf_shapes, megatron_blocks, vllm_blocks
from megatron_stream.layout.plan import PlanError, make_plan
from megatron_stream.model.hf import ModelSpec

pytestmark = pytest.mark.unit


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4]))
    heads = kv * draw(st.integers(1, 3))
    return ModelSpec(
        family="llama",
        num_layers=draw(st.integers(1, 6)),
        hidden_size=draw(st.integers(1, 8)),
        ffn_hidden_size=draw(st.integers(1, 6)),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 9)),
        norm_eps=1e-5,
        rope_theta=1e4,
        tied=draw(st.booleans()),
        max_position_embeddings=8,
    )


def cuts(draw: st.DrawFn, layers: int) -> list[tuple[int, int]]:
    """(first, count) of consecutive stages; some may be empty, as vLLM allows."""
    inner = sorted(draw(st.lists(st.integers(0, layers), max_size=3)))
    edges = [0, *inner, layers]
    return [(a, b - a) for a, b in pairwise(edges)]


def trainer(spec: ModelSpec, stages: list[tuple[int, int]]) -> dict[int, list[Block]]:
    last = len(stages) - 1
    return {i: megatron_blocks(spec, *stage, pre=i == 0, post=i == last) for i, stage in enumerate(stages)}


def engine_names(spec: ModelSpec, stages: list[tuple[int, int]]) -> dict[int, list[str]]:
    """Parameter names as vLLM's llama.py creates them on each pipeline rank."""
    names: dict[int, list[str]] = {}
    for i, (first, count) in enumerate(stages):
        own = []
        is_last = i == len(stages) - 1
        if i == 0 or (spec.tied and is_last):
            own.append(EMBEDDING)
        for layer in range(first, first + count):
            p = f"model.layers.{layer}."
            kinds = "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj input_layernorm"
            own += [f"{p}{kind}.weight" for kind in [*kinds.split(), "post_attention_layernorm"]]
        if is_last:
            own += ["model.norm.weight"] + ([] if spec.tied else ["lm_head.weight"])
        names[i] = own
    return names


def local_tensors(blocks: list[Block], fill: float) -> dict[str, torch.Tensor]:
    shapes: dict[str, list[int]] = {}
    for block in blocks:
        known = shapes.setdefault(block.local, [0] * len(block.local_box))
        shapes[block.local] = [max(a, stop) for a, (_, stop) in zip(known, block.local_box, strict=True)]
    return {name: torch.full(shape, fill) for name, shape in shapes.items()}


def at(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_element_arrives_once_and_where_it_belongs(data: st.DataObject) -> None:
    spec = data.draw(specs())
    draw = data.draw
    sources = trainer(spec, cuts(draw, spec.num_layers))
    destinations = {w: vllm_blocks(spec, names) for w, names in engine_names(spec, cuts(draw, spec.num_layers)).items()}
    counter = iter(range(10**9))
    hf = {
        name: torch.tensor([float(next(counter)) for _ in range(math.prod(shape))]).view(shape)
        for name, shape in hf_shapes(spec).items()
    }
    held = {rank: local_tensors(blocks, -1.0) for rank, blocks in sources.items()}
    for rank, blocks in sources.items():
        for block in blocks:
            held[rank][block.local][at(block.local_box)] = hf[block.hf][at(block.hf_box)]
        assert all((t >= 0).all() for t in held[rank].values()), "a Megatron element has no HF element"

    arrived = {w: local_tensors(blocks, -1.0) for w, blocks in destinations.items()}
    writes = {w: local_tensors(blocks, 0.0) for w, blocks in destinations.items()}
    for copy in make_plan(sources, destinations):
        values = held[copy.source][copy.source_name][at(copy.source_box)]
        arrived[copy.worker][copy.worker_name][at(copy.worker_box)] = values
        writes[copy.worker][copy.worker_name][at(copy.worker_box)] += 1
    for worker, blocks in destinations.items():
        assert all((count == 1).all() for count in writes[worker].values())
        for block in blocks:
            got = arrived[worker][block.local][at(block.local_box)]
            assert torch.equal(got, hf[block.hf][at(block.hf_box)])


def test_a_tied_embedding_comes_from_the_co_indexed_stage() -> None:
    from megatron_stream.model.tiny import tiny_spec

    spec = tiny_spec(tied=True)
    names = engine_names(spec, [(0, 2), (2, 2)])
    plan = make_plan(trainer(spec, [(0, 2), (2, 2)]), {w: vllm_blocks(spec, n) for w, n in names.items()})
    assert {(c.source, c.worker) for c in plan} == {(0, 0), (1, 1)}
    assert {(c.source, c.worker) for c in plan if c.worker_name == EMBEDDING} == {(0, 0), (1, 1)}


def test_what_nobody_holds_is_named() -> None:
    from megatron_stream.model.tiny import tiny_spec

    spec = tiny_spec(tied=True)
    sources = {0: megatron_blocks(spec, 0, 3, pre=True, post=True)}
    names = engine_names(spec, [(0, 4)])
    with pytest.raises(PlanError, match=r"model\.layers\.3\."):
        make_plan(sources, {0: vllm_blocks(spec, names[0])})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=3))
def test_intersection_and_shift(sides: list[tuple[int, int]]) -> None:
    box = tuple((start, start + length) for start, length in sides)
    assert intersect(box, box) == box
    assert shift(box, box, whole(tuple(length for _, length in sides))) == whole(tuple(n for _, n in sides))
    assert intersect(box, tuple((stop, stop + 1) for _, stop in box)) is None
