"""The trainer's log-probabilities are those of the sampling temperature, also with the vocabulary split."""

from __future__ import annotations

import pytest
import torch

from megatron_stream.check.ranks import Ranks

pytestmark = pytest.mark.dist


def _logprobs(logits_bsv: torch.Tensor, targets_bs: torch.Tensor, temperature: float) -> torch.Tensor:
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron_stream.train.parallel import initialize
    from megatron_stream.train.step import token_logprobs

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    initialize(pipeline=1, tensor=world)
    return token_logprobs(logits_bsv.chunk(world, dim=-1)[rank], targets_bs, temperature)


@pytest.mark.parametrize("tensor", [1, 2])
def test_they_are_of_the_scaled_logits(ranks: Ranks, tensor: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(2, 3, 10, generator=generator)
    targets = torch.tensor([[1, 9, 4], [0, 5, 6]])
    expected = (logits / 0.6).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    for actual in ranks.call(tensor, _logprobs, logits, targets, 0.6):
        assert torch.allclose(actual, expected, atol=1e-5)
