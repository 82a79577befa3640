"""The trainer's process groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Every collective of the trainer ends after this, naming the rank in torch's error.
COLLECTIVE_DEADLINE = timedelta(minutes=10)


def initialize(pipeline: int, tensor: int = 1, device: torch.device | None = None, seed: int = 1) -> Any:
    """Join the process group of torchrun's environment and return Megatron's ProcessGroupCollection.

    `seed` starts Megatron's per-rank generators, which its layers ask for even without dropout.

    Raises:
        ValueError: if `pipeline` x `tensor` does not divide the number of ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        backend = "nccl" if device is not None and device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_DEADLINE)
    if dist.get_world_size() % (pipeline * tensor):
        raise ValueError(f"pipeline {pipeline} x tensor {tensor} does not divide {dist.get_world_size()} ranks")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def finalize() -> None:
    """Leave all groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
