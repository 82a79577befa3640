"""The course of a run as a picture: reward, gradient norm, lag and seconds of every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WINDOW = 8  # steps of the running mean

_PANELS = (
    ("reward", "reward"),
    ("grad_norm", "gradient norm"),
    ("lag_mean", "lag, versions"),
    ("step_s", "seconds of a step"),
)


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw_curves(metrics: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw the steps in `metrics` (see `read_metrics`) to a PNG; False, and no file, without a step."""
    steps = [line for line in metrics if "step" in line]
    if not steps:
        return False
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        points = [(line["step"], line[key]) for line in steps if line.get(key) is not None]
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if not points:
            continue
        x, y = [step for step, _ in points], [float(value) for _, value in points]
        axes.plot(x, y, ".", color="#9aa5b1", markersize=4, label="step")
        axes.plot(x, running_mean(y), color="#1f5fa8", linewidth=1.6, label=f"mean of {WINDOW}")
        axes.set_ylim(bottom=min(0.0, *y))
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.savefig(path, dpi=110)
    return True
