"""Run a function in several gloo processes on this machine: the one harness of all `dist` tests."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_stream.launch.ports import choose_ports

DEADLINE_S = 300


def _child(rank: int, function: Callable[..., Any], world: int, port: int, queue: Any, args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE_S))
        result = function(*args)
        buffer = io.BytesIO()  # tensors by value: a queue of torch's would need this process alive
        torch.save(result, buffer)
        queue.put((rank, buffer.getvalue(), None))
        dist.barrier()
    except Exception:  # the parent reports it with the rank
        queue.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_distributed(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in `world` gloo processes; returns what each rank returned.

    Raises AssertionError with the traceback of the first rank that failed.
    """
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = choose_ports({"master": ("127.0.0.1", 0)})["master"]
    children = [
        context.Process(target=_child, args=(rank, function, world, port, queue, args)) for rank in range(world)
    ]
    for child in children:
        child.start()
    results: dict[int, Any] = {}
    try:
        for _ in range(world):
            rank, result, error = queue.get(timeout=DEADLINE_S)
            assert error is None, f"rank {rank} failed:\n{error}"
            results[rank] = torch.load(io.BytesIO(result), weights_only=False)
    finally:
        for child in children:
            child.join(timeout=10 if len(results) == world else 0.1)
            if child.is_alive():
                child.kill()
                child.join()
    return [results[rank] for rank in range(world)]
