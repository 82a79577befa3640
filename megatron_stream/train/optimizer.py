"""Megatron-core's DDP and distributed optimizer around a stage."""

from __future__ import annotations

from typing import Any

import torch

from megatron_stream.config import OptimizerConfig


def wrap_ddp(model: torch.nn.Module, config: Any, groups: Any) -> Any:
    """Megatron's DistributedDataParallel with the distributed optimizer's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, ddp_config, model, pg_collection=groups)


def build_optimizer(config: OptimizerConfig, chunks: list[Any], dtype: torch.dtype, groups: Any) -> Any:
    """Megatron's distributed AdamW, wrapped in its ChainedOptimizer as `get_megatron_optimizer` does."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(megatron_config, chunks, use_gloo_process_groups=False, pg_collection=groups)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant. `step` counts from 0."""
    if step >= config.warmup_steps:
        return config.lr
    return config.lr * (step + 1) / config.warmup_steps
