"""The policy loss of one microbatch. Pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

# A ratio beyond e^20 is a fault and not a policy; unbounded, it would overflow to inf.
_MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), negated, with the separate bounds of DAPO
    (arXiv 2503.14476) and its token-level normalisation.

    logprobs, old_logprobs, advantages, mask: [b, s], aligned at the prediction position; `mask` is 1 where
    a response token is predicted, and nothing elsewhere matters, not even nan. Both log-probabilities must
    be of the same temperature. `num_tokens` is the number of masked-in tokens of the whole step, over all
    microbatches and data-parallel ranks: the losses of a step then add up to the mean over its tokens, no
    matter how it is cut.

    Returns the loss (scalar) and detached scalars: `clip_fraction` (tokens whose gradient the clip
    removed) and `approx_kl` (the k3 estimate of KL(old || new), http://joschu.net/blog/kl-approx.html), both
    divided by `num_tokens` as the loss and so to be summed, and `ratio_max`, to be maximised.
    """
    live = mask > 0
    log_ratio = torch.where(live, logprobs - old_logprobs, 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantages = torch.where(live, advantages, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    denominator = max(num_tokens, 1)
    loss = torch.maximum(unclipped, clipped).sum() / denominator
    with torch.no_grad():
        metrics = {
            "clip_fraction": (clipped > unclipped).sum() / denominator,
            "approx_kl": (ratio - 1.0 - log_ratio).sum() / denominator,
            "ratio_max": torch.where(live, ratio, 0.0).max(),
        }
    return loss, metrics
