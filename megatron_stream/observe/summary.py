"""A run's numbers from its event files: exposed time, stall, lag, mixed tokens, wrong labels, speed.

Every number is null where the events that it needs are missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from megatron_stream.observe.labels import count_wrong_labels
from megatron_stream.observe.stall import stalls_s

Event = dict[str, Any]


def summarize(events: Sequence[Event], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of a run from `read_events` and `read_metrics`.

    Names end in their unit. `stall_ms` is over the `stall_updates` that met a running request; `lag_versions` is
    in versions, `reward_*` as the task scores; `tokens_per_s` counts generated tokens, `rollbacks` each stage's.
    `preempted` requests and prompts in `prefills_across_versions` have keys and values of more than one
    version; labels don't show it.
    """
    consumed = [e["args"] for e in events if e["track"] == "trainer" and e["name"] == "consumed"]
    rewards = [args["reward"] for args in consumed if args.get("reward") is not None]
    stalls = stalls_s(events).values()
    commits = {e["args"]["version"] for e in events if e["track"] == "engine" and e["name"] == "commit"}
    return {
        "steps": _largest(line.get("step") for line in metrics) or len(consumed) or None,
        "versions_committed": len(commits) if any(e["track"] == "engine" for e in events) else None,
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        "stall_ms": _p50_max(stalls),
        "stall_updates": len(stalls) or None,
        "exposed_ms": _p50_max(exposed_s(events).values()),
        "lag_versions": _lag(consumed),
        "mixed_tokens": count_mixed_tokens(events),
        "wrong_labels": count_wrong_labels(events),
        "tokens_per_s": tokens_per_s(events),
        "rollbacks": _rollbacks(events),
        "preempted": _engine_count(events, "preempted"),
        "prefills_across_versions": _engine_count(events, "prefill across versions"),
        "peak_memory_gib": _largest(line.get("memory_gib") for line in metrics),
    }


def exposed_s(events: Sequence[Event]) -> dict[int, float]:
    """Seconds from the end of a step's last backward, over all stages, to the moment all may go on.

    By version; a version without `backward` or without `step ready` is left out.
    """
    backward_end: dict[int, float] = {}
    ready: dict[int, float] = {}
    for event in events:
        if not event["track"].startswith("trainer stage"):
            continue
        version = event["args"].get("version")
        if event["name"] == "backward":
            backward_end[version] = max(backward_end.get(version, event["end"]), event["end"])
        elif event["name"] == "step ready":
            ready[version] = max(ready.get(version, event["start"]), event["start"])
    return {v: ready[v] - backward_end[v] for v in sorted(ready.keys() & backward_end.keys())}


def count_mixed_tokens(events: Sequence[Event]) -> int | None:
    """Tokens of batches that the engine's stages ran with different versions; None without any batch."""
    batches: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # -> {version: tokens}
    last_batch: dict[str, int] = {}
    life: dict[str, int] = defaultdict(int)
    for event in events:
        track = event["track"]
        if event["name"] != "forward" or not track.startswith("engine stage"):
            continue
        args = event["args"]
        batch = args["batch"]
        # An engine started again (a resumed run) counts its batches from 0 again.
        if batch < last_batch.get(track, batch):
            life[track] += 1
        last_batch[track] = batch
        batches[life[track], batch][args["version"]] = args["tokens"]
    if not batches:
        return None
    return sum(max(versions.values()) for versions in batches.values() if len(versions) > 1)


def tokens_per_s(events: Sequence[Event]) -> float | None:
    """Tokens generated after the first `tokens` event, per second until the last one."""
    tokens = [(e["start"], len(e["args"]["requests"])) for e in events if e["name"] == "tokens"]
    if len(tokens) < 2 or tokens[-1][0] <= tokens[0][0]:
        return None
    return sum(count for _, count in tokens[1:]) / (tokens[-1][0] - tokens[0][0])


def _rollbacks(events: Sequence[Event]) -> int | None:
    names = [e["name"] for e in events if e["track"].startswith("trainer stage")]
    return names.count("rollback") if names else None


def _engine_count(events: Sequence[Event], name: str) -> int | None:
    """Requests in the engine's instants of this name; None when no engine wrote any event."""
    own = [e for e in events if e["track"] == "engine"]
    return sum(len(e["args"]["requests"]) for e in own if e["name"] == name) if own else None


def _lag(consumed: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Mean over the steps of their token-wise mean, and the largest lag of any token."""
    means = [args["lag_mean"] for args in consumed if args.get("lag_mean") is not None]
    return {
        "mean": sum(means) / len(means) if means else None,
        "max": _largest(args.get("lag_max") for args in consumed),
    }


def _p50_max(seconds: Iterable[float]) -> dict[str, float | None]:
    ms = [1000 * s for s in seconds]
    return {"p50": median(ms), "max": max(ms)} if ms else {"p50": None, "max": None}


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
