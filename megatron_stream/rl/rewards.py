"""Scoring in worker processes, so that a reward function that hangs or crashes costs one sample, not the run.

A process, because nothing else can be stopped: a thread cannot be killed, and an alarm signal only works
in the main thread of a process, and not inside C code.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Verify = Callable[[Any, str], float]

START_DEADLINE_S = 120.0  # importing a verifier on a busy machine; not part of a reward's own time
_KILL_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Reward:
    """`value` is 0 when the reward function timed out or failed; `error` then says what happened."""

    value: float
    timed_out: bool = False
    error: str = ""


def _exit_with_parent() -> None:
    """A killed parent cannot clean up, and a hung reward function would never notice its absence."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(connection: Connection, make_verify: Callable[[], Verify]) -> None:
    """The worker process: answers each (entry, text) with (value, error)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        verify = make_verify()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send("")
    while True:
        try:
            entry, text = connection.recv()
        except EOFError:
            return
        try:
            value = float(verify(entry, text))
            reply = (value, "") if math.isfinite(value) else (0.0, f"the reward is {value}")
        except Exception as error:  # the user's code: whatever it raises concerns this sample only
            reply = (0.0, f"{type(error).__name__}: {error}")
        connection.send(reply)


def _processes(make_verify: Callable[[], Verify]) -> Any:
    """Forks of a clean process that imported the verifier's module once.

    A fork of the actor would copy its locks and sockets; a spawned process would import for seconds, each time
    that a reward hangs and its process is replaced.
    """
    function = make_verify.func if isinstance(make_verify, partial) else make_verify
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__, function.__module__])
    return processes


class _Worker:
    """One reward process. Blocking; called from the scorer's threads."""

    def __init__(self, make_verify: Callable[[], Verify]) -> None:
        processes = _processes(make_verify)
        self._connection, theirs = processes.Pipe()
        self.process = processes.Process(target=_serve, args=(theirs, make_verify), daemon=True, name="reward")
        self.process.start()
        theirs.close()
        error = f"not ready within {START_DEADLINE_S:.0f} s"
        try:
            if self._connection.poll(START_DEADLINE_S):
                error = self._connection.recv()
        except EOFError:
            error = "it died while starting"
        if error:
            self.kill()
            raise RuntimeError(f"the reward process could not start: {error}")

    def score(self, entry: Any, text: str, timeout_s: float) -> Reward | None:
        """None when the process died."""
        try:
            self._connection.send((entry, text))
            if not self._connection.poll(timeout_s):
                return Reward(0.0, timed_out=True, error=f"no reward within {timeout_s:g} s")
            value, error = self._connection.recv()
        except (EOFError, OSError):
            return None
        return Reward(value, error=error)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_KILL_DEADLINE_S)


class Scorer:
    """A pool of reward processes; use as `async with Scorer(...) as scorer`.

    `make_verify` is picklable and is called once in each process; it returns `verify(entry, text) -> float`.
    Processes start when first needed, and a killed one is replaced when next needed.
    """

    def __init__(self, make_verify: Callable[[], Verify], timeout_s: float, workers: int = 2) -> None:
        self._make_verify = make_verify
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        # None stands for a process that is still to be started.
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()
        for _ in range(workers):
            self._idle.put_nowait(None)

    async def score(self, entry: Any, text: str) -> Reward:
        """Reward of one text; any number may be awaited at once.

        A function that takes longer than `timeout_s` (once it has a process to itself), raises, dies or
        returns no finite number scores 0, and the `Reward` says so. Raises RuntimeError when a process
        cannot be started at all. The wait for a free process ends because each one's work has a deadline.
        """
        loop = asyncio.get_running_loop()
        worker = await self._idle.get()
        keep = False
        try:
            if worker is None:
                worker = await loop.run_in_executor(self._threads, _Worker, self._make_verify)
            reward = await loop.run_in_executor(self._threads, worker.score, entry, text, self._timeout_s)
            keep = reward is not None and not reward.timed_out
            return reward or Reward(0.0, error="the reward process died")
        finally:
            if worker is not None and not keep:
                worker.kill()
            self._idle.put_nowait(worker if keep else None)

    async def __aenter__(self) -> Scorer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while not self._idle.empty():
            worker = self._idle.get_nowait()
            if worker is not None:
                worker.kill()
        self._threads.shutdown(wait=False)
