"""The stall of each update: how much longer running requests waited for a token than they do without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Event = dict[str, Any]
Window = tuple[float, float]

# A batch that was in flight when the commit was answered shows its delay only in the next token.
AFTER_COMMIT_S = 0.25
# Enough for a median. Without a limit the work would grow with updates times windows.
_MOST_WINDOWS = 1000


def stalls_s(events: Sequence[Event]) -> dict[int, float]:
    """Seconds of stall by committed version; a version during which no request ran is left out.

    The longest gap between two tokens of one request overlapping the update's window (see `update_windows`)
    minus the median of the same quantity over windows of that length that overlap no update. When the run
    has no such window: minus the median of all gaps of all requests. Never below 0.
    """
    gaps = _Gaps(events)
    if len(gaps.lengths) == 0:
        return {}
    windows = update_windows(events)
    arrivals = [(e["start"], e["end"]) for e in events if e["name"] == "arrive"]
    quiet = _quiet([*windows.values(), *arrivals], gaps.times[0], gaps.times[-1])
    stalls = {}
    for version, (start, end) in windows.items():
        longest = gaps.longest(np.array([start]), np.array([end]))[0]
        if longest == 0:
            continue
        starts = _tiles(quiet, end - start)
        usual = gaps.longest(starts, starts + (end - start))
        usual = usual[usual > 0]
        stalls[version] = max(0.0, float(longest - np.median(usual if len(usual) else gaps.lengths)))
    return stalls


def update_windows(events: Sequence[Event]) -> dict[int, Window]:
    """By committed version: from its first byte's arrival at a worker to `AFTER_COMMIT_S` after its commit.

    Seconds since the epoch. `events` must be in the order of their starts.
    """
    first_arrival: dict[int, float] = {}
    windows = {}
    for event in events:
        if event["name"] == "arrive":
            first_arrival.setdefault(event["args"]["version"], event["start"])
        elif event["name"] == "commit" and event["track"] == "engine":
            version = event["args"]["version"]
            # A resumed run sends its version again: hence pop, the arrivals before belong to the other run.
            windows[version] = (first_arrival.pop(version, event["start"]), event["end"] + AFTER_COMMIT_S)
    return windows


def _quiet(busy: list[Window], start: float, end: float) -> list[Window]:
    """What `busy` leaves of the time from `start` to `end`."""
    quiet = []
    for a, b in sorted(busy):
        if a > start:
            quiet.append((start, min(a, end)))
        start = max(start, b)
    return [(a, b) for a, b in [*quiet, (start, end)] if b > a]


def _tiles(quiet: list[Window], length: float) -> np.ndarray:
    """Starts of windows of `length` seconds, side by side in `quiet`; of very many an even choice."""
    bounds = np.array(quiet).reshape(-1, 2)
    counts = ((bounds[:, 1] - bounds[:, 0]) / length).astype(np.int64)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:, 0], counts) + length * index
    return starts[:: 1 + len(starts) // _MOST_WINDOWS]


class _Gaps:
    """Gaps between consecutive tokens of one request, all requests together.

    `times`: the moments of the `tokens` events; `lengths`: of every gap, in seconds.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        tokens = [e for e in events if e["track"] == "engine" and e["name"] == "tokens"]
        self.times = np.array([e["start"] for e in tokens])
        last: dict[str, int] = {}
        pairs: list[tuple[int, int]] = []
        for i, event in enumerate(tokens):
            for request in event["args"]["requests"]:
                before = last.get(request, i)
                if before != i:
                    pairs.append((before, i))
                last[request] = i
        starts, ends = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        self.lengths = self.times[ends] - self.times[starts]
        # Entry k is about the time before moment k, so that the time before the first one has an entry, too.
        longest_at = np.append(0.0, _cover(starts, ends, self.lengths, len(tokens)))
        self._longest = _range_maxima(longest_at)

    def longest(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The longest gap that overlaps each window `[starts, ends]`, in seconds; 0 where there is none."""
        first = np.searchsorted(self.times, starts, side="right")
        stop = np.maximum(np.searchsorted(self.times, ends, side="left"), first) + 1
        level = _log2(stop - first)
        return np.asarray(np.maximum(self._longest[level, first], self._longest[level, stop - (1 << level)]))


def _log2(lengths: np.ndarray) -> np.ndarray:
    """Exponents of the largest powers of two within `lengths` (1 or more)."""
    return np.frexp(lengths)[1] - 1


def _cover(starts: np.ndarray, ends: np.ndarray, lengths: np.ndarray, n: int) -> np.ndarray:
    """For each interval k between moments k and k+1: the length of the longest gap that covers it, else 0.

    Each gap is written as two overlapping power-of-two blocks, which are then halved down to single
    intervals: O(n log n), however long the gaps are.
    """
    level = _log2(ends - starts)
    top = int(level.max(initial=0))
    blocks = np.zeros((top + 1, n))
    np.maximum.at(blocks, (level, starts), lengths)
    np.maximum.at(blocks, (level, ends - (1 << level)), lengths)
    for k in range(top, 0, -1):
        half = 1 << (k - 1)
        blocks[k - 1] = np.maximum(blocks[k - 1], blocks[k])
        blocks[k - 1, half:] = np.maximum(blocks[k - 1, half:], blocks[k, :-half])
    return np.asarray(blocks[0])


def _range_maxima(values: np.ndarray) -> np.ndarray:
    """Row k holds the maxima of every run of 2**k values: two of its entries give any run's maximum."""
    rows = [values]
    while 2 * (1 << (len(rows) - 1)) <= len(values):
        half = 1 << (len(rows) - 1)
        row = rows[-1].copy()
        row[:-half] = np.maximum(rows[-1][:-half], rows[-1][half:])
        rows.append(row)
    return np.stack(rows)
