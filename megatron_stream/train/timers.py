"""Megatron-core's timer hook (`config.timers`) as a source of events: no patch, no change to the schedule."""

from __future__ import annotations

import time
from typing import Any

from megatron_stream.observe.events import EventLog

_NAMES = {"forward-compute": "forward", "backward-compute": "backward"}


class _Timer:
    def __init__(self, owner: EventTimers, name: str | None) -> None:
        self._owner, self._name = owner, name
        self._start = 0.0

    def start(self, barrier: bool = False) -> None:
        self._start = time.time()

    def stop(self, barrier: bool = False) -> None:
        if self._name is not None:
            self._owner.record(self._name, self._start)


class EventTimers:
    """Callable as Megatron's `Timers`; writes a span for each microbatch's forward and backward."""

    def __init__(self, events: EventLog, track: str) -> None:
        self._events, self._track = events, track
        self._timers: dict[str, _Timer] = {}
        self.version = 0
        self._microbatch: dict[str, int] = {}

    def start_step(self, version: int) -> None:
        """`version` is the one that the step makes."""
        self.version = version
        self._microbatch = {}

    def __call__(self, name: str, log_level: int = 0) -> Any:
        if name not in self._timers:
            self._timers[name] = _Timer(self, _NAMES.get(name))
        return self._timers[name]

    def record(self, name: str, start: float) -> None:
        microbatch = self._microbatch.get(name, 0)
        self._microbatch[name] = microbatch + 1
        self._events.add(self._track, name, start, time.time(), microbatch=microbatch, version=self.version)
