"""A picture of one update, or of a few in a row: from the trainer's forward passes to the engine's tokens.

Rows from the top: what each trainer stage computes, what it sends, what arrives in each engine stage's
staging memory, what each engine stage computes (coloured by version, with the commit between two passes),
and every running request's tokens. It shows at a glance what the design promises: the last stage's weights
leave while stage 0 still runs its backward passes, and tokens keep coming through the commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

Event = dict[str, Any]
Window = tuple[float, float]

DPI = 150
AFTER_COMMIT_S = 0.5  # long enough to see tokens of the new version
INK, MUTED, ROW = "#1f2430", "#5c6675", "#f5f6f8"
COMMIT = "#111111"
# Spans in the order of the legend. Colour says who works: blues compute, oranges step, greens move bytes.
COLOURS = {
    "forward": "#a9c9ea",
    "backward": "#3f7fc1",
    "wait verdict": "#dcdfe5",
    "optimizer step": "#f0932b",
    "rollback": "#d63031",
    "pack": "#a3d9b1",
    "send": "#2d9d5c",
    "arrive": "#176b46",
}
# Neighbouring versions differ clearly, also without colour vision.
VERSIONS = ("#8e7cc3", "#e8a0bf", "#5b5ea6", "#f2c879")


def version_colour(version: int) -> str:
    """Colour of a version in the engine's rows and of its tokens."""
    return VERSIONS[version % len(VERSIONS)]


@dataclass(frozen=True)
class Update:
    """The window of versions `first`..`last`: seconds since the epoch."""

    first: int
    last: int
    start: float
    end: float


def choose_update(events: list[Event], version: int | None = None, updates: int = 1) -> Update | None:
    """The window to draw: from the first forward of the step that makes `version` to `AFTER_COMMIT_S` after the
    commit of the last of `updates` versions. By default a committed version from the middle of the run.

    None when no such version was trained and committed in these events.
    """
    commits = {e["args"]["version"]: e["end"] for e in events if e["track"] == "engine" and e["name"] == "commit"}
    starts: dict[int, float] = {}
    for event in events:
        if event["name"] == "forward" and event["track"].startswith("trainer stage"):
            starts.setdefault(event["args"].get("version"), event["start"])
    whole = [v for v in sorted(commits) if starts.get(v, commits[v]) < commits[v]]
    if not whole:
        return None
    if version is None:
        version = whole[max(0, min(len(whole) // 2, len(whole) - updates))]
    elif version not in whole:
        return None
    last = whole[min(whole.index(version) + updates, len(whole)) - 1]
    length = commits[last] - starts[version]
    return Update(version, last, starts[version] - 0.01 * length, commits[last] + AFTER_COMMIT_S)


def draw_timeline(events: list[Event], path: Path, version: int | None = None, updates: int = 1) -> bool:
    """Write the PNG of `updates` consecutive updates from `version` on (see `choose_update`).

    Returns whether there was an update to draw.
    """
    update = choose_update(events, version, updates)
    if update is None:
        return False
    window = (update.start, update.end)
    shown = [e for e in events if e["start"] <= update.end and (e["end"] or e["start"]) >= update.start]
    rows = _rows(shown)
    figure = Figure(figsize=(14, 1.6 + 0.42 * len(rows) + 1.5), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    spans, tokens = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * len(rows), 1.5])
    for y, track in enumerate(rows):
        _draw_row(spans, y, [e for e in shown if e["track"] == track], window)
    _dress(spans, rows)
    _draw_tokens(tokens, shown, window)
    _draw_overlap(spans, shown, rows, update)
    for event in shown:
        if event["track"] == "engine" and event["name"] == "commit":
            tokens.axvspan(event["start"] - update.start, event["end"] - update.start, color=COMMIT, alpha=0.25, lw=0)
    tokens.set_xlim(0, update.end - update.start)
    tokens.set_xlabel("seconds")
    figure.suptitle(_title(update), x=0.01, ha="left", fontsize=12, color=INK)
    figure.legend(handles=_legend(shown), loc="outside lower center", ncols=9, frameon=False, fontsize=8)
    figure.savefig(path)
    return True


def _rows(events: list[Event]) -> list[str]:
    """The tracks in the order of the picture."""
    order = ("trainer stage", "send stage", "staging stage", "engine stage")
    tracks = {e["track"] for e in events}
    return [t for kind in order for t in sorted((t for t in tracks if t.startswith(kind)), key=_stage)]


def _stage(track: str) -> int:
    return int(track.rsplit(" ", 1)[1])


def _colour(event: Event) -> str:
    if event["name"] == "commit":
        return COMMIT
    if event["track"].startswith("engine"):
        return version_colour(event["args"]["version"])
    return COLOURS.get(event["name"], "#bbbbbb")


def _draw_row(axes: Axes, y: int, events: list[Event], window: Window) -> None:
    axes.axhspan(y - 0.42, y + 0.42, color=ROW, lw=0, zorder=0)
    boxes, colours = [], []
    smallest = (window[1] - window[0]) / 2500  # about a pixel: nothing that happened is invisible
    for event in sorted(events, key=lambda e: e["name"] == "commit"):
        if event["end"] is None:
            continue
        start = max(event["start"], window[0]) - window[0]
        end = max(min(event["end"], window[1]) - window[0], start + smallest)
        half = 0.42 if event["name"] == "commit" else 0.34
        boxes.append([(start, y - half), (start, y + half), (end, y + half), (end, y - half)])
        colours.append(_colour(event))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.4, zorder=2))
    for event in events:
        if event["name"] == "step ready":
            axes.plot(event["start"] - window[0], y - 0.3, "v", color=INK, ms=5, zorder=4, clip_on=False)
        if event["name"] == "validated":
            axes.plot(event["start"] - window[0], y + 0.3, "^", color="#1b7f3b", ms=5, zorder=4)


