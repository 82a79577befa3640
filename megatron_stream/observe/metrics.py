"""The run's numbers, one JSON line a step: `metrics.jsonl` in its folder, and wandb beside it.

Several processes append to the file (the supervisor adds `memory_gib`), hence O_APPEND and one write a line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from megatron_stream.config import ObserveConfig

logger = logging.getLogger("megatron_stream")

FILE = "metrics.jsonl"


class Metrics:
    """Appends to `run_dir/metrics.jsonl` and logs to wandb, which may fail without ending the run."""

    def __init__(self, run_dir: Path, config: ObserveConfig) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = os.open(run_dir / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._end_broken_line()
        self._wandb = _start_wandb(run_dir, config)

    def _end_broken_line(self) -> None:
        """A process killed while it wrote must not spoil the first line of the resumed run, too."""
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def log(self, step: int, **values: Any) -> None:
        """Record `values` of `step` (steps done, from 1). `time`, seconds since the epoch, is added.

        JSON has no nan and no inf: the file gets null for them, wandb the value.
        """
        line = {"step": step, "time": time.time(), **{name: _plain(value) for name, value in values.items()}}
        os.write(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())
        if self._wandb is not None:
            try:
                self._wandb.log(values, step=step)
            except Exception as error:  # whatever wandb does, the training goes on
                self._give_up_wandb(error)

    def close(self) -> None:
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                self._give_up_wandb(error)
            self._wandb = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _give_up_wandb(self, error: Exception) -> None:
        logger.warning("wandb failed (%r); going on without it, %s has every number", error, FILE)
        self._wandb = None


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and torch scalars become numbers, nan and inf null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _start_wandb(run_dir: Path, config: ObserveConfig) -> Any:
    """The wandb run, or None when it is disabled or does not start."""
    if config.wandb_mode == "disabled":
        return None
    mode: Any = config.wandb_mode  # `validate` has checked that wandb knows it
    try:
        import wandb

        return wandb.init(
            project=config.wandb_project,
            name=run_dir.resolve().name,
            dir=run_dir,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except Exception as error:  # no network, no key, no disk: none of them is a reason not to train
        logger.warning("wandb did not start (%r); going on without it, %s has every number", error, FILE)
        return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of `run_dir/metrics.jsonl`, oldest first; [] without one. Leaves out unfinished lines."""
    path = run_dir / FILE
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines
