"""The live view's numbers, kept up to date event by event. Bounded memory: a run may last for weeks."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from megatron_stream.observe.stall import AFTER_COMMIT_S

_RECENT_GAPS = 4000
_RECENT_REWARDS = 1000
_RATE_WINDOW_S = 30.0
_KEPT_VERSIONS = 16


class RunState:
    """What has been seen so far; times are seconds, None is "not seen yet".

    `row`: the last step's metrics. `committed`: the newest version that the engine computes with.
    `gap_at_update_s`: the longest gap between two tokens of a request around the last update.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self.row: dict[str, Any] = {}
        self.rewards: list[float] = []
        self.memory_gib: float | None = None
        self.committed: int | None = None
        self.gap_at_update_s: float | None = None
        self._tokens: deque[tuple[float, int]] = deque()
        self._last_token: dict[str, float] = {}
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_RECENT_GAPS)
        self._arrivals: dict[int, float] = {}
        self._update: tuple[float, float] | None = None
        self._backward_end: dict[int, float] = {}
        self._ready: dict[int, list[float]] = {}

    def add_metrics(self, line: dict[str, Any]) -> None:
        """A line of `metrics.jsonl`."""
        if "memory_gib" in line:
            self.memory_gib = line["memory_gib"]
        if "step" in line:
            self.row = line
            if line.get("reward") is not None:
                self.rewards = [*self.rewards, line["reward"]][-_RECENT_REWARDS:]

    def add_event(self, event: dict[str, Any]) -> None:
        """An event of any process; those of one process come in order."""
        track, name, args = event["track"], event["name"], event["args"]
        if track == "engine" and name == "tokens":
            self._add_tokens(event["start"], args["requests"])
        elif name == "arrive":
            self._arrivals.setdefault(args["version"], event["start"])
        elif track == "engine" and name == "commit":
            self._add_commit(args["version"], event["start"], event["end"])
        elif track.startswith("trainer stage") and name == "backward":
            version = args["version"]
            self._backward_end[version] = max(event["end"], self._backward_end.get(version, 0.0))
        elif track.startswith("trainer stage") and name == "step ready":
            self._ready.setdefault(args["version"], []).append(event["start"])
            _forget_old(self._ready)
            _forget_old(self._backward_end)

    def _add_tokens(self, time: float, requests: list[str]) -> None:
        for request in requests:
            before = self._last_token.pop(request, None)  # popped, so that the dict stays in order of time
            self._last_token[request] = time
            if before is not None and before < time:
                self._add_gap(before, time)
        self._tokens.append((time, len(requests)))
        while self._tokens[0][0] < time - _RATE_WINDOW_S:
            self._tokens.popleft()
        while len(self._last_token) > _RECENT_GAPS:
            del self._last_token[next(iter(self._last_token))]

    def _add_gap(self, start: float, end: float) -> None:
        self._gaps.append((start, end))
        if self._update is not None and _overlap((start, end), self._update):
            self.gap_at_update_s = max(self.gap_at_update_s or 0.0, end - start)

    def _add_commit(self, version: int, start: float, end: float) -> None:
        self.committed = max(version, self.committed or 0)
        self._update = (self._arrivals.pop(version, start), end + AFTER_COMMIT_S)
        _forget_old(self._arrivals)
        around = [b - a for a, b in self._gaps if _overlap((a, b), self._update)]
        self.gap_at_update_s = max(around, default=None)

    def exposed_s(self, version: int | None) -> float | None:
        """Last backward's end to the last `step ready`; None until every stage has reported."""
        ready = self._ready.get(version, []) if version is not None else []
        if version is None or len(ready) < self._stages or version not in self._backward_end:
            return None
        return max(ready) - self._backward_end[version]

    def usual_gap_s(self) -> float | None:
        """Median of the recent gaps."""
        return median(end - start for start, end in self._gaps) if self._gaps else None

    def tokens_per_s(self) -> float | None:
        """Over the last half minute of generation."""
        if len(self._tokens) < 2 or self._tokens[-1][0] <= self._tokens[0][0]:
            return None
        tokens = sum(count for _, count in self._tokens) - self._tokens[0][1]
        return tokens / (self._tokens[-1][0] - self._tokens[0][0])


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] < b[1] and a[1] > b[0]


def _forget_old(by_version: dict[int, Any]) -> None:
    for version in sorted(by_version)[:-_KEPT_VERSIONS]:
        del by_version[version]
