"""What this rank's distributed optimizers own: the only file that reads private members of Megatron's.

Read from megatron-core 0.16.1, optimizer/distrib_optimizer.py. `check_supported` refuses what would not be exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED = ((0, 16), (0, 20))  # from, below


@dataclass(frozen=True)
class Shard:
    """The elements [start, stop) of a flattened model parameter, stepped by this data-parallel rank.

    `main` is what the optimizer steps (fp32); `model` the same elements in the model's dtype, a view of the
    parameter buffer (for fp32 models the two are the same memory). `optimizer` counts in the chain,
    `chunk` in the rank's model chunks.
    """

    name: str
    chunk: int
    optimizer: int
    param: Any  # torch.nn.Parameter with DDP's main_grad
    main: torch.Tensor
    model: torch.Tensor
    start: int
    stop: int

    def take_gradient(self) -> None:
        """The parameter's reduced gradient becomes the main parameter's.

        As DistributedOptimizer._copy_model_grads_to_main_grads does for all of them.
        """
        grad: torch.Tensor = self.param.main_grad.view(-1)[self.start : self.stop]
        self.main.grad = grad.float()

    def publish(self) -> None:
        """The stepped values become the model's, as DistributedOptimizer._copy_main_params_to_model_params."""
        if self.model.data_ptr() != self.main.data_ptr():
            self.model.copy_(self.main)


def chain_of(optimizer: Any) -> list[Any]:
    """The optimizers in Megatron's ChainedOptimizer, those without parameters left out."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not inner.is_stub_optimizer]


def check_supported(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Raises ValueError naming the setting for which per-stage stepping would not equal stock Megatron."""
    import megatron.core
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    release = tuple(int(part) for part in re.findall(r"\d+", megatron.core.__version__)[:2])
    if not SUPPORTED[0] <= release < SUPPORTED[1]:
        raise ValueError(f"megatron-core {megatron.core.__version__} is not known; 0.16 up to 0.19 are")
    chain = chain_of(optimizer)
    config, ddp = optimizer.config, chunks[0].ddp_config
    if not all(type(inner) is DistributedOptimizer for inner in chain) or ddp.use_megatron_fsdp:
        raise ValueError("per-stage stepping needs use_distributed_optimizer=True, and no FSDP or layer-wise optimizer")
    for setting, why in (
        ("use_precision_aware_optimizer", "main parameters are inside the fused optimizer and cannot be rolled back"),
        ("optimizer_cpu_offload", "its CPU part steps on streams of its own"),
        ("overlap_param_gather_with_optimizer_step", "it steps chunk 0 by an optimizer of its own, in another order"),
        ("reuse_grad_buf_for_mxfp8_param_ag", "gradients and parameters share memory, so no step can be taken back"),
    ):
        if getattr(config, setting, False):
            raise ValueError(f"per-stage stepping does not support {setting}: {why}")
    if ddp.num_distributed_optimizer_instances > 1:
        raise ValueError("per-stage stepping does not support num_distributed_optimizer_instances > 1")
    if len({id(inner.get_grad_stats_parallel_group()) for inner in chain}) > 1:
        raise ValueError("the optimizers reduce their gradient norms over different groups")
    from megatron.core.fp8_utils import is_float8tensor

    if any(is_float8tensor(p) for chunk in chunks for p in chunk.parameters()):
        raise ValueError("per-stage stepping does not support fp8 parameters: their scales are shared by all units")


def shards_of(optimizer: Any, chunks: Sequence[Any]) -> list[Shard]:
    """Every shard, in the order of each optimizer's parameters."""
    where = {
        parameter: (index, name)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    found = []
    for number, inner in enumerate(chain_of(optimizer)):
        pairs = zip(
            [p for group in inner.model_float16_groups + inner.model_fp32_groups for p in group],
            [p for group in inner.shard_fp32_from_float16_groups + inner.shard_fp32_groups for p in group],
            strict=True,
        )
        for param, main in pairs:
            ranges = inner._get_model_param_range_map(param)
            buffer, _, bucket = inner.model_param_gbuf_map[param]
            data = inner.buffers[buffer].buckets[bucket].param_data.view(-1)
            in_bucket, own = ranges["gbuf_world_in_bucket"], ranges["param"]
            chunk, name = where[param]
            model = data[in_bucket.start : in_bucket.end]
            assert model.numel() == main.numel() == own.end - own.start
            found.append(Shard(name, chunk, number, param, main, model, own.start, own.end))
    return found
