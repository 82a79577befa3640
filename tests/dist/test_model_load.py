"""The HF -> Megatron mapping, judged by what the model computes: logits equal HF transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stream.check.ranks import Ranks

pytestmark = pytest.mark.dist

TOKENS = [[(7 * i + 3 * j) % 1003 for j in range(11)] for i in range(2)]


def _logits(folder: Path) -> Any:
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_stream.model.build import build_stage, load_stage, stage_blocks, transformer_config
    from megatron_stream.model.hf import read_spec
    from megatron_stream.train.parallel import initialize

    world = torch.distributed.get_world_size()
    groups = initialize(pipeline=world)
    spec = read_spec(folder)
    config = transformer_config(spec, world, torch.float32, torch.device("cpu"))
    model = build_stage(spec, config, groups, 64)
    load_stage(model, stage_blocks(spec, world, groups.pp.rank()), folder)

    def forward_step(data: Any, chunk: Any) -> Any:
        tokens = next(data)
        logits = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
        return logits, lambda output: (output.sum(), output.detach().clone())

    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([torch.tensor(TOKENS)]),
        model=[model],
        num_microbatches=1,
        seq_length=len(TOKENS[0]),
        micro_batch_size=len(TOKENS),
        forward_only=True,
    )
    return found[0] if found else None


@pytest.mark.parametrize(("name", "stages"), [("tiny", 2), ("tiny-untied", 2), ("tiny", 1)])
def test_logits_equal_transformers(ranks: Ranks, name: str, stages: int) -> None:
    from transformers import AutoModelForCausalLM

    from megatron_stream.model.prepare import resolve_model

    folder = resolve_model(name)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(TOKENS)).logits
    actual = ranks.call(stages, _logits, folder)[-1]
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 1e-4
