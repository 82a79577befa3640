"""Stepping each pipeline stage right after its last backward, bitwise equal to stock Megatron.

Stock Megatron waits for the gradient norm of all stages before any stage may step. Here a stage joins a
non-blocking all-reduce of its part of the squared norm, steps as if no clipping will happen, and goes on
(optimizer post-validation, Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). When the norm is
known the step is validated, or rolled back from an exact copy and redone with the clip coefficient.

Units of a stage: `stage S` steps after its last backward. `stage S late` holds the output layer's copy of a
tied embedding: its gradient needs the first stage, so it steps in `step()`, when the verdict is known. The
first stage finishes its backward last, has nothing to gain from optimism, and steps once, in `step()`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_stream.observe.events import EventLog
from megatron_stream.train.optimism import Optimism

logger = logging.getLogger("megatron_stream.trainer")


class StepListener(Protocol):
    """Told about every unit's weights. Version: the one that the step makes."""

    def before_change(self, unit: str) -> None:
        """The unit's weights are about to be overwritten; returns when nobody reads them any more."""

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        """The unit's weights are those of `version`, not yet validated: they may be sent, not committed."""

    def validated(self, unit: str, version: int, attempt: int) -> None:
        """The global norm accepted this attempt."""


@dataclass
class Verdict:
    """What the global gradient norm says. `accepted`: a step without clipping was right."""

    norm: float
    clip: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def accepted(self) -> bool:
        # The same comparison as megatron/core/optimizer/clip_grads.py, clip_grad_by_total_norm_fp32.
        return self.finite and not (self.clip > 0 and self.clip / (self.norm + 1.0e-6) < 1.0)


class _GroupOfOne:
    """What finalize_model_grads takes for an embedding group without peers (it asks for the size only)."""

    def size(self) -> int:
        return 1


