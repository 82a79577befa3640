"""The table and the JSON of `megatron-stream bench step`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from megatron_stream.bench.step import CONTESTANTS, Measured, Plan, Times, measure
from megatron_stream.check.ranks import Ranks
from megatron_stream.observe.machine import describe_machine

Spread = tuple[float, float, float]  # median, least, largest


def _spread(values: Sequence[float]) -> Spread:
    return median(values), min(values), max(values)


def _steps_of(measured: Sequence[Measured], contestant: str) -> list[list[Times]]:
    """Each step of a contestant, as what every rank saw of it."""
    by_rank = [[t for t in rank.times if t.contestant == contestant] for rank in measured]
    return [list(step) for step in zip(*by_rank, strict=True)]


def summarize(measured: Sequence[Measured]) -> dict[str, Any]:
    """Milliseconds, by contestant and stage: [median, least, largest] over the steps.

    `step_ms`: from the first rank's start to the last rank's end. Of a stage, measured from the end of the step's
    last backward on any stage (below zero: before it): `exposed_ms` until it may go on, `final_ms` until its new
    weights were there, `sent_ms` until they were at the receiver.
    """
    found: dict[str, Any] = {}
    for contestant in CONTESTANTS:
        steps = _steps_of(measured, contestant.name)
        stages: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for step in steps:
            end = max(t.backward_end for t in step)
            for stage in sorted({rank.stage for rank in measured}):
                own = [t for t, rank in zip(step, measured, strict=True) if rank.stage == stage]
                stages[stage]["exposed_ms"].append(1e3 * (max(t.ready for t in own) - end))
                stages[stage]["final_ms"].append(1e3 * (max(t.final for t in own) - end))
                sent = [t.sent for t in own if t.sent is not None]
                if sent:
                    stages[stage]["sent_ms"].append(1e3 * (max(sent) - end))
        found[contestant.name] = {
            "step_ms": _spread([1e3 * (max(t.ready for t in s) - min(t.start for t in s)) for s in steps]),
            "stages": [{key: _spread(values) for key, values in stages[s].items()} for s in sorted(stages)],
        }
    return found


def cost_over_stock(measured: Sequence[Measured], contestant: str) -> Spread:
    """Step time over stock's when nothing is sent: the ratio of medians in each round, so that drift cancels."""

    def by_round(name: str) -> dict[int, float]:
        durations: dict[int, list[float]] = defaultdict(list)
        for step in _steps_of(measured, name):
            durations[step[0].round].append(max(t.ready for t in step) - min(t.start for t in step))
        return {number: median(values) for number, values in durations.items()}

    stock, ours = by_round("stock"), by_round(contestant)
    return _spread([ours[number] / stock[number] for number in stock])


def run_step(plan: Plan, report: Path | None) -> None:
    """Measure, print the table, write the JSON."""
    with Ranks(deadline_s=3600.0) as ranks:
        measured: list[Measured] = ranks.call(plan.case.world, measure, plan)
    summary = summarize(measured)
    costs = {mode: cost_over_stock(measured, mode) for mode in ("barrier", "optimistic")}
    steps = plan.rounds * plan.steps
    print(f"{plan.case.name.split(';')[0]}; {steps} steps of each; ms from the end of the step's last backward")
    print(f"{'':22}{'step':>8}" + "".join(f"  {'stage ' + str(s):>24}" for s in range(plan.case.pp)))
    print(f"{'':22}{'ms':>8}" + f"  {'exposed':>8}{'final':>8}{'sent':>8}" * plan.case.pp)
    for name, row in summary.items():
        cells = [
            "  " + "".join(f"{stage[key][0]:8.1f}" if key in stage else " " * 8 for key in _COLUMNS)
            for stage in row["stages"]
        ]
        print(f"{name:22}{row['step_ms'][0]:8.1f}" + "".join(cells))
    for mode, (middle, least, largest) in costs.items():
        print(f"{mode}: step time {middle:.3f} of stock's when nothing is sent ({least:.3f} to {largest:.3f} by round)")
    for rank in measured:
        if rank.copy_bytes or rank.copy_bytes_predicted:
            predicted = f"predicted {rank.copy_bytes_predicted}"
            print(f"copy for a rollback, stage {rank.stage}: {rank.copy_bytes} bytes, {predicted}")
    if report is not None:
        content = {
            "machine": describe_machine(),
            "plan": asdict(plan),
            "summary": summary,
            "cost_over_stock": costs,
            "ranks": [asdict(rank) for rank in measured],
        }
        report.write_text(json.dumps(content, indent=1) + "\n")


_COLUMNS = ("exposed_ms", "final_ms", "sent_ms")
