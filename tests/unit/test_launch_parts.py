"""What a part's log says about why it ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_stream.errors import MISTAKE
from megatron_stream.launch.parts import Part, end_parts

pytestmark = pytest.mark.unit


def _run(log: Path, script: str) -> Part:
    part = Part("engine", [sys.executable, "-c", script], log)
    part.process.wait(timeout=30)
    return part


def test_a_users_mistake_in_a_part_is_found_in_its_own_run_only(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    first = _run(log, f"print('INFO starting'); print('{MISTAKE}no such model'); raise SystemExit(2)")
    assert (first.exit_code, first.mistake()) == (2, "no such model")
    second = _run(log, "print('ValueError: something else'); raise SystemExit(1)")
    assert second.mistake() is None
    assert second.error_lines(4) == ["ValueError: something else"], "not the lines of the run before"


def test_a_part_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    part = Part("actor", [sys.executable, "-c", script], tmp_path / "actor.log")
    while len(part.tree()) < 2:
        pass
    tree = part.tree()
    end_parts([part], grace_s=5)
    assert part.exit_code is not None
    assert not [process for process in tree if process.is_running()]
