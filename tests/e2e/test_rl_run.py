"""`megatron-stream rl` as a user runs it: the whole road on a tiny model, and what happens when a part dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_stream.launch.ports import choose_ports
from tests.unit.test_readme import ROOT
from tests.unit.test_readme import commands as readme_commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

SETTINGS = [
    "model.path=tiny",
    "experiment=demo",
    "actor.sampling.max_tokens=8",
    "actor.group_size=4",
    "algorithm.groups_per_step=2",
    "trainer.micro_batch_size=4",
    "engine.max_num_seqs=8",
    "engine.max_model_len=256",
    "engine.kv_cache_mib=64",
    "observe.wandb_mode=disabled",
]


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_stream.cli", "rl", *SETTINGS, f"dir={run_dir}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended before {what}:\n{process.communicate()[0][-3000:]}"
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.2)


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"step"') if path.exists() else 0


def children_of(process: subprocess.Popen[str], pattern: str) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [child for child in found if re.search(pattern, " ".join(child.cmdline()))]


def finish(run_dir: Path, *overrides: str) -> str:
    """Run to the end; what it printed."""
    process = start(run_dir, *overrides)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-4000:]
    return output


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run of four steps: its folder, and what it printed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    return run_dir, finish(run_dir, "trainer.steps=4", "observe.wandb_mode=offline")


def test_a_run_trains_streams_and_reports(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["versions_committed"] == 4
    assert summary["mixed_tokens"] == 0 and summary["wrong_labels"] == 0
    assert summary["lag_versions"]["max"] <= 1 + 1
    assert summary["tokens_per_s"] > 0 and summary["peak_memory_gib"] > 0
    assert (run_dir / "timeline.png").stat().st_size > 10_000
    assert (run_dir / "curves.png").stat().st_size > 10_000
    assert len(json.loads((run_dir / "trace.json").read_text())["traceEvents"]) > 100
    assert list((run_dir / "wandb").glob("offline-run-*"))
    assert "step 4/4" in output


def test_a_run_goes_on_where_it_stopped(finished: tuple[Path, str], tmp_path: Path) -> None:
    """From its checkpoint; the fresh engine follows the trainer's version."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    finish(run_dir, "resume=true", "trainer.steps=6")
    assert [line["step"] for line in step_lines(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert [line["version"] for line in step_lines(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run_dir / "summary.json").read_text())["wrong_labels"] == 0


@pytest.mark.parametrize(
    ("part", "pattern"), [("engine", r"cli serve"), ("trainer", r"cli train-rl .*--engine"), ("actor", r"cli act")]
)
def test_a_killed_part_ends_the_run_and_is_named(
    finished: tuple[Path, str], tmp_path: Path, part: str, pattern: str
) -> None:
    """In a resumed run: the fresh engine has to follow the trainer to version 4 first."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    process = start(run_dir, "resume=true", "trainer.steps=1000")
    try:
        wait_for(lambda: steps_done(run_dir) > 4, process, "step after the resume")
        everyone = psutil.Process(process.pid).children(recursive=True)
        victims = children_of(process, pattern)
        assert victims
        victims[-1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - killed < 30
        assert process.returncode == 1
        assert f"the {part} ended" in output, output[-3000:]
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        process.kill()
    steps = step_lines(run_dir)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert [line["version"] for line in steps] == list(range(1, len(steps) + 1))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == len(steps) and summary["wrong_labels"] == 0 and summary["mixed_tokens"] == 0


def test_ctrl_c_ends_all_parts(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "trainer.steps=1000")
    try:
        wait_for(lambda: len(children_of(process, "cli serve")) > 0, process, "engine")
        time.sleep(3)
        everyone = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
        assert process.returncode == 130 and "interrupted" in output
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive, f"left behind: {alive}"
    finally:
        process.kill()


def test_the_parts_start_by_themselves_as_the_readme_says(tmp_path: Path) -> None:
    """In any order: trainer and actor wait for the engine."""
    ports = choose_ports({"8000": ("127.0.0.1", 0), "8001": ("127.0.0.1", 0)})
    own = [*SETTINGS, "trainer.steps=2"]
    parts: dict[str, subprocess.Popen[bytes]] = {}
    for line in reversed([line for line in readme_commands(ROOT / "README.md") if "dir=runs/x" in line]):
        for port, chosen in ports.items():
            line = line.replace(port, str(chosen))
        program, *arguments = line.split()
        module = {"megatron-stream": "megatron_stream.cli", "torchrun": "torch.distributed.run"}[program]
        name = next(word for word in arguments if word in ("serve", "act", "train-rl"))
        with (tmp_path / f"{name}.log").open("wb") as log:
            parts[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, *own], cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT
            )
    try:
        assert parts.keys() == {"serve", "act", "train-rl"}
        assert parts["train-rl"].wait(timeout=300) == 0, (tmp_path / "train-rl.log").read_text()[-3000:]
        assert [line["version"] for line in step_lines(tmp_path / "runs/x")] == [1, 2]
        for name in ("act", "serve"):
            parts[name].terminate()
            assert parts[name].wait(timeout=60) in (0, -signal.SIGTERM), (tmp_path / f"{name}.log").read_text()[-3000:]
    finally:
        for process in parts.values():
            process.kill()
