"""A run's events as a Chrome trace: open `trace.json` in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# One process row per kind, in this order: the way of a weight from the trainer to a token.
KINDS = ("trainer", "lanes", "engine", "actor")
TICK_S = 1e-6  # spans that follow each other may overlap by the rounding of their times

_CLOCK_S = 1e-6  # spans that only touch do not overlap: about the resolution of seconds since the epoch


def _kind(track: str) -> str:
    first = track.split(" ", 1)[0]
    return "lanes" if first in ("send", "staging") else first


def _lane(free_at: list[float], event: Event) -> int:
    """The first lane of the event's track that is free. A viewer draws overlapping spans of one thread on
    top of each other, and the actor's requests overlap."""
    end = event["start"] if event["end"] is None else event["end"]
    for lane, free in enumerate(free_at):
        if event["end"] is None or free <= event["start"] + TICK_S:
            free_at[lane] = max(free, end)
            return lane
    free_at.append(end)
    return len(free_at) - 1


def to_trace(events: list[Event]) -> dict[str, Any]:
    """Trace Event Format: a process per kind, a thread per track, and further threads of the same name where
    spans of a track overlap. Times in microseconds since the first event."""
    origin = min((e["start"] for e in events), default=0.0)
    kinds = [k for k in (*KINDS, *sorted({_kind(e["track"]) for e in events} - set(KINDS)))]
    threads: dict[tuple[str, int], int] = {}
    free_at: dict[str, list[float]] = defaultdict(list)
    out: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda e: (e["start"], e["end"] or e["start"])):
        track = event["track"]
        pid = kinds.index(_kind(track)) + 1
        key = (track, _lane(free_at[track], event))
        if key not in threads:
            threads[key] = len(threads) + 1
            out += _names(pid, kinds[pid - 1], threads[key], track)
        entry = {
            "name": _title(event),
            "cat": event["name"],
            "pid": pid,
            "tid": threads[key],
            "ts": round((event["start"] - origin) * 1e6, 1),
            "args": {name: _json(value) for name, value in event["args"].items()},
        }
        if event["end"] is None:
            entry |= {"ph": "i", "s": "t"}
        else:
            entry |= {"ph": "X", "dur": round((event["end"] - event["start"]) * 1e6, 1)}
        out.append(entry)
    return {"displayTimeUnit": "ms", "traceEvents": out}


def _title(event: Event) -> str:
    """With the version in the name, so that a viewer colours versions differently."""
    version = event["args"].get("version")
    return event["name"] if version is None else f"{event['name']} v{version}"


def _json(value: Any) -> Any:
    """JSON has no nan and no inf, and a skipped step's gradient norm is one: those become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _names(pid: int, kind: str, tid: int, track: str) -> list[dict[str, Any]]:
    meta = {"ph": "M", "pid": pid, "tid": tid}
    return [
        meta | {"name": "process_name", "args": {"name": kind}},
        meta | {"name": "process_sort_index", "args": {"sort_index": pid}},
        meta | {"name": "thread_name", "args": {"name": track}},
        meta | {"name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def write_trace(events: list[Event], path: Path) -> None:
    """Write `to_trace(events)` as JSON."""
    path.write_text(json.dumps(to_trace(events), allow_nan=False), encoding="utf-8")
