"""The step's global gradient norm and inf flag, on their way through an all-reduce that nobody waits for yet.

The same functions, order of gradients and group as stock Megatron's (optimizer/optimizer.py, ChainedOptimizer.step;
optimizer/clip_grads.py, get_grad_norm_fp32), so that the values are bitwise the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Verdict:
    """What the gradients of all stages say. `found_inf`: None without a loss scaler."""

    norm: float
    clip: float
    found_inf: list[bool] | None

    @property
    def skipped(self) -> bool:
        """No stage steps: a loss scaler found inf or nan, or the norm itself is not finite."""
        return any(self.found_inf) if self.found_inf is not None else not math.isfinite(self.norm)

    @property
    def accepted(self) -> bool:
        """A step without clipping was right."""
        # The same comparison as clip_grad_by_total_norm_fp32.
        return not self.skipped and not (self.clip > 0 and self.clip / (self.norm + 1.0e-6) < 1.0)


def unscale(mains: Sequence[torch.Tensor], scaler: Any, found_inf: torch.Tensor) -> None:
    """Divide these gradients by the loss scale, and set `found_inf` if one is inf or nan.

    As MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan, for a part of the parameters.
    """
    grads = [main.grad for main in mains if main.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scaler.inv_scale)


class GradStats:
    """One step's statistics: started when this rank's gradients are final, waited for before the step ends."""

    def __init__(self, chain: Sequence[Any], clip: float) -> None:
        self._chain = list(chain)
        self._clip = clip
        group = chain[0].get_grad_stats_parallel_group() if chain else None
        self._squared = self._own_squared_norm()
        self._works = [dist.all_reduce(self._squared, dist.ReduceOp.SUM, group=group, async_op=True)]
        self._scaled = [inner for inner in self._chain if inner.grad_scaler is not None]
        for inner in self._scaled:
            self._works.append(dist.all_reduce(inner.found_inf, dist.ReduceOp.MAX, group=group, async_op=True))

    def _own_squared_norm(self) -> torch.Tensor:
        from megatron.core.optimizer.clip_grads import l2_norm_impl, multi_tensor_applier

        grads = [grad for inner in self._chain for grad in inner.get_main_grads_for_grad_norm()]
        device = torch.cuda.current_device()
        if grads:
            overflow = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = multi_tensor_applier(l2_norm_impl, overflow, [grads], False)
        else:
            norm = torch.zeros(1, dtype=torch.float, device=device)
        squared: torch.Tensor = norm**2.0
        return squared

    def wait(self) -> Verdict:
        """Ends at the process group's own deadline, with its error naming the rank."""
        for work in self._works:
            work.wait()
        found = [inner.found_inf.item() > 0 for inner in self._scaled] if self._scaled else None
        return Verdict(self._squared.item() ** 0.5, self._clip, found)
