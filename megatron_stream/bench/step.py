"""One rank of `megatron-stream bench step`: the same training stepped in turns by stock Megatron and by us.

All contestants step one model with one optimizer, so that a turn differs from the next in the stepping only.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_stream.bench.step_lane import NeighbourLane
from megatron_stream.check.exact_case import Case, Size
from megatron_stream.check.exact_job import build_job
from megatron_stream.errors import UserError
from megatron_stream.observe.events import EventLog
from megatron_stream.train.stage_optimizer import StageOptimizer, Stepping
from megatron_stream.train.timers import EventTimers


@dataclass(frozen=True)
class Contestant:
    """`mode`: stock, barrier or optimistic. `sending`: each rank's new weights go to another process."""

    mode: str
    sending: bool

    @property
    def name(self) -> str:
        return f"{self.mode}, sending" if self.sending else self.mode


CONTESTANTS = tuple(
    Contestant(mode, sending) for sending in (False, True) for mode in ("stock", "barrier", "optimistic")
)


@dataclass(frozen=True)
class Plan:
    """`rounds` turns of each contestant, each of one warm-up and `steps` measured steps of [2, length] tokens."""

    case: Case
    rounds: int
    steps: int
    length: int
    deadline_s: float = 120.0


def step_plan(arguments: argparse.Namespace) -> Plan:
    """Raises UserError when the layout cannot be run here."""
    a = arguments
    size = Size(a.layers, a.hidden, ffn=3 * a.hidden, heads=4, kv_heads=2, vocabulary=2048)
    case = Case(a.pp, a.vp, a.tp, a.dp, clip="never", microbatches=a.microbatches, one_length=True, size=size)
    case = replace(case, overlap=a.dp > 1 or a.pp == 1)  # as users of DP set it; one stage steps by its buckets
    if min(a.pp, a.vp, a.tp, a.dp, a.microbatches, a.length, a.layers, a.hidden, a.rounds, a.steps) < 1:
        raise UserError("every number of `bench step` must be at least 1")
    if a.layers % (a.pp * a.vp):
        raise UserError(f"--layers {a.layers} does not divide into pp {a.pp} x vp {a.vp} model chunks")
    if a.hidden % 8 or (a.tp > 2):
        raise UserError("--hidden must be a multiple of 8 (4 heads), and --tp 1 or 2 (2 key-value heads)")
    if a.vp > 1 and (a.pp == 1 or a.microbatches % a.pp):
        raise UserError("--vp needs --pp of at least 2, and --microbatches in multiples of it")
    rounds, steps = (2, 2) if a.quick else (a.rounds, a.steps)
    return Plan(case, rounds, steps, length=a.length)


@dataclass(frozen=True)
class Times:
    """One rank's step; seconds since the epoch. `final`: its new weights were all there; `sent`: at the receiver."""

    contestant: str
    round: int
    start: float
    backward_end: float
    final: float
    ready: float
    sent: float | None


@dataclass(frozen=True)
class Measured:
    """One rank's part of the bench."""

    stage: int
    times: list[Times]
    send_bytes: int
    copy_bytes: int
    copy_bytes_predicted: int


class _LastBackward(EventTimers):
    """Megatron's timer hook: notes when the last backward ended."""

    def __init__(self) -> None:
        super().__init__(EventLog(None), "")
        self.end = 0.0

    def record(self, name: str, start: float) -> None:
        if name == "backward":
            self.end = time.time()


def measure(plan: Plan) -> Measured:
    """Run the plan on this rank; collective."""
    from megatron_stream.platform.cpu import enable_cpu

    if not torch.cuda.is_available():
        enable_cpu()
    job = build_job(plan.case)
    chunks, groups, stock = job.chunks, job.groups, job.optimizer
    timers = job.config.timers = _LastBackward()
    ours = {mode: StageOptimizer(stock, chunks, groups, Stepping(mode)) for mode in ("barrier", "optimistic")}
    units = ours["optimistic"].units.all()
    lane = NeighbourLane(units, plan.deadline_s)
    lane.start()
    generator = torch.Generator().manual_seed(groups.dp.rank())
    shape, vocabulary = (2, plan.length), plan.case.size.vocabulary
    data = [(torch.randint(0, vocabulary, shape, generator=generator), 1.0) for _ in range(plan.case.microbatches)]

    def step(contestant: Contestant, number: int) -> Times:
        optimizer = ours.get(contestant.mode, stock)
        dist.barrier()
        start = time.time()
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        job.run_schedule(data)
        optimizer.step()
        ready = time.time()
        if optimizer is stock:
            for unit in units:
                lane.stepped(unit.name, 0, 0)
        final = ready if optimizer is stock else max(lane.stepped_at.values())
        if contestant.sending:
            lane.wait()
        sent = max(lane.sent_at.values()) if contestant.sending else None
        return Times(contestant.name, number, start, timers.end, final, ready, sent)

    times = []
    for number in range(plan.rounds):
        for contestant in CONTESTANTS:
            lane.active = contestant.sending
            if optimizer := ours.get(contestant.mode):
                optimizer.listener = lane
                optimizer.attach(job.config)
            step(contestant, number)
            times += [step(contestant, number) for _ in range(plan.steps)]
            if optimizer:
                optimizer.detach()
    lane.close()
    copied = ours["optimistic"]
    return Measured(groups.pp.rank(), times, lane.nbytes, copied.copy_bytes, copied.predicted_copy_bytes)
