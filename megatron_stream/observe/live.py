"""What a run is doing, twice a second: a panel on a terminal, one plain line a step anywhere else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_stream.config import RunConfig
from megatron_stream.observe.live_state import RunState
from megatron_stream.observe.metrics import FILE

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_STEPS = 40


class Tail:
    """Reads what was appended to a file of JSON lines since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The finished new lines; a line that is still being written comes with a later call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        lines = []
        for line in data.splitlines():
            try:
                value = json.loads(line)
            except ValueError:  # a process was killed while it wrote
                continue
            if isinstance(value, dict):
                lines.append(value)
        return lines


class LiveView:
    """Context manager; `refresh()` reads what is new in the run's folder and shows it.

    `parts` gives the state of each part by name; the supervisor sets it.
    """

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self.parts: Callable[[], dict[str, str]] = dict
        self._run_dir = run_dir
        self._steps = config.trainer.steps
        self._state = RunState(stages=config.trainer.pipeline_parallel)
        self._metrics = Tail(run_dir / FILE)
        self._events: dict[Path, Tail] = {}
        self._held: list[dict[str, Any]] = []
        self._shown_parts: dict[str, str] = {}
        self._started = time.monotonic()
        on_terminal = config.observe.live and sys.stdout.isatty()
        self._live = Live(console=Console(), auto_refresh=False) if on_terminal else None

    def __enter__(self) -> LiveView:
        self._read()  # a resumed run's earlier steps are history: not printed again
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refresh()
        for row in self._held:
            _print(self._step_line(row))
        self._held = []
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Read and show what is new. Cheap enough for twice a second."""
        rows = self._read()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        for name, state in self.parts().items():
            if self._shown_parts.get(name) != state:
                self._shown_parts[name] = state
                _print(f"{name}: {state}")
        # The other stages' events may be a moment later than the metrics: such a line waits for one refresh.
        held, self._held = self._held, []
        for row in rows:
            if held or self._state.exposed_s(row.get("version")) is not None:
                held.append(row)
            else:
                self._held.append(row)
        for row in held:
            _print(self._step_line(row))

    def _read(self) -> list[dict[str, Any]]:
        """Take in what is new; returns the new lines of finished steps."""
        rows = self._metrics.read()
        for path in sorted((self._run_dir / "events").glob("*.jsonl")):
            for event in self._events.setdefault(path, Tail(path)).read():
                self._state.add_event(event)
        for row in rows:
            self._state.add_metrics(row)
        return [row for row in rows if "step" in row]

    def _step_line(self, row: dict[str, Any]) -> str:
        state = self._state
        fields = [
            ("step", f"{row['step']}/{self._steps}"),
            ("reward", _number(row.get("reward"), ".2f")),
            ("tokens/s", _number(state.tokens_per_s(), ".0f")),
            ("version", _number(row.get("version"), "d")),
            ("committed", _number(state.committed, "d")),
            ("lag", _number(row.get("lag_mean"), ".1f")),
            ("longest gap", _ms(state.gap_at_update_s)),
            ("exposed", _ms(state.exposed_s(row.get("version")))),
            ("step", _number(row.get("step_s"), ".1f", " s")),
        ]
        return " ".join(f"{name} {value}" for name, value in fields)

    def _panel(self) -> Panel:
        state, row = self._state, self._state.row
        step = row.get("step", 0)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(f"{step}/{self._steps}", ProgressBar(total=max(self._steps, 1), completed=step, width=40))
        table.add_row("step", bar)
        reward = _number(row.get("reward"), ".3f")
        table.add_row("reward", f"{reward}  [green]{sparkline(state.rewards[-_SPARKLINE_STEPS:])}[/]")
        table.add_row("tokens/s", _number(state.tokens_per_s(), ".0f"))
        table.add_row(
            "versions", f"committed {_number(state.committed, 'd')}, trained {_number(row.get('version'), 'd')}"
        )
        table.add_row(
            "longest gap", f"{_ms(state.gap_at_update_s)} around the last update, usually {_ms(state.usual_gap_s())}"
        )
        table.add_row(
            "lag", f"mean {_number(row.get('lag_mean'), '.1f')}, max {_number(row.get('lag_max'), 'd')} versions"
        )
        table.add_row("exposed", _ms(state.exposed_s(row.get("version"))))
        table.add_row("step time", _number(row.get("step_s"), ".1f", " s"))
        table.add_row("memory", _number(state.memory_gib, ".1f", " GiB"))
        parts = Text()
        for name, part_state in self.parts().items():
            parts.append(f"{name} ", style="bold")
            parts.append(f"{part_state}   ", style="green" if part_state == "running" else "red")
        table.add_row("parts", parts)
        for log in sorted((self._run_dir / "logs").glob("*.log")):
            table.add_row(f"{log.stem} log", Text(last_line(log), style="dim", no_wrap=True, overflow="ellipsis"))
        table.add_row("folder", Text(str(self._run_dir)))  # a path may look like markup
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return Panel(Group(table), title="megatron-stream", subtitle=f"{minutes}:{seconds:02d}", title_align="left")


def sparkline(values: list[float]) -> str:
    """One block character a value, from the least to the largest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)


def last_line(log: Path) -> str:
    """The last line of a growing log that is not empty, "" without one; reads its last 4 KiB only."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _number(value: Any, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _print(line: str) -> None:
    print(line, flush=True)
