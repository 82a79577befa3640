"""The picture of a run's course."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stream.observe.curves import draw_curves, running_mean

pytestmark = pytest.mark.unit


def test_the_running_mean_begins_with_what_there_is() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_a_picture_of_a_run_whose_numbers_are_partly_missing(tmp_path: Path) -> None:
    lines = [{"step": s, "reward": 0.1 * s, "grad_norm": None if s == 2 else 1.0} for s in range(1, 5)]
    assert draw_curves([*lines, {"memory_gib": 1.0}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_no_step_no_picture(tmp_path: Path) -> None:
    assert not draw_curves([{"memory_gib": 1.0}], tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
