"""The policy loss against the definition, its gradient, its normalisation and its masking."""

import math

import pytest
import torch

from megatron_stream.rl.losses import policy_loss

pytestmark = pytest.mark.unit

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def test_each_side_of_the_clip_and_its_gradient():
    #       in range, above & A>0 (clipped), above & A<0 (not), below & A>0 (not), below & A<0 (clipped)
    ratios = [1.1, 1.5, 1.5, 0.5, 0.5]
    advantages = [2.0, 2.0, -2.0, 2.0, -2.0]
    old = torch.full((1, 5), -1.0)
    logprobs = (old + torch.tensor([ratios]).log()).requires_grad_()
    loss, metrics = policy_loss(logprobs, old, torch.tensor([advantages]), torch.ones(1, 5), num_tokens=5, **CLIP)
    expected = [-2.0 * 1.1, -2.0 * 1.3, 2.0 * 1.5, -2.0 * 0.5, 2.0 * 0.8]
    assert loss.item() == pytest.approx(sum(expected) / 5, rel=1e-6)
    loss.backward()
    gradient = [-2.2, 0.0, 3.0, -1.0, 0.0]  # -A * ratio where not clipped
    assert logprobs.grad[0].tolist() == pytest.approx([g / 5 for g in gradient], rel=1e-5)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 5)
    assert metrics["ratio_max"].item() == pytest.approx(1.5)
    kl = sum(r - 1 - math.log(r) for r in ratios) / 5
    assert metrics["approx_kl"].item() == pytest.approx(kl, rel=1e-4)


def test_the_sum_over_microbatches_does_not_depend_on_the_cut():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = (torch.randn(4, 7, generator=generator) for _ in range(3))
    mask = (torch.rand(4, 7, generator=generator) > 0.4).float()
    tokens = int(mask.sum())

    def total(rows):
        parts = [policy_loss(logprobs[r], old[r], advantages[r], mask[r], num_tokens=tokens, **CLIP) for r in rows]
        return [
            sum(x.item() for x in values) for values in zip(*[(p[0], p[1]["approx_kl"]) for p in parts], strict=True)
        ]

    assert total([slice(0, 1), slice(1, 4)]) == pytest.approx(total([slice(0, 4)]), rel=1e-5)


def test_what_the_mask_excludes_does_not_matter_not_even_nan():
    logprobs = torch.tensor([[-1.0, float("nan"), float("-inf")]], requires_grad=True)
    old = torch.tensor([[-1.0, 0.0, float("-inf")]])
    advantages = torch.tensor([[1.0, float("nan"), 1.0]])
    loss, metrics = policy_loss(logprobs, old, advantages, torch.tensor([[1.0, 0, 0]]), num_tokens=1, **CLIP)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]
    assert all(math.isfinite(m.item()) for m in metrics.values())


def test_no_tokens_give_zero_and_a_wild_ratio_stays_finite():
    zeros = torch.zeros(2, 3, requires_grad=True)
    loss, _ = policy_loss(zeros, zeros.detach(), zeros.detach(), torch.zeros(2, 3), num_tokens=0, **CLIP)
    loss.backward()
    assert loss.item() == 0.0 and zeros.grad.abs().sum() == 0
    wild, _ = policy_loss(
        torch.zeros(1, 1),
        torch.full((1, 1), -500.0),
        -torch.ones(1, 1),
        torch.ones(1, 1),
        num_tokens=1,
        **CLIP,
    )
    assert math.isfinite(wild.item())
