"""The bench's own lane: each rank writes what it owns of a unit into its neighbour's memory, over NIXL."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_stream.errors import RunError
from megatron_stream.stream.lane import Range
from megatron_stream.stream.listener import StepListener
from megatron_stream.stream.nixl_lane import NixlReceiver, NixlSender
from megatron_stream.stream.packing import Packing
from megatron_stream.train.units import Unit

_POLL_S, _IDLE_POLL_S = 0.001, 0.1


class NeighbourLane(StepListener):
    """Sends each stepped unit from a thread of its own. `active`: whether it does; switch between steps.

    `stepped_at`, `sent_at`: when a unit's last attempt was stepped, and was in the neighbour's memory.
    """

    def __init__(self, units: Sequence[Unit], deadline_s: float) -> None:
        self.stepped_at: dict[str, float] = {}
        self.sent_at: dict[str, float] = {}
        self.active = False
        self._deadline_s = deadline_s
        self._packings: dict[str, Packing] = {}
        self._lock = threading.Lock()  # held while packing
        self._pending: list[str] = []
        self._failed: Exception | None = None
        offset = 0
        for unit in units:
            sources = [shard.model for shard in unit.shards]
            nbytes = sum(t.nbytes for t in sources)
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            targets, start = [], 0
            for tensor in sources:
                targets.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
                start += tensor.nbytes
            self._packings[unit.name] = Packing(buffer, [Range(0, offset, nbytes)], sources, targets)
            offset += nbytes
        self.nbytes = offset

    def start(self) -> None:
        """Collective: connect every rank with the next one."""
        rank, world = dist.get_rank(), dist.get_world_size()
        sizes: list[int] = [0] * world
        dist.all_gather_object(sizes, self.nbytes)
        self._memory = torch.empty(sizes[rank - 1], dtype=torch.uint8)
        self._receiver = NixlReceiver(f"receiver{rank}", self._memory)
        self._sender = NixlSender(f"sender{rank}")
        for packing in self._packings.values():
            self._sender.register(packing.buffer)
        addresses: list[Any] = [None] * world
        dist.all_gather_object(addresses, self._receiver.address)
        self._stop = threading.Event()
        self._wake = threading.Event()
        peer = addresses[(rank + 1) % world]
        # Two threads: a write needs the neighbour's polling, which must not wait for the neighbour's own writes.
        self._threads = [threading.Thread(target=self._send, args=(peer,), daemon=True)]
        self._threads.append(threading.Thread(target=self._receive, daemon=True))
        for thread in self._threads:
            thread.start()

    def _receive(self) -> None:
        while not self._stop.wait(_POLL_S if self.active else _IDLE_POLL_S):
            self._receiver.poll()

    def _send(self, address: bytes) -> None:
        try:
            peer = self._sender.connect(address)
            while not self._stop.is_set():
                self._wake.wait()
                self._wake.clear()
                while name := self._pack_next():
                    packing = self._packings[name]
                    self._sender.write(peer, packing.buffer, packing.ranges, name.encode(), self._deadline_s)
                    self.sent_at[name] = time.time()
        except RunError as error:
            self._failed = error

    def _pack_next(self) -> str | None:
        with self._lock:
            if not self._pending:
                return None
            name = self._pending.pop(0)
            self._packings[name].pack()
            return name

    # --- called by the training thread ---

    def before_change(self, unit: str) -> None:
        with self._lock:
            if unit in self._pending:
                self._pending.remove(unit)

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        self.stepped_at[unit] = time.time()
        if self.active:
            with self._lock:
                self._pending.append(unit)
            self._wake.set()

    def wait(self) -> None:
        """Until everything stepped is sent. Raises RunError naming what is not after the deadline."""
        deadline = time.monotonic() + self._deadline_s
        while missing := [u for u, at in self.stepped_at.items() if self.sent_at.get(u, 0.0) < at]:
            if self._failed is not None:
                raise self._failed
            if time.monotonic() > deadline:
                raise RunError(f"rank {dist.get_rank()}: {missing} not sent within {self._deadline_s:g} s")
            time.sleep(0.001)

    def close(self) -> None:
        """Collective: nobody leaves while a neighbour still writes."""
        dist.barrier()
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._deadline_s)
        self._sender.close()
        self._receiver.close()
