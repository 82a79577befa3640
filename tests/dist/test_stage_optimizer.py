"""Stepping per stage equals stock Megatron-core, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stream.config import OptimizerConfig
from megatron_stream.model.tiny import tiny_spec
from tests.harness import run_distributed

pytestmark = pytest.mark.dist

STEPS = 20
CLIP = 5.0
CLIPPED = {3, 4, 11, 19}  # steps whose loss is scaled up so that clipping triggers
LENGTHS = (5, 9, 3, 7)  # one microbatch each


def _train(tied: bool, streamed: bool, break_: str) -> dict[str, Any]:
    """Train STEPS steps; returns this rank's weights, optimizer state and norms."""
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_stream.model.build import build_stage, transformer_config
    from megatron_stream.train.optimizer import build_optimizer, wrap_ddp
    from megatron_stream.train.parallel import initialize
    from megatron_stream.train.stage_optimizer import StageOptimizer

    spec, world = tiny_spec(tied), torch.distributed.get_world_size()
    groups: Any = initialize(pipeline=world)
    config = transformer_config(spec, world, torch.float32, torch.device("cpu"))
    model = build_stage(spec, config, groups, 64)
    for name, parameter in sorted(model.named_parameters()):
        seed = 7 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else len(name)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + ("norm" in name))
    ddp = wrap_ddp(model, config, groups)
    stock = build_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=CLIP), [ddp], torch.float32, groups)
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


Case = tuple[bool, bool, str]  # tied, streamed, planted fault


def _train_all(cases: list[Case]) -> list[dict[str, Any]]:
    """All cases in the same processes: starting them costs more than training."""
    from megatron.core import parallel_state

    results = []
    for case in cases:
        results.append(_train(*case))
        parallel_state.destroy_model_parallel()
    return results


UNTIED, TIED = (False, False, ""), (True, False, "")
CASES: list[Case] = [
    UNTIED,
    (False, True, ""),
    (False, True, "rollback"),
    TIED,
    (True, True, ""),
    (True, True, "late"),
]


@pytest.fixture(scope="module")
def two_stages() -> dict[Case, list[dict[str, Any]]]:
    """Case -> what each rank of pp=2 ended with."""
    ranks = run_distributed(_train_all, 2, CASES)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_pp2_equals_stock_when_clipping_triggers_on_some_steps(two_stages: Any, tied: bool) -> None:
    stock, streamed = two_stages[tied, False, ""], two_stages[tied, True, ""]
    assert _differences(stock, streamed) == []
    assert {step for step, norm in enumerate(stock[0]["norms"]) if norm > CLIP} == CLIPPED
    assert streamed[1]["rollbacks"] == len(CLIPPED), "the last stage stepped before it knew"
    assert streamed[0]["rollbacks"] == 0, "the first stage knows before it steps"


def test_the_comparison_sees_a_missing_rollback(two_stages: Any) -> None:
    assert _differences(two_stages[UNTIED], two_stages[False, True, "rollback"])


def test_the_comparison_sees_a_late_unit_stepped_early(two_stages: Any) -> None:
    assert _differences(two_stages[TIED], two_stages[True, True, "late"])


def test_pp2_equals_pp1_to_rounding(two_stages: Any) -> None:
    """Both sides of a bitwise comparison could share a wrong setting; one stage cannot."""
    (one,) = run_distributed(_train_all, 1, [TIED])
    for a, b in zip(one[0]["norms"], two_stages[True, True, ""][0]["norms"], strict=True):
        assert abs(a - b) < 1e-3 * a
