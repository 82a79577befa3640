"""The trainer's end: sends each unit's new weights to the engine in the background of training.

One `EngineLink` an engine, with a thread of its own. The training thread only leaves word that a unit has
stepped; it never waits for a byte. If it steps again before a version was packed, that version is passed
over (newest wins).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_stream.layout.blocks import Block
from megatron_stream.layout.llama import vllm_blocks
from megatron_stream.layout.plan import Copy, PlanError, make_plan
from megatron_stream.model.hf import ModelSpec
from megatron_stream.observe.events import EventLog
from megatron_stream.stream.control import ControlClient
from megatron_stream.stream.lane import LaneError, LaneSender
from megatron_stream.stream.listener import StepListener
from megatron_stream.stream.messages import (
    Begin,
    Committed,
    Hello,
    Leave,
    Message,
    Passed,
    Validated,
    Welcome,
    WorkerInfo,
    Wrote,
    encode,
)
from megatron_stream.stream.packing import Packing, by_unit_and_worker, make_packing

_IDLE_POLL_S = 0.02


def engine_blocks(spec: ModelSpec, worker: WorkerInfo) -> list[Block]:
    """What a live engine worker needs, checked against its own parameters.

    Raises PlanError naming a parameter that the tables do not know or describe with another shape.
    """
    blocks = vllm_blocks(spec, [info.name for info in worker.parameters])
    for info in worker.parameters:
        own = [block for block in blocks if block.local == info.name]
        if not own:
            raise PlanError(f"engine worker {worker.worker} has a parameter {info.name} that no table maps")
        for block in own:
            inside = len(block.local_box) == len(info.shape) and all(
                stop <= size for (_, stop), size in zip(block.local_box, info.shape, strict=True)
            )
            if not inside:
                raise PlanError(f"engine parameter {info.name} has shape {info.shape}; {block} does not fit")
    return blocks


class EngineLink:
    """Streams one trainer rank's units to one engine.

    `units`: unit name -> names of the parameters in it. `sources`: what every trainer rank holds.
    `committed` is the version that the engine computes with, `error` what ended the link. The engine may still
    be starting: it has `start_deadline_s` seconds to answer first, `deadline_s` afterwards.
    """

    def __init__(
        self,
        address: str,
        lane: LaneSender,
        *,
        rank: int,
        world_size: int,
        stage: int,
        spec: ModelSpec,
        sources: Mapping[int, Sequence[Block]],
        units: Mapping[str, Sequence[str]],
        parameters: Mapping[str, torch.Tensor],
        deadline_s: float,
        start_deadline_s: float,
        events: EventLog,
    ) -> None:
        self.address = address
        self.committed = 0
        self.error: LaneError | None = None
        self._lane = lane
        self._rank, self._world_size, self._stage = rank, world_size, stage
        self._deadline_s = deadline_s
        self._events = events
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()  # held while packing; guards the three below
        self._pending: dict[str, tuple[int, int]] = {}  # unit -> (version, attempt) to send
        self._dropped: dict[str, int] = {}
        self._outbox: list[Message] = []  # what needs no answer; goes out also while an answer is awaited
        self._validated = 0  # the newest version that may be committed
        self._control = ControlClient(address, self._on_event)
        welcome = self._greet({}, start_deadline_s)
        self._packings, self._peers = self._prepare(welcome, spec, sources, units, parameters)
        self._greet({unit: sorted(packings) for unit, packings in self._packings.items()}, deadline_s)
        self._thread = threading.Thread(target=self._run, name=f"megatron-stream-send-{address}", daemon=True)
        self._thread.start()

    def _greet(self, units: dict[str, list[int]], deadline_s: float) -> Welcome:
        hello = Hello(rank=self._rank, world_size=self._world_size, units=units)
        welcome = self._control.ask(hello, deadline_s)
        assert isinstance(welcome, Welcome)
        self.committed = welcome.committed
        return welcome

    def _prepare(
        self,
        welcome: Welcome,
        spec: ModelSpec,
        sources: Mapping[int, Sequence[Block]],
        units: Mapping[str, Sequence[str]],
        parameters: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, dict[int, Packing]], dict[int, str]]:
        workers = {worker.worker: worker for worker in welcome.workers}
        plan = make_plan(sources, {w: engine_blocks(spec, info) for w, info in workers.items()})
        mine: list[Copy] = [copy for copy in plan if copy.source == self._rank]
        unit_of = {name: unit for unit, names in units.items() for name in names}
        packings: dict[str, dict[int, Packing]] = {unit: {} for unit in units}
        for unit, by_worker in by_unit_and_worker(mine, unit_of).items():
            for worker, copies in by_worker.items():
                packings[unit][worker] = make_packing(copies, parameters, workers[worker])
                self._lane.register(packings[unit][worker].buffer)
        reached = sorted({worker for by_worker in packings.values() for worker in by_worker})
        return packings, {worker: self._lane.connect(workers[worker].lane_address) for worker in reached}

    def _on_event(self, message: Any) -> None:
        if isinstance(message, Committed):
            self.committed = message.version

    # --- called by the training thread ---

    def before_change(self, unit: str) -> None:
        """Wait for a packing that is under way, and pass over a version that was not packed yet."""
        with self._lock:
            if dropped := self._pending.pop(unit, None):
                self._dropped[unit] = dropped[0]

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        with self._lock:
            dropped = self._dropped.pop(unit, version)
            if dropped != version:  # not the same version redone
                self._outbox.append(Passed(unit=unit, version=dropped))
            self._pending[unit] = (version, attempt)
        self._wake.set()

    def validated(self, unit: str, version: int, attempt: int) -> None:
        with self._lock:
            self._validated = version
            self._outbox.append(Validated(unit=unit, version=version, attempt=attempt))
        self._wake.set()

    def close(self) -> None:
        """Send what is waiting, let the last validated version be committed, leave.

        Waits at most twice the deadline; what went wrong is in `error`.
        """
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=2 * self._deadline_s)

    # --- the link's own thread ---

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(timeout=_IDLE_POLL_S)
                self._wake.clear()
                closing = self._closing
                while self._publish_next():
                    pass
                self._flush()
                self._control.poll()
                if closing:
                    break
            self._wait_for_last_commit()
            self._control.send(Leave())
        except LaneError as error:
            self.error = error
        finally:
            self._lane.close()
            self._control.close()

    def _flush(self) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, []
        for message in messages:
            self._control.send(message)

    def _wait_for_last_commit(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while self.committed < self._validated:
            if time.monotonic() > deadline:
                raise LaneError(
                    f"the engine at {self.address} did not commit version {self._validated} within "
                    f"{self._deadline_s:g} s; it runs version {self.committed}"
                )
            self._control.poll()
            time.sleep(_IDLE_POLL_S)

    def _publish_next(self) -> bool:
        """Ask for the staging memory, pack, write: one unit, the oldest version first, so that a version that
        others have begun gets whole. False when nothing waits."""
        with self._lock:
            if not self._pending:
                return False
            unit = min(self._pending, key=lambda name: self._pending[name][0])
            wanted = version, attempt = self._pending[unit]
        self._flush()
        begin = Begin(unit=unit, version=version, attempt=attempt)
        grant = self._control.ask(begin, self._deadline_s, meanwhile=self._flush)
        track = f"send stage {self._stage}"
        with self._lock:
            if self._pending.get(unit) != wanted:
                return True  # stepped on while waiting
            del self._pending[unit]
            if not grant.write:
                return True
            nbytes = sum(packing.nbytes for packing in self._packings[unit].values())
            with self._events.span(track, "pack", version=version, unit=unit, bytes=nbytes):
                for packing in self._packings[unit].values():
                    packing.pack()
        for worker, packing in self._packings[unit].items():
            notice = Wrote(unit=unit, version=version, attempt=attempt, nbytes=packing.nbytes, started=time.time())
            with self._events.span(
                track, "send", version=version, unit=unit, attempt=attempt, bytes=packing.nbytes, worker=worker
            ):
                self._lane.write(self._peers[worker], packing.buffer, packing.ranges, encode(notice), self._deadline_s)
        return True


class Sender(StepListener):
    """All links of one trainer rank, told by the stage optimizer."""

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self.links = list(links)

    @property
    def committed(self) -> int:
        """The oldest version that any engine computes with."""
        return min(link.committed for link in self.links)

    def before_change(self, unit: str) -> None:
        for link in self.links:
            link.before_change(unit)

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        for link in self.links:
            link.stepped(unit, version, attempt)

    def validated(self, unit: str, version: int, attempt: int) -> None:
        for link in self.links:
            link.validated(unit, version, attempt)

    def check(self) -> None:
        """Raises LaneError if a link has ended."""
        for link in self.links:
            if link.error is not None:
                raise link.error

    def close(self) -> None:
        for link in self.links:
            link.close()
