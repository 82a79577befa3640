"""The Perfetto trace: a process row per kind, a thread per track, no overlap within a thread."""

import json
from itertools import pairwise

import pytest

from megatron_stream.observe.trace import KINDS, to_trace, write_trace
from tests.unit.fake_run import event, run

pytestmark = pytest.mark.unit


def entries(trace, phase):
    return [e for e in trace["traceEvents"] if e["ph"] == phase]


def names(trace, what):
    """(pid, tid) -> name, of `process_name` or `thread_name`."""
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in entries(trace, "M") if e["name"] == what}


def test_every_event_is_there_in_microseconds_from_the_first():
    events = run(2)
    trace = to_trace(events)
    assert len(entries(trace, "X")) + len(entries(trace, "i")) == len(events)
    assert min(e["ts"] for e in entries(trace, "X") + entries(trace, "i")) == 0
    rebuilt = sorted(round(e["dur"] / 1e6, 3) for e in entries(trace, "X"))
    assert rebuilt == sorted(round(e["end"] - e["start"], 3) for e in events if e["end"] is not None)


def test_one_process_per_kind_and_one_thread_per_track():
    events = run(2)
    trace = to_trace(events)
    assert set(names(trace, "process_name").values()) == {"trainer", "lanes", "engine"}
    assert sorted(names(trace, "thread_name").values()) == sorted({e["track"] for e in events})
    order = {e["args"]["sort_index"]: e["pid"] for e in entries(trace, "M") if e["name"] == "process_sort_index"}
    kind = {pid: name for (pid, _), name in names(trace, "process_name").items()}
    assert [kind[order[i]] for i in sorted(order)] == [k for k in KINDS if k in kind.values()]


def test_overlapping_requests_get_threads_of_their_own():
    spans = [event("actor", "request", 0.1 * i, 0.1 * i + 0.35, id=str(i)) for i in range(20)]
    trace = to_trace(spans)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for e in entries(trace, "X"):
        by_thread.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(by_thread) == 4  # four at a time: threads are used again
    for times in by_thread.values():
        assert all(a[1] <= b[0] + 0.2 for a, b in pairwise(sorted(times)))
    assert set(names(trace, "thread_name").values()) == {"actor"}


def test_the_version_is_in_the_name_and_args_are_kept():
    (span,) = entries(to_trace([event("engine stage 0", "forward", 1.0, 2.0, version=7, batch=3)]), "X")
    assert span["name"] == "forward v7"
    assert span["args"] == {"version": 7, "batch": 3}


def test_a_skipped_steps_norm_is_no_number_of_json(tmp_path):
    write_trace([event("trainer stage 0", "validated", 1.0, norm=float("nan"))], tmp_path / "trace.json")
    assert '"norm": "nan"' in (tmp_path / "trace.json").read_text()


def test_no_events_is_a_valid_empty_trace(tmp_path):
    write_trace([], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
