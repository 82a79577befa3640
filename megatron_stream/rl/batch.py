"""From groups to the microbatches of one data-parallel rank. Pure: every rank computes the same cut.

A sequence of L tokens (prompt and response) gives L - 1 positions; position t sees tokens 0..t and predicts
token t + 1. Everything about a response token stands at the position that predicts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stream.rl.advantages import group_advantages
from megatron_stream.rl.types import Completion, Group


@dataclass(frozen=True)
class Microbatch:
    """Tensors of shape [b, s], padded on the right; s may differ between microbatches.

    tokens, targets, position_ids: int64. loss_mask: float32, 1 where the target is a response token.
    old_logprobs, advantages: float32, 0 where the mask is 0.
    """

    tokens: Tensor
    targets: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class LagStats:
    """Versions between the weights that produced a token and those it trains, over a step's tokens."""

    mean: float
    max: int


@dataclass(frozen=True)
class Batch:
    """One rank's microbatches of a step.

    `num_tokens` counts the loss tokens of all ranks: counted here, before the pipeline schedule starts, so
    that no stage has to wait for another one's count. `lag` and `reward_mean` are of all ranks, too.
    """

    microbatches: list[Microbatch]
    num_tokens: int
    lag: LagStats
    reward_mean: float


@dataclass(frozen=True)
class _Row:
    prompt_ids: list[int]
    completion: Completion
    advantage: float

    @property
    def length(self) -> int:
        """Positions that the row occupies."""
        return max(len(self.prompt_ids) + len(self.completion.token_ids) - 1, 1)


def lag_stats(groups: list[Group], current_version: int) -> LagStats:
    """Lag of every token; 0 when there are none."""
    lags = [current_version - v for g in groups for s in g.samples for v in s.completion.versions]
    return LagStats(sum(lags) / len(lags), max(lags)) if lags else LagStats(0.0, 0)


def _rows(groups: list[Group], normalize_std: bool) -> list[_Row]:
    rows = []
    for group in groups:
        advantages = group_advantages([s.reward for s in group.samples], normalize_std)
        rows += [_Row(group.prompt_ids, s.completion, a) for s, a in zip(group.samples, advantages, strict=True)]
    return rows


def _microbatch(rows: list[_Row], pad_id: int, seq_multiple: int) -> Microbatch:
    s = math.ceil(max(row.length for row in rows) / seq_multiple) * seq_multiple
    shape = (len(rows), s)
    tokens, targets = (torch.full(shape, pad_id, dtype=torch.int64) for _ in range(2))
    loss_mask, old_logprobs, advantages = (torch.zeros(shape) for _ in range(3))
    for i, row in enumerate(rows):
        sequence = torch.tensor(row.prompt_ids + row.completion.token_ids, dtype=torch.int64)
        last = max(len(sequence) - 1, 0)
        tokens[i, :last] = sequence[:-1]
        targets[i, :last] = sequence[1:]
        response = slice(last - len(row.completion.token_ids), last)
        loss_mask[i, response] = 1.0
        old_logprobs[i, response] = torch.tensor(row.completion.logprobs)
        advantages[i, response] = row.advantage
    position_ids = torch.arange(s).expand(shape).contiguous()
    return Microbatch(tokens, targets, position_ids, loss_mask, old_logprobs, advantages)


def build_microbatches(
    groups: list[Group],
    micro_batch_size: int,
    pad_id: int,
    dp_rank: int,
    dp_size: int,
    seq_multiple: int = 1,
    *,
    current_version: int,
    normalize_std: bool = True,
) -> Batch:
    """The microbatches of rank `dp_rank`: each [micro_batch_size, s] with s a multiple of `seq_multiple`.

    Rows are sorted by length, longest first, so that little is padded and a step that does not fit into
    memory fails at once. Every rank gets the same number of microbatches, and the k-th ones of all ranks are
    neighbours in length. Rows without loss fill up what does not divide. Raises ValueError for an empty
    prompt, which nothing could predict from.
    """
    for group in groups:
        if not group.prompt_ids:
            raise ValueError(f"prompt {group.prompt_index} has no tokens")
    rows = sorted(_rows(groups, normalize_std), key=lambda row: row.length, reverse=True)
    filler = _Row([pad_id], Completion([], [], [], "filler"), 0.0)
    rows += [filler] * (-len(rows) % (micro_batch_size * dp_size))
    cuts = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    samples = [sample for group in groups for sample in group.samples]
    return Batch(
        microbatches=[_microbatch(cut, pad_id, seq_multiple) for cut in cuts[dp_rank::dp_size]],
        num_tokens=sum(len(sample.completion.token_ids) for sample in samples),
        lag=lag_stats(groups, current_version),
        reward_mean=sum(sample.reward for sample in samples) / len(samples) if samples else 0.0,
    )
