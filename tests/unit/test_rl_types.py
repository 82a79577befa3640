"""Completions and groups: checked lengths, lossless JSON."""

import pytest

from megatron_stream.rl.types import Completion, Group, Sample

pytestmark = pytest.mark.unit


def test_json_round_trip_is_lossless():
    completion = Completion([5, 6, 7], [-0.1, -1e-9, -3.3333333333333335], [3, 3, 4], "stop")
    empty = Completion([], [], [], "length")
    group = Group(2**40, 1, [1, 2], [Sample(completion, 0.1), Sample(empty, 0.0)], {"timed_out": [1]})
    assert Group.from_json(group.to_json()) == group
    assert group.oldest_version == 3
    assert Group(0, 0, [1], [Sample(empty, 0.0)]).oldest_version is None


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="3 tokens, 2 logprobs and 3 versions"):
        Completion([1, 2, 3], [-1.0, -1.0], [0, 0, 0], "stop")


def test_version_spans_start_where_the_version_changes():
    assert Completion([1] * 6, [-1.0] * 6, [0, 0, 0, 1, 1, 3], "length").version_spans == [
        [0, 0],
        [1, 3],
        [3, 5],
    ]
    assert Completion([], [], [], "stop").version_spans == []
