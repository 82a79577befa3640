"""The summary's numbers on a made-up run whose numbers are known, with planted faults that must be counted."""

import copy
import json
import time

import numpy as np
import pytest

from megatron_stream.observe.stall import AFTER_COMMIT_S, _Gaps, stalls_s, update_windows
from megatron_stream.observe.summary import summarize
from tests.unit.fake_run import EXPOSED_S, STALL_S, TOKEN_S, Event, event, run

pytestmark = pytest.mark.unit

KEYS = {
    "steps", "versions_committed", "reward_first", "reward_last", "stall_ms", "exposed_ms", "lag_versions",
    "mixed_tokens", "wrong_labels", "tokens_per_s", "rollbacks", "peak_memory_gib", "preempted",
    "prefills_across_versions", "stall_updates",
}  # fmt: skip


def of(events: list[Event], track: str, name: str) -> list[Event]:
    return [e for e in events if e["track"] == track and e["name"] == name]


def test_a_run_without_faults():
    events = run(steps=5)
    metrics = [{"step": s, "time": 0.0} for s in range(1, 6)] + [{"memory_gib": 2.0}, {"memory_gib": 1.5}]
    summary = summarize(events, metrics)
    assert summary.keys() == KEYS
    assert summary["steps"] == 5
    assert summary["versions_committed"] == 5
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.5)
    assert summary["exposed_ms"] == pytest.approx({"p50": 1000 * EXPOSED_S, "max": 1000 * EXPOSED_S}, abs=0.1)
    assert summary["lag_versions"] == {"mean": 1.5, "max": 2}
    assert (summary["mixed_tokens"], summary["wrong_labels"], summary["rollbacks"]) == (0, 0, 0)
    assert summary["tokens_per_s"] == pytest.approx(4 / TOKEN_S, rel=0.05)
    assert summary["peak_memory_gib"] == 2.0
    assert (summary["preempted"], summary["prefills_across_versions"]) == (0, 0)
    json.dumps(summary, allow_nan=False)


def test_requests_with_keys_of_more_than_one_version_are_counted():
    odd = [
        event("engine", "preempted", 1.0, requests=["a"]),
        event("engine", "prefill across versions", 2.0, requests=["b", "c"], version=1),
    ]
    summary = summarize(run(steps=2) + odd, [])
    assert (summary["preempted"], summary["prefills_across_versions"]) == (1, 2)


def test_no_events_are_nulls_and_not_zeros():
    summary = summarize([], [])
    assert summary.keys() == KEYS
    pair = {"p50": None, "max": None}
    assert summary.pop("stall_ms") == pair and summary.pop("exposed_ms") == pair
    assert summary.pop("lag_versions") == {"mean": None, "max": None}
    assert set(summary.values()) == {None}


@pytest.mark.parametrize("name", ["tokens", "sampled", "forward", "commit", "arrive", "step ready", "backward"])
def test_any_kind_of_event_may_be_missing(name):
    assert summarize([e for e in run(steps=2) if e["name"] != name], []).keys() == KEYS


def test_any_prefix_of_a_run_has_a_summary():
    events = run(steps=2)
    for n in range(0, len(events), 37):
        summary = summarize(events[:n], [])
        assert summary["wrong_labels"] in (None, 0) and summary["mixed_tokens"] in (None, 0)


# --- mixed tokens ---


def test_a_mixed_batch_is_counted_with_its_tokens():
    events = run(steps=3)
    planted = of(events, "engine stage 1", "forward")[40]
    planted["args"]["version"] += 1
    assert summarize(events, [])["mixed_tokens"] == planted["args"]["tokens"] == 4


def test_a_batch_that_only_one_stage_finished_is_not_mixed():
    events = run(steps=1)
    events.remove(of(events, "engine stage 1", "forward")[-1])
    assert summarize(events, [])["mixed_tokens"] == 0


