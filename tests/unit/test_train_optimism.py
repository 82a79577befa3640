"""Optimistic stepping stops where it is wasted, comes back where it pays, and does not flap."""

import pytest

from megatron_stream.train.optimism import Optimism

pytestmark = pytest.mark.unit


def test_it_starts_on_and_needs_a_full_window_to_change():
    optimism = Optimism(window=4)
    assert optimism.on
    assert [optimism.record(False) for _ in range(4)] == [False, False, False, True]
    assert not optimism.on


def test_it_comes_back_below_a_quarter():
    optimism = Optimism(window=4)
    for _ in range(4):
        optimism.record(False)
    changes = [optimism.record(True) for _ in range(4)]
    assert changes == [False, False, True, False] and optimism.on


def test_between_a_quarter_and_a_half_nothing_changes():
    for start in (False, True):
        optimism = Optimism(window=8)
        for _ in range(8):
            optimism.record(start)
        before = optimism.on
        for i in range(24):
            optimism.record(i % 8 not in (0, 3, 6))  # 3 of 8 rejected
        assert optimism.on == before
