"""Stepping each part of a pipeline stage as soon as its gradients are final, bitwise equal to stock Megatron.

Stock Megatron waits for the gradient norm of all stages before any stage may step. Here a rank steps a unit
(see `units.py`) as if no clipping will happen, joins a non-blocking all-reduce of the norm, and goes on
(optimizer post-validation, Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). When the norm is
known the step is validated, or rolled back from an exact copy and redone with the clip coefficient.

What steps after the verdict anyway: the late unit, and what ends with the first stage, whose backward ends last.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_stream.observe.events import EventLog
from megatron_stream.stream.listener import StepListener
from megatron_stream.train.grad_stats import GradStats, Verdict, unscale
from megatron_stream.train.hooks import Detach, GroupOfOne, Reduced, attach_buckets, attach_chunks, attach_finalize
from megatron_stream.train.optimism import Optimism
from megatron_stream.train.saved_state import PLACES, SavedState, predicted_bytes
from megatron_stream.train.shards import chain_of, check_supported, shards_of
from megatron_stream.train.units import Unit, make_units

logger = logging.getLogger("megatron_stream.trainer")

MODES = ("optimistic", "barrier")


def _refuse_swapped_messages(config: Any, groups: Any, num_chunks: int) -> None:
    """Interleaved stages send two messages at once to the same rank; Megatron takes one for the other where it
    exchanges their shapes first, and on gloo in its batched form (DESIGN 5.4): a hang, or wrong gradients."""
    if num_chunks == 1:
        return
    two, gloo = groups.pp.size() == 2, torch.distributed.get_backend(groups.pp) == "gloo"
    for setting, wrong in (
        ("variable_seq_lengths", config.variable_seq_lengths and (two or gloo)),
        ("batch_p2p_comm", config.batch_p2p_comm and two and gloo),
    ):
        if wrong:
            raise ValueError(
                f"{setting}=True confuses the messages of interleaved stages in this layout, without an error: "
                "set it to False" + (" and pad the sequences" if setting == "variable_seq_lengths" else "")
            )


def _size(groups: Any, name: str) -> int:
    group = getattr(groups, name, None)
    return 1 if group is None else int(group.size())


@dataclass(frozen=True)
class Stepping:
    """`mode` optimistic: before the norm is known, falling back to barrier while most steps are rolled back.
    barrier: after it, as stock. `copy_to`: where the copy for a rollback lies, device or host."""

    mode: str = "optimistic"
    copy_to: str = "device"

    def __post_init__(self) -> None:
        for name, value, known in (("mode", self.mode, MODES), ("copy_to", self.copy_to, PLACES)):
            if value not in known:
                raise ValueError(f"Stepping.{name} is {value!r}; it must be one of {', '.join(known)}")


class StageOptimizer:
    """Wraps what `get_megatron_optimizer` returned; everything that is not here is the wrapped optimizer's.

    A step whose gradients are inf or nan is skipped on every stage, and changes no version. With a loss scaler
    stock does the same; without one stock would write nan into the weights.

    Raises:
        ValueError: for a set-up in which the step could not be exact.
    """

    def __init__(
        self,
        optimizer: Any,
        chunks: Sequence[Any],
        groups: Any,
        stepping: Stepping | None = None,
        *,
        listener: StepListener | None = None,
        events: EventLog | None = None,
        version: int = 0,
    ) -> None:
        stepping = stepping or Stepping()
        check_supported(optimizer, chunks)
        config = chunks[0].config
        self._per_token = config.calculate_per_token_loss
        if self._per_token and stepping.mode == "optimistic":
            raise ValueError(
                "calculate_per_token_loss divides gradients by a number that the last stage broadcasts at the end; "
                "divide the loss by the step's tokens instead, or use mode=barrier"
            )
        if config.mtp_num_layers or getattr(config, "has_cond_embedder", False) or _size(groups, "pos_embd") > 1:
            raise ValueError("per-stage stepping does not support embeddings shared by middle stages")
        _refuse_swapped_messages(config, groups, len(chunks))
        self.optimizer = optimizer
        self.version = version
        self.rollbacks = 0
        self.listener = listener or StepListener()
        self._chunks = list(chunks)
        self._groups = groups
        self._events = events or EventLog(None)
        self._stage = groups.pp.rank()
        self._track = f"trainer stage {self._stage}"
        self._chain = chain_of(optimizer)
        self.units = make_units(shards_of(optimizer, chunks), chunks, config, groups, exchange=not self._per_token)
        self._by_key = {id(unit.key) if len(chunks) == 1 else unit.key: unit for unit in self.units.early}
        # What steps before the verdict, as long as that pays. What ends with the first stage gains nothing: all
        # other parts of the norm are in by then.
        ends = [self.units.stage] if self._stage > 0 else []
        self._optimistic = [u for u in (*self.units.early, *ends) if u.shards] if stepping.mode == "optimistic" else []
        self._optimism = Optimism() if self._optimistic else None
        self._saved = SavedState(self._chain, stepping.copy_to)
        # As DDP.start_param_sync, but where one rank has all, stock copies the parameters onto themselves.
        self._gathered = [
            buckets
            for chunk in self._chunks
            for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            if not chunk.ddp_config.overlap_param_gather and buckets.intra_distributed_optimizer_instance_size > 1
        ]
        self._steps_before: list[Any] = []
        self._stats: GradStats | None = None
        self._reduced: set[int] = set()
        self._pending: list[Unit] = []
        self._attempt = 0
        self._open = False
        self._detach: list[Detach] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    @property
    def copy_bytes(self) -> int:
        """Memory that the copy for a rollback takes on this rank."""
        return self._saved.nbytes

    @property
    def predicted_copy_bytes(self) -> int:
        """The same by the formula in docs/per_stage_stepping.md."""
        return predicted_bytes(self._optimistic)

    def attach(self, config: Any) -> None:
        """Put our hooks where the schedule finishes gradients."""
        self._detach = [attach_finalize(config, self._finish_backward)]
        if self._optimism is not None and len(self._chunks) > 1:
            self._detach.append(attach_chunks(config, self._chunks, self._chunk_done))
        elif self._optimism is not None and self.units.early:
            self._detach.append(attach_buckets(self._chunks[0], self._bucket_started))

    def detach(self) -> None:
        """Take our hooks away again: the wrapped optimizer is stock Megatron's as it was."""
        while self._detach:
            self._detach.pop()()

    # --- during the backward ---

    def _open_step(self) -> None:
        if self._open:
            return
        self._open = True
        self._attempt += 1  # never reused: a skipped step's version is stepped again
        # Fused optimizers count steps by group, and would count each unit's.
        self._steps_before = [
            [copy.deepcopy(group.get("step")) for group in inner.optimizer.param_groups] for inner in self._chain
        ]
        for inner in self._chain:
            if inner.grad_scaler is not None:
                inner.found_inf.fill_(0.0)

    def _chunk_done(self, index: int) -> None:
        unit = self._by_key.get(index)
        if unit is None or self._optimism is None or not self._optimism.on:
            return
        self._chunks[index].finish_grad_sync()
        self._reduced.add(index)
        self._step_early(unit)

    def _bucket_started(self, group: Any) -> None:
        """Step the bucket before this one, whose reduction had this bucket's backward to end in."""
        if self._optimism is None or not self._optimism.on:
            return
        for ready in self._pending:
            ready.key.grad_reduce_handle.wait()
            self._step_early(ready)
        self._pending = [unit] if (unit := self._by_key.get(id(group))) else []

    @torch.no_grad()
    def _step_early(self, unit: Unit) -> None:
        self._open_step()
        self._take_gradients(unit)
        self.listener.before_change(unit.name)
        self._saved.save(unit)
        self._apply(unit, optimistic=True)

    @torch.no_grad()
    def _take_gradients(self, unit: Unit, found_inf: list[torch.Tensor] | None = None) -> None:
        for shard in unit.shards:
            shard.take_gradient()
        for number, inner in enumerate(self._chain):
            mains = [shard.main for shard in unit.shards if shard.optimizer == number]
            if inner.grad_scaler is not None and mains:
                unscale(mains, inner.grad_scaler, found_inf[number] if found_inf else inner.found_inf)

    # --- after the last backward of this rank, called by Megatron's schedule ---

    @torch.no_grad()
    def _finish_backward(
        self, model: list[Any], num_tokens: Any = None, pg_collection: Any = None, force_all_reduce: bool = False
    ) -> None:
        """Stock `finalize_model_grads`, then the step of what is final now."""
        from megatron.core.distributed import finalize_model_grads

        groups = copy.copy(pg_collection or self._groups)
        if self.units.late.shards:
            # The exchange with the first stage would hold this stage back; step() makes it up.
            groups.embd = GroupOfOne()
        chunks = [Reduced(chunk) if index in self._reduced else chunk for index, chunk in enumerate(model)]
        finalize_model_grads(chunks, num_tokens, groups, force_all_reduce)
        self._reduced.clear()
        self._pending.clear()
        self._open_step()
        for unit in (*self.units.early, self.units.stage):
            if not unit.stepped:
                self._take_gradients(unit)
        self._stats = self._start_stats()
        if self._optimism is not None and self._optimism.on and self._stage > 0:
            for unit in self._optimistic:
                if not unit.stepped:
                    self.listener.before_change(unit.name)
                    self._saved.save(unit)
                    self._apply(unit, optimistic=True)

    def _start_stats(self) -> GradStats:
        return GradStats(self._chain, self.optimizer.config.clip_grad)

    # --- where the training loop calls the optimizer ---

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, Any]:
        """Finish the step: (weights changed, gradient norm, zeros in the gradients), as Megatron's optimizers."""
        assert self._stats is not None, "step() without a finished backward; is the hook attached?"
        if self.units.late.shards:
            self._exchange_tied_gradient()
        verdict = self._wait_for_verdict(self._stats)
        self._stats, self._open = None, False
        self._consider(verdict)
        for inner, found in zip(self._chain, verdict.found_inf or [], strict=False):
            inner.grad_scaler.update(found)
        if not verdict.accepted:
            self._roll_back()
        if verdict.skipped:
            return False, None if verdict.found_inf else verdict.norm, None
        if not verdict.accepted:
            self._clip(verdict)
        zeros = self.optimizer.count_zeros() if self.optimizer.config.log_num_zeros_in_grad else None
        for unit in self.units.all():
            if not unit.stepped:
                self.listener.before_change(unit.name)
                self._apply(unit, optimistic=False)
            unit.stepped = False
            self.listener.validated(unit.name, self.version + 1, self._attempt)
        for buckets in self._gathered:
            buckets.start_param_sync()
        self.version += 1
        return True, verdict.norm, zeros

    def _exchange_tied_gradient(self) -> None:
        from megatron.core.distributed.finalize_model_grads import _allreduce_word_embedding_grads

        config = self._chunks[0].config
        _allreduce_word_embedding_grads(self._chunks, config, self._groups.embd, self._groups.pp)
        # The first stage has the same sum, and its flag.
        unused = [torch.zeros(1, device=torch.cuda.current_device()) for _ in self._chain]
        self._take_gradients(self.units.late, unused)

    def _wait_for_verdict(self, stats: GradStats) -> Verdict:
        version = self.version + 1
        with self._events.span(self._track, "wait verdict", version=version):
            verdict = stats.wait()
        clipped = not verdict.accepted
        self._events.instant(self._track, "validated", version=version, norm=verdict.norm, clipped=clipped)
        return verdict

    def _consider(self, verdict: Verdict) -> None:
        if self._optimism is not None and self._optimism.record(verdict.accepted):
            logger.info(
                "stage %d: %.0f%% of the last steps needed clipping; stepping %s from here on",
                self._stage,
                100 * self._optimism.rejection_rate,
                "before the norm is known" if self._optimism.on else "after the norm is known",
            )

    def _clip(self, verdict: Verdict) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for inner in self._chain:
            if parameters := inner.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, verdict.clip, verdict.norm)

    def _apply(self, unit: Unit, optimistic: bool) -> None:
        """Step the unit's parameters only: torch's optimizers leave those without a gradient alone."""
        version = self.version + 1
        with self._events.span(self._track, "optimizer step", version=version, unit=unit.name, optimistic=optimistic):
            own = {id(shard.main) for shard in unit.shards}
            for inner, before in zip(self._chain, self._steps_before, strict=True):
                hidden = {p: p.grad for p in inner.get_parameters() if id(p) not in own}
                if len(hidden) == len(inner.get_parameters()):
                    continue
                for group, step in zip(inner.optimizer.param_groups, before, strict=True):
                    if step is not None:
                        group["step"] = copy.deepcopy(step)
                try:
                    for parameter in hidden:
                        parameter.grad = None
                    inner.optimizer.step()
                finally:
                    for parameter, grad in hidden.items():
                        parameter.grad = grad
            for shard in unit.shards:
                shard.publish()
        unit.stepped = True
        self.listener.stepped(unit.name, version, self._attempt)

    def _roll_back(self) -> None:
        """Take back what was stepped early."""
        stepped = [unit for unit in self.units.all() if unit.stepped]
        if not stepped:
            return
        self.rollbacks += 1
        for unit in stepped:
            with self._events.span(self._track, "rollback", version=self.version + 1, unit=unit.name):
                self.listener.before_change(unit.name)
                self._saved.restore(unit)
                for shard in unit.shards:
                    shard.publish()
            unit.stepped = False
        for inner, before in zip(self._chain, self._steps_before, strict=True):
            for group, step in zip(inner.optimizer.param_groups, before, strict=True):
                if step is not None:
                    group["step"] = step
        self._attempt += 1
