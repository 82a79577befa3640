"""`megatron-stream check exact`: per-stage stepping against stock Megatron-core, bit by bit.

The referee is stock Megatron in the same processes and layout; and one process, to rounding, because both sides
of a bitwise comparison could share a wrong setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.check.exact_train import Outcome, train
from megatron_stream.check.ranks import Ranks
from megatron_stream.errors import RunError

ROUNDING = 1e-3  # relative difference of gradient norms against one process, fp32
Break = Callable[[Any], None]


@dataclass(frozen=True)
class Result:
    """`differences`: what is not bitwise equal, by rank. `norm_error`: against one process, relative."""

    case: Case
    differences: list[str]
    norms: list[float | None]
    rollbacks: int
    copy_bytes: int
    norm_error: float | None = None

    @property
    def ok(self) -> bool:
        return not self.differences and (self.norm_error is None or self.norm_error < ROUNDING)


def _differences(a: Outcome, b: Outcome) -> list[str]:
    found = [k for k in a.weights if not torch.equal(a.weights[k], b.weights[k])]
    if len(a.state) != len(b.state) or not all(torch.equal(x, y) for x, y in zip(a.state, b.state, strict=True)):
        found.append("optimizer state")
    if a.steps != b.steps:
        found.append("norms, skipped steps or zeros")
    return found


def _wrap(break_: Break | None, optimizer: Any, chunks: list[Any], config: Any, groups: Any) -> Any:
    from megatron_stream.train.stage_optimizer import StageOptimizer

    ours = StageOptimizer(optimizer, chunks, groups)
    ours.attach(config)
    if break_ is not None:
        break_(ours)
    return ours


def compare(case: Case, break_: Break | None = None) -> tuple[list[str], list[float | None], int, int]:
    """On one rank: train by stock and by us; what differs, our norms, rollbacks and bytes of the copy."""
    from megatron_stream.platform.cpu import enable_cpu

    if not torch.cuda.is_available():
        enable_cpu()
    stock = train(case)
    ours = train(case, partial(_wrap, break_))
    return _differences(stock, ours), [step[1] for step in ours.steps], ours.rollbacks, ours.copy_bytes


def check_case(ranks: Ranks, case: Case, break_: Break | None = None) -> Result:
    found = ranks.call(case.world, compare, case, break_)
    differences = [f"rank {rank}: {what}" for rank, answer in enumerate(found) for what in answer[0]]
    return Result(case, differences, found[0][1], max(f[2] for f in found), sum(f[3] for f in found))


def one_process(case: Case) -> Case:
    """The same model and step in one process. Data-parallel ranks see other data, so dp stays."""
    lengths = not case.variable_lengths
    return replace(case, pp=1, vp=1, tp=1, overlap=False, sequence_parallel=False, one_length=lengths)


def norm_error(case: Result, one: Result) -> float | None:
    """Largest relative difference of gradient norms, over the steps that neither skipped."""
    pairs = [(a, b) for a, b in zip(case.norms, one.norms, strict=True) if a and b]
    return max((abs(a - b) / b for a, b in pairs), default=None)


def check_grid(ranks: Ranks, cases: list[Case]) -> Iterator[Result]:
    """Each case, and the norms of one process where rounding alone may differ: in fp32, without experts (rounding
    may route a token elsewhere) or sequence parallelism (which pads the sequences)."""
    ones: dict[Case, Result] = {}
    for case in cases:
        try:
            result = check_case(ranks, case)
        except RunError as error:
            yield Result(case, [str(error)], [], 0, 0)
            continue
        comparable = case.dtype == "float32" and not case.experts and not case.sequence_parallel
        if comparable and case.world > case.dp:
            one = one_process(case)
            if one not in ones:
                ones[one] = check_case(ranks, one)
            result = replace(result, norm_error=norm_error(result, ones[one]))
        yield result
