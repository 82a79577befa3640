"""At the end of a run: `summary.json`, `trace.json` (Perfetto), `timeline.png` and `curves.png`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megatron_stream.config import ObserveConfig
from megatron_stream.observe.events import read_events
from megatron_stream.observe.metrics import read_metrics
from megatron_stream.observe.summary import summarize
from megatron_stream.observe.trace import write_trace

logger = logging.getLogger("megatron_stream")


def write_reports(run_dir: Path, config: ObserveConfig) -> None:
    """Write what the run's events allow; a run that ended early still gets its summary."""
    events = read_events(run_dir / "events")
    if not events:
        return
    metrics = read_metrics(run_dir)
    summary = summarize(events, metrics)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if config.pictures:
        # Only here: matplotlib takes a second to import, and a run would wait for it at its start.
        from megatron_stream.observe.curves import draw_curves
        from megatron_stream.observe.timeline import draw_timeline

        write_trace(events, run_dir / "trace.json")
        draw_timeline(events, run_dir / "timeline.png")
        draw_curves(metrics, run_dir / "curves.png")
