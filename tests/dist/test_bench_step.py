"""`megatron-stream bench step` at its smallest, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stream.bench.step import CONTESTANTS, Measured, Times
from megatron_stream.bench.step_report import cost_over_stock, summarize
from megatron_stream.cli import main

SMALL = "--layers 2 --hidden 32 --length 16 --microbatches 2 --rounds 1 --steps 1".split()


@pytest.mark.dist
@pytest.mark.parametrize("stages", [1, 2])
def test_it_measures_every_contestant_on_every_stage(stages: int, tmp_path: Path) -> None:
    report = tmp_path / "step.json"
    assert main(["bench", "step", *SMALL, "--pp", str(stages), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert list(found["summary"]) == [contestant.name for contestant in CONTESTANTS]
    for contestant in CONTESTANTS:
        rows = found["summary"][contestant.name]["stages"]
        assert len(rows) == stages
        assert all(("sent_ms" in row) == contestant.sending for row in rows)
    for rank in found["ranks"]:
        assert rank["copy_bytes"] == rank["copy_bytes_predicted"]
        assert (rank["copy_bytes"] > 0) == (rank["stage"] > 0 or stages == 1), "a first stage of several has no copy"
        for step in rank["times"]:
            assert step["start"] < step["backward_end"] < step["ready"]
            assert step["sent"] is None or step["sent"] > step["final"] > step["start"]


def _times(contestant: str, number: int, ready: float, backward_end: float = 5.0) -> Times:
    return Times(contestant, number, 1.0, backward_end, ready - 0.5, ready, ready + 1.0)


@pytest.mark.unit
def test_times_count_from_the_last_backward_of_all_stages() -> None:
    names = [contestant.name for contestant in CONTESTANTS]
    first = Measured(0, [_times(name, 0, ready=6.0) for name in names], 0, 0, 0)
    last = Measured(1, [_times(name, 0, ready=5.25, backward_end=3.0) for name in names], 0, 0, 0)
    row = summarize([first, last])["optimistic, sending"]
    assert row["step_ms"] == (5000, 5000, 5000)
    assert [stage["exposed_ms"][0] for stage in row["stages"]] == [1000, 250]
    assert [stage["final_ms"][0] for stage in row["stages"]] == [500, -250]
    assert [stage["sent_ms"][0] for stage in row["stages"]] == [2000, 1250]


@pytest.mark.unit
def test_the_cost_is_the_ratio_of_medians_in_each_round() -> None:
    times = [_times("stock", n, ready=1.0 + 2.0 * (n + 1)) for n in (0, 1)]
    times += [_times("optimistic", 0, ready=1.0 + 3.0), _times("optimistic", 1, ready=1.0 + 4.0)]
    assert cost_over_stock([Measured(0, times, 0, 0, 0)], "optimistic") == (1.25, 1.0, 1.5)
