"""What every process writes down about time: spans and instants, one JSON line each.

A run's folder holds `events/<process>.jsonl`; the timeline, the summary and the live view read only
these files. Times are seconds since the epoch, so that processes of one host (or hosts with
synchronised clocks) share an axis.

Vocabulary (track: names {args}); `stage` counts from 0:

- `trainer stage S`: spans `forward` {microbatch, version}, `backward` {microbatch, version} (the version that
  the step makes), `optimizer step` {version, unit, optimistic}, `rollback` {version, unit}, `wait verdict`
  {version}; instants `step ready` {version} (the next forward may start), `validated`
  {version, norm, clipped}
- `send stage S`: spans `pack` {version, unit, bytes}, `send` {version, unit, attempt, bytes, worker}
- `staging stage S` (engine worker): span `arrive` {version, unit, attempt, bytes}
- `engine stage S`: spans `forward` {batch, version, tokens}, `commit` {version, bytes, batch}: `batch` is
  the number of the first batch that computes with this version. Instant `sampled` {batch, version,
  requests: [id]}: the last stage sampled one token of each request with this version, the truth that labels
  are checked against
- `engine`: instants `tokens` {requests: [id], version}: one token of each request; `preempted` {requests};
  `prefill across versions` {requests, version}: prompts of which a part was computed with older weights; `staged`
  {version}; span `commit` {version} from the request to the last worker's reply
- `actor`: spans `request` {id, group, tokens, versions: [[version, start]]}, `reward` {group}
- `trainer`: instants `consumed` {version, groups, lag_mean, lag_max, reward}
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events of one process; safe to call from several threads.

    `path` None drops every event, so that callers need no `if`.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def add(self, track: str, name: str, start: float, end: float | None = None, **args: Any) -> None:
        """Write a span from `start` to `end` (seconds since the epoch); `end` None is an instant."""
        if self._file is None:
            return
        line = json.dumps({"track": track, "name": name, "start": start, "end": end, "args": args})
        with self._lock:
            self._file.write(line + "\n")

    def instant(self, track: str, name: str, **args: Any) -> None:
        self.add(track, name, time.time(), **args)

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Time the block. The yielded dict may be filled with more args while it runs."""
        start = time.time()
        try:
            yield args
        finally:
            self.add(track, name, start, time.time(), **args)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events under `folder` (`*.jsonl`), oldest start first. An unfinished last line is left out."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return sorted(events, key=lambda e: e["start"])
