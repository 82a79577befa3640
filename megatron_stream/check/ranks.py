"""Gloo processes on this machine that run a function together: for checks, benchmarks and tests.

Importing torch and Megatron-core takes longer than a small training run. So one process imports them once and forks
the ranks of each call, which are as new as freshly started ones and leave nothing behind.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import psutil

from megatron_stream.errors import RunError
from megatron_stream.platform.quiet import quiet_megatron

_HOST = "127.0.0.1"
_PRELOAD = ("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel")
_GRACE_S = 10.0


def _send(connection: Connection, message: Any) -> None:
    """By value: torch's own way shares a tensor's memory with a process that ends here."""
    connection.send_bytes(pickle.dumps(message))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _rank(connection: Connection, rank: int, world: int, port: int, deadline_s: float, call: Any) -> None:
    import torch.distributed as dist

    function, arguments = call
    timeout = timedelta(seconds=deadline_s)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, but not in its __all__
            _HOST, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
        )
        if rank == 0:
            _send(connection, (store.port, None))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        result = function(*arguments)
        dist.barrier()
        _send(connection, (result, None))
    except Exception:  # the caller reports it with the rank
        _send(connection, (None, traceback.format_exc()))
    connection.close()


def _run(world: int, deadline_s: float, call: Any) -> list[Any]:
    """Raises RunError, after ending all ranks."""
    context = get_context("fork")
    deadline = time.monotonic() + deadline_s
    processes: list[Any] = []
    connections: list[Connection] = []

    def start(rank: int, port: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        # Not a daemon: it may have children (those that write checkpoints).
        process = context.Process(target=_rank, args=(theirs, rank, world, port, deadline_s, call))
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)

    def answers(ranks: Iterable[int]) -> dict[int, Any]:
        """What each of these ranks sends next, in the order of arrival."""
        found: dict[int, Any] = {}
        waiting = {connections[rank]: rank for rank in ranks}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunError(f"no answer from rank {sorted(waiting.values())} within {deadline_s:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    found[rank], error = _receive(connection)
                except EOFError:
                    error = "the process died"
                if error:
                    raise RunError(f"rank {rank} failed:\n{error}")
        return found

    try:
        start(0, 0)
        port = answers([0])[0]
        for rank in range(1, world):
            start(rank, port)
        results = answers(range(world))
        for process in processes:
            process.join(_GRACE_S)
        return [results[rank] for rank in range(world)]
    finally:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()


def _serve(connection: Connection, deadline_s: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_megatron()
    for module in _PRELOAD:
        importlib.import_module(module)
    while True:
        try:
            world, call = _receive(connection)  # imports what the function needs, for all later calls
        except EOFError:  # the parent is done, or gone
            return
        try:
            _send(connection, (_run(world, deadline_s, call), None))
        except RunError as error:
            _send(connection, (None, str(error)))


class Ranks:
    """Use as `with Ranks() as ranks`. `deadline_s` holds for each call."""

    def __init__(self, deadline_s: float = 300.0) -> None:
        context = get_context("spawn")
        self._deadline_s = deadline_s
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, deadline_s))
        self._process.start()
        theirs.close()

    def call(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on each rank of a new gloo world; what each returned (picklable).

        Raises RunError with the traceback of the first rank that failed, or naming those without an answer.
        """
        _send(self._connection, (world, (function, arguments)))
        if not self._connection.poll(self._deadline_s + 60.0):  # the first call imports
            raise RunError(f"the process that starts ranks did not answer within {self._deadline_s + 60.0:g} s")
        try:
            results, error = _receive(self._connection)
        except EOFError:
            raise RunError("the process that starts ranks died") from None
        if error:
            raise RunError(error)
        return list(results)

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
