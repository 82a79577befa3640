"""GRPO advantages."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stream.rl.advantages import group_advantages

pytestmark = pytest.mark.unit


def test_worked_example():
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    expected = 0.5 / statistics.stdev([1, 0, 0, 1])
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=True)[0] == pytest.approx(expected, rel=1e-5)


@given(st.floats(-1e6, 1e6), st.integers(0, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, n, normalize_std):
    assert group_advantages([reward] * n, normalize_std) == [0.0] * n


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.booleans())
def test_advantages_are_finite_and_sum_to_zero(rewards, normalize_std):
    advantages = group_advantages(rewards, normalize_std)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert all(abs(a) <= 20 for a in advantages)
