"""One rank of a case's training run: by stock Megatron alone, or with our stage optimizer around its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.check.exact_job import build_job

LENGTHS = (5, 9, 3, 7)
LOUD = 60.0  # the loss of a step on which clipping is to trigger is multiplied by this


@dataclass
class Outcome:
    """What a rank ends with. `state` holds main parameters and moments."""

    weights: dict[str, torch.Tensor]
    state: list[torch.Tensor]
    steps: list[tuple[bool, float | None, Any]] = field(default_factory=list)
    rollbacks: int = 0
    copy_bytes: int = 0


def loud(case: Case, step: int) -> bool:
    return case.clip == "some" and step % 5 in (2, 3)


def poison(case: Case, step: int) -> float | None:
    """What is put into a gradient of the last stage in this step."""
    return {3: float("inf"), 4: float("nan")}.get(step % 8) if case.clip == "inf" else None


def microbatches(case: Case, step: int, dp_rank: int) -> list[torch.Tensor]:
    """Tokens [2, s] of each microbatch; the step's whole batch is the same in every layout."""
    multiple = case.tp if case.sequence_parallel else 1
    found = []
    for number in range(case.microbatches):
        length = LENGTHS[number % len(LENGTHS)] if case.variable_lengths else max(LENGTHS)
        length = -(-length // multiple) * multiple
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + dp_rank)
        found.append(torch.randint(0, case.size.vocabulary, (2, length), generator=generator))
    return found


def train(
    case: Case,
    wrap: Callable[[Any, list[Any], Any, Any], Any] | None = None,
    *,
    batch_p2p_comm: bool = False,
    first: int = 0,
    finish: Callable[[list[Any], Any], None] | None = None,
) -> Outcome:
    """Train steps `first` to `case.steps`. `wrap(optimizer, chunks, config, groups)` gives the optimizer that steps;
    `finish(chunks, optimizer)` is called at the end."""
    from megatron.core import parallel_state

    job = build_job(case, batch_p2p_comm)
    chunks, groups, stock = job.chunks, job.groups, job.optimizer
    optimizer = wrap(stock, chunks, job.config, groups) if wrap else stock
    poisoned = _poisoned_parameter(chunks, groups)
    outcome = Outcome({}, [])
    for step in range(first, case.steps):
        data = [(t, LOUD if loud(case, step) else 1.0) for t in microbatches(case, step, groups.dp.rank())]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        value = poison(case, step)
        hook = None
        if value is not None and poisoned is not None:
            hook = poisoned.register_hook(lambda grad, value=value: torch.full_like(grad, value))
        job.run_schedule(data)
        outcome.steps.append(optimizer.step())
        if hook is not None:
            hook.remove()
    outcome.rollbacks = getattr(optimizer, "rollbacks", 0)
    outcome.copy_bytes = getattr(optimizer, "copy_bytes", 0)
    if case.overlap:  # the last step's parameters are gathered by the next forward
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    for index, chunk in enumerate(chunks):
        for name, tensor in [*chunk.module.named_parameters(), *chunk.module.named_buffers()]:
            outcome.weights[f"chunk {index} {name}"] = tensor.detach().clone()
    for inner in stock.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for p in group["params"]:
                outcome.state += [p.detach().clone()]
                outcome.state += [torch.as_tensor(v).clone() for _, v in sorted(inner.optimizer.state[p].items())]
        if inner.grad_scaler is not None:
            outcome.state.append(inner.grad_scaler.scale.clone())
    if finish:
        finish(chunks, optimizer)
    parallel_state.destroy_model_parallel()
    return outcome


def _poisoned_parameter(chunks: list[Any], groups: Any) -> torch.Tensor | None:
    """A parameter of the last stage that only this stage has."""
    if groups.pp.rank() != groups.pp.size() - 1:
        return None
    parameter: torch.Tensor = chunks[-1].module.decoder.layers[-1].input_layernorm.weight
    return parameter
