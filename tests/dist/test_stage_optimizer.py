"""Stepping per stage equals stock Megatron-core, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stream.config import OptimizerConfig
from megatron_stream.model.hf import ModelSpec
from tests.harness import run_distributed

pytestmark = pytest.mark.dist

STEPS = 20
CLIPPED = {3, 4, 11, 19}  # steps whose loss is scaled up so that clipping triggers
LENGTHS = (5, 9, 3, 7)  # one microbatch each


def _spec(tied: bool) -> ModelSpec:
    return ModelSpec(
        family="llama",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=1003,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=tied,
        qkv_bias=False,
        qk_norm=False,
        max_position_embeddings=64,
    )


def _train(tied: bool, streamed: bool, clip: float, break_: str = "") -> dict[str, Any]:
    """Train STEPS steps; returns this rank's weights, optimizer state and norms."""
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_stream.model.build import build_stage, transformer_config
    from megatron_stream.train.optimizer import build_optimizer, wrap_ddp
    from megatron_stream.train.parallel import initialize
    from megatron_stream.train.stage_optimizer import StageOptimizer

    spec, world = _spec(tied), torch.distributed.get_world_size()
    groups: Any = initialize(pipeline=world)
    config = transformer_config(spec, world, torch.float32, torch.device("cpu"))
    model = build_stage(spec, config, groups, 64)
    for name, parameter in sorted(model.named_parameters()):
        seed = 7 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else len(name)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + ("norm" in name))
    ddp = wrap_ddp(model, config, groups)
    stock = build_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=clip), [ddp], torch.float32, groups)
    optimizer: Any = stock
    config.finalize_model_grads_func = finalize_model_grads
    if streamed:
        optimizer = StageOptimizer(stock, [ddp], groups, optimistic=True)
        optimizer.attach(config)
        if break_ == "rollback":
            optimizer._roll_back = lambda: setattr(optimizer, "_took_step", False)
        if break_ == "late":
            optimizer._early, optimizer._late = optimizer._early + optimizer._late, optimizer._late

    def forward_step(data: Any, chunk: Any) -> Any:
        tokens, scale = next(data)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = chunk(tokens, positions, None, labels=tokens.roll(-1, 1))
        return output, lambda per_token: (per_token.mean() * scale, {"loss": per_token.mean().detach()})

    schedule = get_forward_backward_func()
    norms, losses = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        scale = 50.0 if step in CLIPPED else 1.0
        data = [(torch.randint(0, 1003, (2, n), generator=generator), scale) for n in LENGTHS]
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        done = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=[ddp],
            num_microbatches=len(data),
            seq_length=max(LENGTHS),
            micro_batch_size=2,
            forward_only=False,
        )
        success, norm, _ = optimizer.step()
        assert success
        norms.append(norm)
        losses += [float(d["loss"]) for d in done]
    inner = stock.chained_optimizers[0].optimizer
    state = [v for group in inner.param_groups for p in group["params"] for v in inner.state[p].values()]
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "state": [torch.as_tensor(s).clone() for s in state],
        "norms": norms,
        "losses": losses,
        "rollbacks": getattr(optimizer, "rollbacks", 0),
    }


def _differences(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    found = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        found += [f"rank {rank} {k}" for k in x["weights"] if not torch.equal(x["weights"][k], y["weights"][k])]
        if not all(torch.equal(s, t) for s, t in zip(x["state"], y["state"], strict=True)):
            found.append(f"rank {rank} optimizer state")
        if x["norms"] != y["norms"]:
            found.append(f"rank {rank} norms")
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pp2_equals_stock_when_clipping_triggers_on_some_steps(tied: bool) -> None:
    stock = run_distributed(_train, 2, tied, False, 5.0)
    streamed = run_distributed(_train, 2, tied, True, 5.0)
    assert _differences(stock, streamed) == []
    norms = stock[0]["norms"]
    assert {step for step, norm in enumerate(norms) if norm > 5.0} == CLIPPED
    assert streamed[1]["rollbacks"] == len(CLIPPED), "the last stage stepped before it knew"
    assert streamed[0]["rollbacks"] == 0, "the first stage knows before it steps"


def test_the_comparison_sees_a_missing_rollback() -> None:
    stock = run_distributed(_train, 2, False, False, 5.0)
    broken = run_distributed(_train, 2, False, True, 5.0, "rollback")
    assert _differences(stock, broken)


def test_the_comparison_sees_a_late_unit_stepped_early() -> None:
    stock = run_distributed(_train, 2, True, False, 5.0)
    broken = run_distributed(_train, 2, True, True, 5.0, "late")
    assert _differences(stock, broken)


def test_pp2_equals_pp1_to_rounding() -> None:
    """Both sides of a bitwise comparison could share a wrong setting; one stage cannot."""
    one = run_distributed(_train, 1, True, False, 5.0)
    two = run_distributed(_train, 2, True, True, 5.0)
    for a, b in zip(one[0]["norms"], two[0]["norms"], strict=True):
        assert abs(a - b) < 1e-3 * a
