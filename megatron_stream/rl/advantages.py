"""Advantages of a group of samples, as GRPO defines them."""

from __future__ import annotations

import statistics

_EPSILON = 1e-6


def group_advantages(rewards: list[float], normalize_std: bool) -> list[float]:
    """One advantage per sample: its reward less the group's mean reward.

    With `normalize_std` also divided by the group's standard deviation (of n - 1), as in GRPO
    (arXiv 2402.03300); without, as in Dr. GRPO (arXiv 2503.20783), which removes the bias towards prompts
    whose rewards hardly differ. A group of equal rewards teaches nothing: exactly 0 for each.
    """
    # Compared and not subtracted: the mean of equal floats may differ from them in the last bit, which the
    # division by a tiny deviation would blow up.
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + _EPSILON if normalize_std else 1.0
    return [(reward - mean) / scale for reward in rewards]
