"""The events of a made-up run with two stages, with known numbers, for the tests of the views."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]

STEP_S = 4.0  # from one step's first forward to the next one's
EXPOSED_S = 0.12
EARLY_S = 0.18  # the last stage starts to send this long before stage 0's last backward ends
TOKEN_S = 0.06
STALL_S = 0.05  # extra gap of every request at each commit
T0 = 1_000_000.0


def event(track: str, name: str, start: float, end: float | None = None, **args: Any) -> Event:
    return {"track": track, "name": name, "start": start, "end": end, "args": args}


# 1F1B of four microbatches: the time slots of each stage's forwards and backwards.
SLOT_S = 0.3
FORWARDS = {0: (0, 1, 4, 6), 1: (1, 3, 5, 7)}
BACKWARDS = {0: (3, 5, 7, 9), 1: (2, 4, 6, 8)}
STEP_END_S = 10 * SLOT_S  # stage 0's last backward; stage 1's is one slot earlier


def _compute(stage: int, version: int, at: float) -> list[Event]:
    return [
        event(
            f"trainer stage {stage}",
            name,
            at + SLOT_S * slot,
            at + SLOT_S * slot + length,
            microbatch=m,
            version=version,
        )
        for name, slots, length in (("forward", FORWARDS, 0.28), ("backward", BACKWARDS, SLOT_S))
        for m, slot in enumerate(slots[stage])
    ]


def _transfer(stage: int, version: int, at: float) -> list[Event]:
    ids = {"version": version, "unit": f"stage{stage}", "bytes": 1000}
    return [
        event(f"send stage {stage}", "pack", at, at + 0.02, **ids),
        event(f"send stage {stage}", "send", at + 0.02, at + 0.4, attempt=0, worker=stage, **ids),
        event(f"staging stage {stage}", "arrive", at + 0.02, at + 0.41, attempt=0, **ids),
    ]


def trainer_step(version: int, at: float) -> list[Event]:
    """Stage 1 ends its backwards one slot before stage 0, steps and sends at once."""
    end = at + STEP_END_S
    v = {"version": version}
    events = _compute(0, version, at) + _compute(1, version, at)
    events += [
        event("trainer stage 1", "optimizer step", end - 0.3, end - 0.2, unit="stage1", optimistic=True, **v),
        event("trainer stage 1", "wait verdict", end - 0.2, end + 0.02, **v),
        event("trainer stage 0", "wait verdict", end, end + 0.02, **v),
        event("trainer stage 0", "validated", end + 0.02, norm=0.5, clipped=False, **v),
        event("trainer stage 1", "validated", end + 0.02, norm=0.5, clipped=False, **v),
        event("trainer stage 0", "optimizer step", end + 0.02, end + EXPOSED_S, unit="stage0", optimistic=False, **v),
        event("trainer stage 1", "step ready", end + 0.03, **v),
        event("trainer stage 0", "step ready", end + EXPOSED_S, **v),
        event("trainer", "consumed", end + 0.04, lag_mean=1.5, lag_max=2, reward=0.1 * version, **v),
    ]
    return events + _transfer(1, version, end - EARLY_S - 0.02) + _transfer(0, version, end + EXPOSED_S)


def commit_time(at: float) -> float:
    """When the version is committed whose step began at `at`."""
    return at + STEP_END_S + EXPOSED_S + 0.45


def engine(until: float, commits: dict[int, float], requests: int = 8) -> list[Event]:
    """A batch each TOKEN_S that alternates between two halves of the requests; a commit delays the next
    batch by STALL_S."""
    events: list[Event] = []
    at, batch, version = T0, 0, 0
    waiting = sorted(commits.items())
    while at < until:
        if waiting and at >= waiting[0][1]:
            version, _ = waiting.pop(0)
            ids = {"version": version, "bytes": 1000, "batch": batch}
            events += [event(f"engine stage {stage}", "commit", at, at + 0.01, **ids) for stage in (0, 1)]
            events.append(event("engine", "commit", at - 0.002, at + 0.012, version=version))
            at += STALL_S
        running = [f"generate-tokens-{i}-0-0-{i:08x}" for i in range(batch % 2, requests, 2)]
        ids = {"batch": batch, "version": version}
        for stage in (0, 1):
            begin = at + stage * TOKEN_S / 2
            end = begin + 0.45 * TOKEN_S
            events.append(event(f"engine stage {stage}", "forward", begin, end, tokens=len(running), **ids))
        events.append(event("engine stage 1", "sampled", at + 0.98 * TOKEN_S, requests=running, **ids))
        events.append(event("engine", "tokens", at + TOKEN_S, requests=running, version=version))
        at, batch = at + TOKEN_S, batch + 1
    return events


def run(steps: int = 5) -> list[Event]:
    """Steps 1..`steps`, each of them committed."""
    starts = {v: T0 + 0.5 + STEP_S * (v - 1) for v in range(1, steps + 1)}
    events = [e for v, at in starts.items() for e in trainer_step(v, at)]
    events += engine(T0 + 0.5 + STEP_S * steps, {v: commit_time(at) for v, at in starts.items()})
    return sorted(events, key=lambda e: e["start"])
