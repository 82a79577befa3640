"""One training step: the released schedule of Megatron-core over the microbatches of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stream.rl.batch import Batch, Microbatch
from megatron_stream.rl.losses import policy_loss


@dataclass(frozen=True)
class LossSettings:
    temperature: float
    clip_low: float
    clip_high: float


def token_logprobs(logits_bsv: Tensor, targets_bs: Tensor, temperature: float) -> Tensor:
    """Log-probability of each target, [b, s] fp32, of logits [b, s, v / tp] sampled at `temperature`."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    scaled = (logits_bsv.float() / temperature).contiguous()  # the function views it, and writes into it
    loss_bs: Tensor = vocab_parallel_cross_entropy(scaled, targets_bs)
    return -loss_bs


def run_schedule(model: Any, batch: Batch, loss: LossSettings, groups: Any) -> dict[str, float]:
    """Forward and backward of all microbatches; gradients end in the DDP buffers.

    The loss is the mean over the step's loss tokens of all ranks (`batch.num_tokens`, counted before the
    schedule starts). Returns loss metrics on the last stage, {} elsewhere.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    num_microbatches = len(batch.microbatches)
    # The schedule divides by the number of microbatches, DDP by the data-parallel size.
    rescale = num_microbatches * groups.dp_cp.size()

    def forward_step(data: Iterator[Microbatch], chunk: Any) -> Any:
        micro = next(data)
        logits_bsv = chunk(micro.tokens, micro.position_ids, None)

        def loss_func(output_bsv: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs = token_logprobs(output_bsv, micro.targets, loss.temperature)
            value, metrics = policy_loss(
                logprobs,
                micro.old_logprobs,
                micro.advantages,
                micro.loss_mask,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                num_tokens=batch.num_tokens,
            )
            return value * rescale, {"loss": value.detach(), **metrics}

        return logits_bsv, loss_func

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batch.microbatches),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=max(m.tokens.shape[1] for m in batch.microbatches),
        micro_batch_size=batch.microbatches[0].tokens.shape[0],
        forward_only=False,
    )
    if not results:
        return {}
    summed = {k: float(torch.stack([r[k] for r in results]).sum()) for k in results[0] if k != "ratio_max"}
    return summed | {"ratio_max": float(torch.stack([r["ratio_max"] for r in results]).max())}
