"""One part of a run as a child process: started, watched, ended, with its own log file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_stream.errors import MISTAKE

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child: get SIGTERM when the supervisor is gone, however it went (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Part:
    """A child in a process group of its own, so that a Ctrl-C reaches the supervisor alone."""

    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self._seen: dict[int, psutil.Process] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()  # a resumed run's log begins with the earlier run's lines
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment or dict(os.environ),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -n when signal n ended it."""
        return self.process.poll()

    def tree(self) -> list[psutil.Process]:
        """The child and all that it started and that still run, also what has lost its parent since last asked."""
        try:
            own = psutil.Process(self.process.pid)
            for process in [own, *own.children(recursive=True)]:
                self._seen[process.pid] = process
        except psutil.NoSuchProcess:
            pass
        self._seen = {pid: process for pid, process in self._seen.items() if process.is_running()}
        return list(self._seen.values())

    def _lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def error_lines(self, count: int) -> list[str]:
        """The lines that most likely say why it ended."""
        lines = self._lines()
        telling = [line for line in lines if "error" in line.lower() and not line.lstrip().startswith("File ")]
        return telling[-count:] or lines[-count:]

    def mistake(self) -> str | None:
        """What the child said about a user's mistake, if that is why it ended."""
        said = [line.removeprefix(MISTAKE) for line in self._lines() if line.startswith(MISTAKE)]
        return said[-1] if said else None


def end_parts(parts: list[Part], grace_s: float) -> None:
    """SIGTERM to all at once, SIGKILL to what is left after `grace_s` seconds."""
    trees = [process for part in parts for process in part.tree()]
    for part in parts:
        if part.exit_code is None:
            part.process.terminate()
    deadline = time.monotonic() + grace_s
    for part in parts:
        with contextlib.suppress(subprocess.TimeoutExpired):
            part.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    _, alive = psutil.wait_procs(trees, timeout=max(0.1, deadline - time.monotonic()))
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def memory_gib(parts: list[Part]) -> float:
    """Memory of all parts together: proportional set size, so that shared pages count once."""
    total = 0
    for part in parts:
        for process in part.tree():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
    return total / 2**30