def _dress(axes: Axes, rows: list[str]) -> None:
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = {"trainer": "trainer", "send": "send from", "staging": "arrive in", "engine": "engine"}
    labels = [f"{names[t.split(' ', 1)[0]]} stage {_stage(t)}" for t in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9, color=INK)
    axes.tick_params(axis="both", length=0)
    axes.tick_params(axis="x", labelbottom=False)
    for above, below in zip(range(len(rows)), rows[1:], strict=False):
        if rows[above].split(" ", 1)[0] != below.split(" ", 1)[0]:
            axes.axhline(above + 0.5, color="#c9ced6", lw=0.8)
    axes.spines[:].set_visible(False)


def _draw_tokens(axes: Axes, events: list[Event], window: Window) -> None:
    """One line a request, one dot a token: a stall would be a gap in every line."""
    lines: dict[str, int] = {}
    dots = [
        (event["start"] - window[0], lines.setdefault(request, len(lines)), version_colour(event["args"]["version"]))
        for event in events
        if event["track"] == "engine" and event["name"] == "tokens"
        for request in event["args"]["requests"]
    ]
    if dots:
        x, y, colours = zip(*dots, strict=True)
        axes.scatter(x, y, c=colours, s=max(2.0, min(14.0, 300 / len(lines))), lw=0)
    axes.set_ylim(len(lines), -1)
    axes.set_yticks([])
    axes.set_ylabel(f"tokens of\n{len(lines)} requests", rotation=0, ha="right", va="center", fontsize=9, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_overlap(axes: Axes, events: list[Event], rows: list[str], update: Update) -> None:
    """From the first send of the last stage to the end of the step's last backward: the time won."""
    step = [e for e in events if e["args"].get("version") == update.first and e["end"] is not None]
    backwards = [e["end"] for e in step if e["name"] == "backward"]
    senders = [t for t in rows if t.startswith("send")]
    sends = [e["start"] for e in step if senders and e["track"] == senders[-1] and e["name"] == "send"]
    if not backwards or not sends:
        return
    first, last = min(sends) - update.start, max(backwards) - update.start
    axes.axvline(last, color=MUTED, lw=1, ls=(0, (4, 3)), zorder=3)
    y = rows.index(senders[-1])
    if first < last:
        axes.axvline(first, color=COLOURS["arrive"], lw=1, ls=(0, (4, 3)), zorder=3)
        arrow = {"arrowstyle": "<->", "color": INK, "lw": 1, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (first, y - 0.5), (last, y - 0.5), arrowprops=arrow, zorder=5)
    early = 1000 * (last - first)
    text = f"stage {_stage(senders[-1])} starts sending {abs(early):.0f} ms {'before' if early >= 0 else 'after'}"
    axes.annotate(
        f"{text}\nthe last backward of the step ends",
        (min(first, last), y - 0.5),
        (-6, 0),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        ha="right",
        va="center",
        zorder=6,
        bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": "#c9ced6", "lw": 0.6},
    )


def _title(update: Update) -> str:
    what = f"version {update.first}" if update.first == update.last else f"versions {update.first} to {update.last}"
    seconds = update.end - AFTER_COMMIT_S - update.start
    return (
        f"The update to {what}: {seconds:.2f} s from the step's first forward to the commit\n"
        "Look at how early the last stage sends, and whether tokens keep coming through the commit"
    )


def _legend(events: list[Event]) -> list[Any]:
    return list(_legend_patches(events)) + list(_legend_marks(events))


def _legend_patches(events: list[Event]) -> Iterator[Patch]:
    present = {e["name"] for e in events if not e["track"].startswith("engine")}
    for name, colour in COLOURS.items():
        if name in present:
            yield Patch(color=colour, label=name)
    engine = [e for e in events if e["track"].startswith("engine stage") and e["name"] == "forward"]
    for version in sorted({e["args"]["version"] for e in engine}):
        yield Patch(color=version_colour(version), label=f"engine forward, v{version}")
    if any(e["name"] == "commit" for e in events):
        yield Patch(color=COMMIT, label="commit")


def _legend_marks(events: list[Event]) -> Iterator[Line2D]:
    names = {e["name"] for e in events}
    for name, mark, colour in (("validated", "^", "#1b7f3b"), ("step ready", "v", INK)):
        if name in names:
            yield Line2D([], [], marker=mark, color=colour, ls="", label=name)