def test_an_engine_started_again_counts_batches_from_0_again():
    first = run(steps=2)
    second = copy.deepcopy(first)
    for e in second:
        e["start"] += 100.0
        e["end"] = e["end"] and e["end"] + 100.0
        if "version" in e["args"]:
            e["args"]["version"] += 2
    first.remove(of(first, "engine stage 1", "forward")[-1])  # killed in the middle of a batch
    assert summarize(first + second, [])["mixed_tokens"] == 0
    of(second, "engine stage 0", "forward")[7]["args"]["version"] += 1
    assert summarize(first + second, [])["mixed_tokens"] == 4


# --- wrong labels ---


def test_a_wrong_label_is_counted_once_a_token():
    events = run(steps=3)
    of(events, "engine", "tokens")[20]["args"]["version"] += 1
    assert summarize(events, [])["wrong_labels"] == 4


def test_labels_that_are_late_by_one_batch_are_counted():
    """What vLLM itself does: the version at output time, with the next batch already under the new weights."""
    events = run(steps=3)
    labels = of(events, "engine", "tokens")
    versions = [e["args"]["version"] for e in labels]
    changes = 0
    for e, after in zip(labels, [*versions[1:], versions[-1]], strict=True):
        changes += e["args"]["version"] != after
        e["args"]["version"] = after
    assert changes == 3
    assert summarize(events, [])["wrong_labels"] == 4 * changes


def test_the_last_tokens_may_lack_their_label_or_their_truth():
    events = run(steps=1)
    without_label, without_truth = list(events), list(events)
    without_label.remove(of(events, "engine", "tokens")[-1])
    without_truth.remove(of(events, "engine stage 1", "sampled")[-1])
    assert summarize(without_label, [])["wrong_labels"] == 0
    assert summarize(without_truth, [])["wrong_labels"] == 0


