"""Do the tokens' version labels tell the truth? Compares them with what the last engine stage computed with."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

_STAGE = re.compile(r"engine stage (\d+)")
# vLLM's server builds the engine's request id from the client's.
_ENGINE_ID = re.compile(r"generate-tokens-(.+)-[0-9a-f]{8}")


def count_wrong_labels(events: Sequence[Event]) -> int | None:
    """Tokens whose label, in the engine or at the actor, is not the version that produced them.

    A request's tokens are compared in order. A label without truth is wrong, too, unless it is later than
    the last truth: then the run ended between the two records. A truth without label is a token that nobody
    got (its request was aborted, or the run ended). None when labels or truths are missing altogether.
    """
    labels, label_times = _per_token(e for e in events if e["track"] == "engine" and e["name"] == "tokens")
    truths, truth_times = _per_token(_sampled_by_last_stage(events))
    if not labels or not truths:
        return None
    last_truth = max(times[-1] for times in truth_times.values())
    actor = _actor_labels(events, label_times)
    wrong = 0
    for request, given in labels.items():
        true = truths.get(request, [])
        at_actor = actor.get(request, given)
        for i, label in enumerate(given):
            if i >= len(true):
                wrong += label_times[request][i] <= last_truth
            else:
                wrong += label != true[i] or (i < len(at_actor) and at_actor[i] != true[i])
    return wrong


def _sampled_by_last_stage(events: Sequence[Event]) -> list[Event]:
    by_stage: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["name"] == "sampled" and (match := _STAGE.fullmatch(event["track"])):
            by_stage[int(match.group(1))].append(event)
    return by_stage[max(by_stage)] if by_stage else []


def _per_token(events: Any) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Versions and times (seconds since the epoch) of each request's tokens, in order."""
    versions: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        version = event["args"]["version"]
        for request in event["args"]["requests"]:
            versions[request].append(version)
            times[request].append(event["start"])
    return versions, times


def _actor_labels(events: Sequence[Event], label_times: dict[str, list[float]]) -> dict[str, list[int]]:
    """The labels that the actor got, by the engine's request id.

    A resumed run may send a client id a second time: of those, the engine's request that began within the
    actor's span is the one.
    """
    engine_ids: dict[str, list[str]] = defaultdict(list)
    for request in label_times:
        if match := _ENGINE_ID.fullmatch(request):
            engine_ids[match.group(1)].append(request)
    labels = {}
    for event in events:
        if event["track"] != "actor" or event["name"] != "request":
            continue
        for request in engine_ids.get(event["args"]["id"], []):
            if event["start"] <= label_times[request][0] <= event["end"]:
                labels[request] = _expand(event["args"]["versions"], event["args"]["tokens"])
    return labels


def _expand(spans: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """One version per token from `[[version, start], ...]`."""
    ends = [start for _, start in spans[1:]] + [tokens]
    return [v for (v, start), end in zip(spans, ends, strict=True) for _ in range(start, end)] if spans else []
