"""Ranks that fail: the rest is ended, the reason is told, and the next call works."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_stream.check.exact import check_grid
from megatron_stream.check.exact_case import Case, Size
from megatron_stream.check.ranks import Ranks
from megatron_stream.errors import RunError

pytestmark = pytest.mark.dist


def _work(ends: str) -> int:
    if dist.get_rank() == 1:
        if ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif ends == "error":
            raise ValueError("no such layout")
        elif ends == "asleep":
            time.sleep(3600)
    dist.barrier()
    return dist.get_rank()


def test_a_rank_that_fails_is_named_and_the_next_call_works() -> None:
    with Ranks(deadline_s=15.0) as ranks:
        for ends, told in (("killed", "rank 1 failed:\nthe process died"), ("error", "no such layout")):
            with pytest.raises(RunError, match=told):
                ranks.call(2, _work, ends)
        with pytest.raises(RunError, match=r"no answer from rank \[0, 1\] within 15 s"):
            ranks.call(2, _work, "asleep")
        assert ranks.call(2, _work, "") == [0, 1]


def test_a_case_that_crashes_differs_and_the_grid_goes_on(ranks: Ranks) -> None:
    bad = Case(pp=2, steps=1, size=replace(Size(), heads=3))
    crashed, fine = check_grid(ranks, [bad, Case(steps=1)])
    assert not crashed.ok and "rank" in crashed.differences[0]
    assert fine.ok