class StageOptimizer:
    """Wraps Megatron's optimizer of one rank; `step` and `zero_grad` as before, the rest by hook.

    `optimizer` is what `get_megatron_optimizer` returned: a ChainedOptimizer of one distributed optimizer.
    A step whose gradients are inf or nan is skipped on every stage, and changes no version.

    Raises:
        ValueError: for a set-up in which the step could not be exact.
    """

    def __init__(
        self,
        optimizer: Any,
        chunks: list[Any],
        groups: Any,
        *,
        optimistic: bool,
        listener: StepListener | None = None,
        events: EventLog | None = None,
        version: int = 0,
    ) -> None:
        inner = getattr(optimizer, "chained_optimizers", [optimizer])
        if len(inner) != 1 or len(chunks) != 1:
            raise ValueError("StageOptimizer steps dense models with one chunk a rank; use stepping=barrier")
        if groups.dp_cp.size() > 1:
            raise ValueError("StageOptimizer needs data-parallel size 1 in this release")
        if inner[0].grad_scaler is not None:
            raise ValueError("StageOptimizer does not support a loss scaler (fp16); use bfloat16 or float32")
        self.optimizer = optimizer
        self.version = version
        self.rollbacks = 0
        self.listener = listener
        self._inner = inner[0]
        self._chunk = chunks[0]
        self._groups = groups
        self._events = events or EventLog(None)
        self._stage = groups.pp.rank()
        # The first stage would gain nothing: it ends its backward last, when all other parts of the norm are in.
        self._optimism = Optimism() if optimistic and self._stage > 0 else None
        self._late = self._late_parameters()
        self._early = [p for p in self._inner.get_parameters() if id(p) not in {id(q) for q in self._late}]
        self._saved: list[torch.Tensor] = []
        self._norm: tuple[torch.Tensor, dist.Work] | None = None
        self._attempt = 0
        self._took_step = False

    @property
    def unit(self) -> str:
        return f"stage {self._stage}"

    @property
    def late_unit(self) -> str | None:
        return f"stage {self._stage} late" if self._late else None

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def attach(self, model_config: Any) -> None:
        """Put our hook where the schedule finishes a stage's gradients."""
        model_config.finalize_model_grads_func = self.finish_backward

    def late_names(self) -> set[str]:
        """Names of the model parameters in the late unit."""
        return {"output_layer.weight"} if self._late else set()

    def _late_parameters(self) -> list[torch.Tensor]:
        """Shards of the tied output layer on the last stage."""
        stages, model = self._groups.pp.size(), self._chunk.module
        if stages == 1 or self._stage != stages - 1 or not model.share_embeddings_and_output_weights:
            return []
        tied = model.shared_embedding_or_output_weight()
        pairs = zip(
            self._inner.model_float16_groups + self._inner.model_fp32_groups,
            self._inner.shard_fp32_from_float16_groups + self._inner.shard_fp32_groups,
            strict=True,
        )
        shards = [s for group, own in pairs for p, s in zip(group, own, strict=True) if p is tied]
        assert len(shards) == 1, "the tied output layer is not in the optimizer"
        return shards

    # --- after the last backward of this stage, called by Megatron's schedule ---

    def finish_backward(
        self, model: list[Any], num_tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool = False
    ) -> None:
        """Stock `finalize_model_grads`, then the step of everything whose gradient is final."""
        from megatron.core.distributed import finalize_model_grads

        assert num_tokens is None, "count loss tokens before the schedule (calculate_per_token_loss=False)"
        groups = copy.copy(pg_collection or self._groups)
        if self._late:
            # The exchange with the first stage would hold this stage back; step() makes it up.
            groups.embd = _GroupOfOne()
        finalize_model_grads(model, None, groups, force_all_reduce)
        self._inner._copy_model_grads_to_main_grads()
        self._norm = self._start_norm()
        self._attempt += 1  # never reused: a skipped step's version is stepped again
        self._took_step = False
        if self._optimism is not None and self._optimism.on:
            self._before_change(self.unit)
            self._save()
            self._apply(self.unit, self._early, optimistic=True)
            self._took_step = True
            self._tell_stepped(self.unit)

    def _start_norm(self) -> tuple[torch.Tensor, dist.Work]:
        """This rank's part of the squared norm, on its way into the sum over all ranks.

        The same functions, order and group as get_grad_norm_fp32 (megatron/core/optimizer/clip_grads.py), so
        that the sum is bitwise the same. The tied copy does not count: its owner is the first stage.
        """
        from megatron.core.optimizer.clip_grads import l2_norm_impl, multi_tensor_applier

        grads = self._inner.get_main_grads_for_grad_norm()
        if grads:
            overflow = torch.zeros(1, dtype=torch.int, device=grads[0].device)
            norm, _ = multi_tensor_applier(l2_norm_impl, overflow, [grads], False)
        else:
            norm = torch.zeros(1, dtype=torch.float, device=self._early[0].device)
        squared = norm**2.0
        group = self._inner.get_grad_stats_parallel_group()
        return squared, dist.all_reduce(squared, dist.ReduceOp.SUM, group=group, async_op=True)

    # --- where the training loop calls the optimizer ---

    @torch.no_grad()
    def step(self) -> tuple[bool, float, int | None]:
        """Finish the step: (weights changed, gradient norm, None), as Megatron's optimizers return it."""
        assert self._norm is not None, "step() without a finished backward; is the hook attached?"
        if self._late:
            self._exchange_tied_gradient()
        verdict = self._wait_for_verdict()
        self._consider(verdict)
        if not verdict.accepted and self._took_step:
            self._roll_back()
        if not verdict.finite:
            return False, verdict.norm, None
        if not self._took_step:
            self._clip(self._early, verdict)
            self._before_change(self.unit)
            self._apply(self.unit, self._early, optimistic=False)
            self._tell_stepped(self.unit)
        self._tell_validated(self.unit)
        if self._late:
            assert self.late_unit is not None
            self._clip(self._late, verdict)
            self._before_change(self.late_unit)
            self._apply(self.late_unit, self._late, optimistic=False)
            self._tell_stepped(self.late_unit)
            self._tell_validated(self.late_unit)
        self.version += 1
        return True, verdict.norm, None

    def _exchange_tied_gradient(self) -> None:
        from megatron.core.distributed.finalize_model_grads import _allreduce_word_embedding_grads

        _allreduce_word_embedding_grads([self._chunk], self._chunk.config, self._groups.embd, self._groups.pp)
        self._inner._copy_model_grads_to_main_grads()

    def _wait_for_verdict(self) -> Verdict:
        assert self._norm is not None
        squared, work = self._norm
        with self._events.span(f"trainer stage {self._stage}", "wait verdict", version=self.version + 1):
            work.wait()
        self._norm = None
        verdict = Verdict(squared.item() ** 0.5, self._inner.config.clip_grad)
        self._events.instant(
            f"trainer stage {self._stage}",
            "validated",
            version=self.version + 1,
            norm=verdict.norm,
            clipped=not verdict.accepted,
        )
        return verdict

    def _consider(self, verdict: Verdict) -> None:
        if self._optimism is not None and self._optimism.record(verdict.accepted):
            logger.info(
                "stage %d: %.0f%% of the last steps needed clipping; stepping %s from here on",
                self._stage,
                100 * self._optimism.rejection_rate,
                "before the norm is known" if self._optimism.on else "after the norm is known",
            )

    def _clip(self, parameters: list[torch.Tensor], verdict: Verdict) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        if verdict.clip > 0:
            clip_grad_by_total_norm_fp32(parameters, verdict.clip, verdict.norm)

    def _apply(self, unit: str, parameters: list[torch.Tensor], optimistic: bool) -> None:
        """Step `parameters` only, then copy main parameters into the model's."""
        with self._events.span(
            f"trainer stage {self._stage}",
            "optimizer step",
            version=self.version + 1,
            unit=unit,
            optimistic=optimistic,
        ):
            chosen = {id(p) for p in parameters}
            others = [p for p in self._inner.get_parameters() if id(p) not in chosen]
            self._hide(others, self._inner.optimizer.step)
            self._inner._copy_main_params_to_model_params()

    @staticmethod
    def _hide(parameters: list[torch.Tensor], action: Callable[[], Any]) -> None:
        """Run `action` while `parameters` have no gradient: torch optimizers leave those alone."""
        grads = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            action()
        finally:
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad

    # --- the exact copy ---

    def _state(self) -> list[torch.Tensor]:
        """Every tensor that the step of the early parameters changes."""
        state = self._inner.optimizer.state
        tensors = [p.data for p in self._early]
        for p in self._early:
            tensors += [value for value in state.get(p, {}).values() if isinstance(value, torch.Tensor)]
        return tensors

    def _save(self) -> None:
        tensors = self._state()
        if [t.shape for t in tensors] != [t.shape for t in self._saved]:
            self._saved = [torch.empty_like(t) for t in tensors]
        torch._foreach_copy_(self._saved, tensors)

    def _roll_back(self) -> None:
        self.rollbacks += 1
        with self._events.span(f"trainer stage {self._stage}", "rollback", version=self.version + 1, unit=self.unit):
            self._before_change(self.unit)
            if len(self._saved) == len(self._early):
                self._inner.optimizer.state.clear()  # it was the first step: there was no state before it
                torch._foreach_copy_([p.data for p in self._early], self._saved)
            else:
                torch._foreach_copy_(self._state(), self._saved)
            self._inner._copy_main_params_to_model_params()
        self._took_step = False
        self._attempt += 1

    def _before_change(self, unit: str) -> None:
        if self.listener is not None:
            self.listener.before_change(unit)

    def _tell_stepped(self, unit: str) -> None:
        if self.listener is not None:
            self.listener.stepped(unit, self.version + 1, self._attempt)

    def _tell_validated(self, unit: str) -> None:
        if self.listener is not None:
            self.listener.validated(unit, self.version + 1, self._attempt)
