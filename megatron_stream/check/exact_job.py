"""One rank's model, optimizer and schedule for a case: Megatron-core's own parts, as a training script has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.check.exact_model import make_chunks, make_config

LR = 1e-3


@dataclass(frozen=True)
class Job:
    """`optimizer`: Megatron's own. `config` is the one that all chunks share."""

    case: Case
    groups: Any
    config: Any
    chunks: list[Any]
    optimizer: Any

    def run_schedule(self, data: Sequence[tuple[torch.Tensor, float]]) -> None:
        """Forward and backward of microbatches: tokens [2, s], and what their loss is multiplied by."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        interleaved = self.case.vp > 1
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(data) for _ in self.chunks] if interleaved else iter(data),
            model=self.chunks,
            num_microbatches=len(data),
            seq_length=max(tokens.shape[1] for tokens, _ in data),
            micro_batch_size=2,
            forward_only=False,
        )


def _forward_step(data: Any, chunk: Any) -> Any:
    tokens, scale = next(data)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    output = chunk(tokens, positions, None, labels=tokens.roll(-1, 1))
    return output, lambda per_token: (per_token.float().mean() * scale, {})


def build_job(case: Case, batch_p2p_comm: bool = False) -> Job:
    """Collective."""
    from megatron.core.distributed import finalize_model_grads

    groups = _initialize(case)
    config = make_config(case, batch_p2p_comm)
    chunks = make_chunks(case, config, groups)
    optimizer = _build_optimizer(case, chunks, groups)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if case.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if case.vp > 1 else chunks[0].no_sync
    return Job(case, groups, config, chunks, optimizer)


def _initialize(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def _clip_of(case: Case) -> float:
    """`some`: between the norms of ordinary and of loud steps."""
    return {"never": 1e9, "some": 20.0, "always": 1e-2, "inf": 1e9}[case.clip]


def _build_optimizer(case: Case, chunks: list[Any], groups: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=0.1,
        clip_grad=_clip_of(case),
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        params_dtype=getattr(torch, case.dtype),
        use_distributed_optimizer=True,
        overlap_param_gather=case.overlap,
        log_num_zeros_in_grad=True,
        # Without a scaler, stock Megatron writes inf and nan into the weights; with one it skips the step.
        loss_scale=1.0 if case.clip == "inf" and case.dtype != "float16" else None,
        initial_loss_scale=2.0**12,
        hysteresis=1,
        loss_scale_window=4,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=groups)
