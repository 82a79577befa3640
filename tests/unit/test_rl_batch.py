"""Groups to microbatches: alignment, completeness and equal counts on every data-parallel rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stream.rl.advantages import group_advantages
from megatron_stream.rl.batch import build_microbatches
from megatron_stream.rl.types import Completion, Group, Sample

pytestmark = pytest.mark.unit

PAD = 0


def make_group(index, prompt_length, lengths, version=0):
    """Token ids are unique over the groups of a test, so that each can be found again."""
    tokens = iter(range(1 + 10_000 * (index + 1), 10**6))
    prompt = [next(tokens) for _ in range(prompt_length)]
    samples = []
    for i, length in enumerate(lengths):
        ids = [next(tokens) for _ in range(length)]
        samples.append(Sample(Completion(ids, [-t / 1e6 for t in ids], [version] * length, "stop"), float(i % 2)))
    return Group(index, 0, prompt, samples)


def test_alignment_at_the_predicting_position():
    group = Group(
        0,
        0,
        [11, 12, 13],
        [
            Sample(Completion([21, 22], [-0.5, -0.25], [4, 5], "stop"), 1.0),
            Sample(Completion([31], [-0.75], [5], "stop"), 0.0),
        ],
    )
    batch = build_microbatches([group], 2, PAD, 0, 1, 4, current_version=6, normalize_std=False)
    (micro,) = batch.microbatches
    assert micro.tokens.tolist() == [[11, 12, 13, 21], [11, 12, 13, PAD]]
    assert micro.targets.tolist() == [[12, 13, 21, 22], [12, 13, 31, PAD]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert micro.loss_mask.tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert micro.old_logprobs.tolist() == [[0, 0, -0.5, -0.25], [0, 0, -0.75, 0]]
    assert micro.advantages.tolist() == [[0, 0, 0.5, 0.5], [0, 0, -0.5, 0]]
    assert batch.num_tokens == 3
    assert (batch.lag.mean, batch.lag.max) == (pytest.approx(4 / 3), 2)
    assert batch.reward_mean == 0.5


def test_one_long_sample_against_ten_short_ones():
    groups = [make_group(0, 3, [100]), make_group(1, 3, [10] * 10)]
    ranks = [build_microbatches(groups, 1, PAD, r, 2, current_version=0) for r in range(2)]
    assert [len(b.microbatches) for b in ranks] == [6, 6]
    # The short ones are not padded to the long one's length.
    assert sorted(m.tokens.shape[1] for b in ranks for m in b.microbatches)[-2:] == [12, 102]


def test_rows_of_similar_length_share_a_microbatch():
    batch = build_microbatches([make_group(0, 3, [10, 100] * 4)], 2, PAD, 0, 1, current_version=0)
    assert [m.tokens.shape[1] for m in batch.microbatches] == [102, 102, 12, 12]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 12), min_size=1, max_size=5)), max_size=4),
    micro_batch_size=st.integers(1, 4),
    dp_size=st.integers(1, 3),
    seq_multiple=st.sampled_from([1, 4, 8]),
)
def test_every_response_token_is_trained_exactly_once(shape, micro_batch_size, dp_size, seq_multiple):
    groups = [make_group(i, prompt, lengths) for i, (prompt, lengths) in enumerate(shape)]
    ranks = [
        build_microbatches(groups, micro_batch_size, PAD, rank, dp_size, seq_multiple, current_version=3)
        for rank in range(dp_size)
    ]
    assert len({len(batch.microbatches) for batch in ranks}) == 1
    assert len({batch.num_tokens for batch in ranks}) == 1
    expected = {}  # target token -> (input token, position, logprob, advantage)
    for group in groups:
        advantages = group_advantages([s.reward for s in group.samples], True)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            sequence = group.prompt_ids + sample.completion.token_ids
            for t, logprob in enumerate(sample.completion.logprobs, len(group.prompt_ids)):
                expected[sequence[t]] = (sequence[t - 1], t - 1, logprob, advantage)
    found = {}
    for micro in (m for batch in ranks for m in batch.microbatches):
        assert all(t.shape == micro.tokens.shape for t in vars(micro).values())
        assert micro.tokens.shape[0] == micro_batch_size and micro.tokens.shape[1] % seq_multiple == 0
        live = micro.loss_mask > 0
        assert not micro.old_logprobs[~live].any() and not micro.advantages[~live].any()
        for b, t in live.nonzero().tolist():
            target = micro.targets[b, t].item()
            assert target not in found
            found[target] = (
                micro.tokens[b, t].item(),
                micro.position_ids[b, t].item(),
                pytest.approx(micro.old_logprobs[b, t].item(), rel=1e-5),
                pytest.approx(micro.advantages[b, t].item(), rel=1e-5),
            )
    assert found == expected
    assert ranks[0].num_tokens == len(expected)


def test_empty_completions_and_a_prompt_of_one_token():
    batch = build_microbatches([make_group(0, 1, [0, 0])], 2, PAD, 0, 1, current_version=1)
    assert batch.num_tokens == 0 and batch.lag.max == 0
    assert batch.microbatches[0].loss_mask.sum() == 0
    assert batch.microbatches[0].tokens.dtype == torch.int64


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 3 has no tokens"):
        build_microbatches([make_group(3, 0, [2])], 1, PAD, 0, 1, current_version=0)
