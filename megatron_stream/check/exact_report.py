"""The table and the JSON of `megatron-stream check exact`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_stream.check.exact import Result, check_grid
from megatron_stream.check.exact_case import Case
from megatron_stream.check.ranks import Ranks
from megatron_stream.errors import RunError
from megatron_stream.observe.machine import describe_machine


def line_of(result: Result) -> str:
    """One line of the table."""
    norm = "" if result.norm_error is None else f"  one process {result.norm_error:.0e}"
    word = "equal" if result.ok else "DIFFERS"
    return f"{word:8} {result.case.name:58} rollbacks {result.rollbacks:3}{norm}"


def as_json(result: Result) -> dict[str, Any]:
    return {
        "case": asdict(result.case),
        "name": result.case.name,
        "ok": result.ok,
        "differences": result.differences,
        "rollbacks": result.rollbacks,
        "copy_bytes": result.copy_bytes,
        "norm_error": result.norm_error,
    }


def run_exact(cases: list[Case], report: Path | None) -> None:
    """Check every case and print it as it is done. Raises RunError when one differs."""
    started = time.monotonic()
    results = []
    with Ranks() as ranks:
        for result in check_grid(ranks, cases):
            results.append(result)
            print(line_of(result), flush=True)
            for difference in result.differences[:5]:
                print(f"         {difference}", flush=True)
    wrong = [result for result in results if not result.ok]
    print(f"{len(results) - len(wrong)} of {len(results)} cases equal, {time.monotonic() - started:.0f} s", flush=True)
    if report is not None:
        content = {"machine": describe_machine(), "cases": [as_json(result) for result in results]}
        report.write_text(json.dumps(content, indent=1) + "\n")
    if wrong:
        raise RunError(f"{len(wrong)} cases differ from stock Megatron-core; the first: {wrong[0].case.name}")
