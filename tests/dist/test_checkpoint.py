"""Checkpoints: training goes on bitwise in the same layout, and nothing is lost under another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.check.ranks import Ranks
from megatron_stream.errors import RunError
from megatron_stream.train import checkpoint

pytestmark = pytest.mark.dist


def _train(case: Case, first: int, load: Path | None, save: Path | None) -> Any:
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron_stream.check.exact_train import train
    from megatron_stream.train.stage_optimizer import StageOptimizer

    def wrap(optimizer: Any, chunks: list[Any], config: Any, groups: Any) -> Any:
        if load is not None:
            path = checkpoint.latest(load)
            assert path is not None
            assert checkpoint.load(path, chunks, optimizer).step == first
        ours = StageOptimizer(optimizer, chunks, groups)
        ours.attach(config)
        return ours

    def finish(chunks: list[Any], optimizer: Any) -> None:
        if save is not None:
            checkpoint.save(save, checkpoint.Progress(case.steps, optimizer.version), chunks, optimizer)

    return train(case, wrap, first=first, finish=finish)


CASES = [
    Case(pp=2, tied=True),
    Case(pp=2, vp=2),
    Case(dp=2, overlap=True, dtype="bfloat16"),
    Case(pp=2, dtype="float16"),
    Case(dp=2, experts=4, ep=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_training_goes_on_as_if_it_had_not_stopped(ranks: Ranks, case: Case, tmp_path: Path) -> None:
    case = replace(case, steps=6)
    ranks.call(case.world, _train, replace(case, steps=3), 0, None, tmp_path)
    through = ranks.call(case.world, _train, case, 0, None, None)
    resumed = ranks.call(case.world, _train, case, 3, tmp_path, None)
    for one, other in zip(through, resumed, strict=True):
        assert one.steps[3:] == other.steps
        assert [k for k in one.weights if not torch.equal(one.weights[k], other.weights[k])] == []
        assert all(torch.equal(a, b) for a, b in zip(one.state, other.state, strict=True))


def _tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    from megatron.core.dist_checkpointing import load_plain_tensors

    path = checkpoint.latest(run_dir)
    assert path is not None
    return {key: value for key, value in load_plain_tensors(str(path)).items() if isinstance(value, torch.Tensor)}


OTHER = [
    (Case(dp=2), Case()),
    (Case(), Case(tp=2)),
    (Case(pp=2), Case(pp=2, vp=2)),
    (Case(pp=2, vp=2, tied=True), Case(pp=4, tied=True)),
    (Case(tp=2, sequence_parallel=True), Case(dp=2)),
    (Case(dp=2, experts=4, ep=2), Case(pp=2, experts=4)),
    (Case(experts=4), Case(dp=2, experts=4, ep=2)),
]


@pytest.mark.parametrize(("before", "after"), OTHER, ids=lambda case: case.name.replace(" ", "-"))
def test_another_layout_holds_the_same_moments(ranks: Ranks, before: Case, after: Case, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    before, after = replace(before, steps=2), replace(after, steps=2)
    ranks.call(before.world, _train, before, 0, None, first)
    ranks.call(after.world, _train, after, 2, first, second)  # loads, trains no step, saves
    saved, (again,) = ranks.call(1, _tensors, first)[0], ranks.call(1, _tensors, second)
    assert any("exp_avg_sq" in key for key in saved)
    assert set(saved) == set(again)
    assert [key for key in saved if not torch.equal(saved[key], again[key])] == []
    ranks.call(after.world, _train, replace(after, steps=3), 2, first, None)  # and goes on


def test_a_checkpoint_of_another_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(1, _train, Case(steps=1), 0, None, tmp_path)
    with pytest.raises(RunError, match="is not a checkpoint of this model"):
        ranks.call(1, _train, Case(steps=2, experts=4), 1, tmp_path, None)