def test_a_label_without_truth_in_the_middle_is_wrong():
    events = run(steps=1)
    events.append(event("engine", "tokens", events[len(events) // 2]["start"], requests=["unheard-of"], version=0))
    assert summarize(sorted(events, key=lambda e: e["start"]), [])["wrong_labels"] == 1


def actor_request(events: list[Event], versions: list[list[int]] | None = None) -> Event:
    """The actor's record of the first request, with its true labels or others."""
    request = of(events, "engine", "tokens")[0]["args"]["requests"][0]
    true = [e for e in of(events, "engine stage 1", "sampled") if request in e["args"]["requests"]]
    spans: list[list[int]] = []
    for i, e in enumerate(true):
        if not spans or spans[-1][0] != e["args"]["version"]:
            spans.append([e["args"]["version"], i])
    name = request.removeprefix("generate-tokens-").rsplit("-", 1)[0]
    start, end = events[0]["start"] - 1, events[-1]["start"] + 1
    return event("actor", "request", start, end, id=name, group="0", tokens=len(true), versions=versions or spans)


def test_the_actors_labels_are_compared_too():
    events = run(steps=3)
    right = actor_request(events)
    assert len(right["args"]["versions"]) == 4
    assert summarize([*events, right], [])["wrong_labels"] == 0
    late = [[v, start + (2 if v == 2 else 0)] for v, start in right["args"]["versions"]]
    assert summarize([*events, actor_request(events, late)], [])["wrong_labels"] == 2
    events[:] = [e for e in events if e["name"] != "commit"]
    assert summarize([*events, actor_request(events, [[9, 0]])], [])["wrong_labels"] == right["args"]["tokens"]


def test_the_truth_is_the_last_stages():
    events = run(steps=1)
    for e in of(events, "engine stage 1", "sampled"):
        events.append(event("engine stage 0", "sampled", e["start"], batch=0, version=99, requests=[]))
    assert summarize(events, [])["wrong_labels"] == 0


# --- stall ---


def test_the_stall_is_the_gap_beyond_the_usual_one():
    stalls = stalls_s(run(steps=5))
    assert list(stalls) == [1, 2, 3, 4, 5]
    assert all(s == pytest.approx(STALL_S, abs=1e-6) for s in stalls.values())


def test_a_gap_far_from_any_update_is_no_stall_of_one():
    events = run(steps=5)
    windows = update_windows(events)
    hole = (windows[2][1] + 0.3, windows[2][1] + 1.0)
    events = [e for e in events if e["name"] != "tokens" or not hole[0] < e["start"] < hole[1]]
    assert max(stalls_s(events).values()) == pytest.approx(STALL_S, abs=1e-6)


def test_a_pause_of_the_engine_around_an_update_is_its_stall():
    events = run(steps=5)
    commit = of(events, "engine", "commit")[2]["start"]
    for e in events:
        if e["name"] == "tokens" and e["start"] > commit:
            e["start"] += 3.0  # tokens only: the next window is unchanged, but for its requests
    assert stalls_s(events)[3] == pytest.approx(STALL_S + 3.0, abs=0.2)


def test_without_a_quiet_window_the_median_gap_is_the_usual_one():
    tokens = [event("engine", "tokens", t, requests=["a"], version=0) for t in (0.0, 0.1, 0.2, 0.7, 0.8)]
    update = [
        event("staging stage 0", "arrive", 0.0, 0.3, version=1, unit="u", attempt=0, bytes=1),
        event("engine", "commit", 0.5, 0.9, version=1),
    ]
    events = sorted([*tokens, *update], key=lambda e: e["start"])
    assert stalls_s(events) == pytest.approx({1: 0.4})


def test_an_update_while_no_request_ran_has_no_stall():
    tokens = [event("engine", "tokens", t, requests=["a"], version=0) for t in (10.0, 10.1, 10.2)]
    commits = [event("engine", "commit", t, t + 0.1, version=v) for v, t in ((1, 1.0), (2, 20.0))]
    assert stalls_s(sorted([*tokens, *commits], key=lambda e: e["start"])) == {}


def test_the_longest_gap_of_a_window_as_a_plain_search_finds_it():
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1.0, 200))
    events = [
        event("engine", "tokens", float(t), version=0, requests=[str(r) for r in range(12) if rng.random() < 0.05 * r])
        for t in times
    ]
    last, gaps = {}, []
    for e in events:
        for r in e["args"]["requests"]:
            gaps += [(last[r], e["start"])] if r in last else []
            last[r] = e["start"]
    starts = rng.uniform(-5, times[-1] + 5, 300)
    ends = starts + rng.exponential(3.0, 300)
    plain = [max((b - a for a, b in gaps if a < e and b > s), default=0.0) for s, e in zip(starts, ends, strict=True)]
    assert _Gaps(events).longest(starts, ends) == pytest.approx(plain)


def test_a_version_sent_again_by_a_resumed_run_has_the_second_window():
    def update(at: float) -> list[Event]:
        arrive = event("staging stage 0", "arrive", at, at + 1, version=3, unit="u", attempt=0, bytes=1)
        return [arrive, event("engine", "commit", at + 1, at + 1.1, version=3)]

    assert update_windows(update(0.0) + update(50.0))[3] == (50.0, pytest.approx(51.1 + AFTER_COMMIT_S))


# --- the rest ---


def test_rollbacks_are_counted():
    events = run(steps=2)
    events.append(
        event("trainer stage 1", "rollback", events[-1]["start"], events[-1]["start"] + 1, version=2, unit="u")
    )
    assert summarize(events, [])["rollbacks"] == 1


def test_exposed_waits_for_the_slowest_stage():
    events = run(steps=2)
    of(events, "trainer stage 1", "step ready")[1]["start"] += 1.0
    exposed = summarize(events, [])["exposed_ms"]
    assert exposed["max"] == pytest.approx(1000 * (0.03 + 1.0), abs=0.1)
    assert exposed["p50"] == pytest.approx(1000 * (EXPOSED_S + 1.03) / 2, abs=0.1)


def test_two_hundred_thousand_events_take_seconds():
    events = run(steps=700)
    assert len(events) > 190_000
    start = time.process_time()
    summary = summarize(events, [])
    assert time.process_time() - start < 10
    assert summary["versions_committed"] == 700
    assert summary["stall_ms"]["p50"] == pytest.approx(1000 * STALL_S, abs=0.01)
