"""What stepping per stage tells and publishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stream.check.exact_case import Case
from megatron_stream.check.ranks import Ranks
from megatron_stream.stream.listener import StepListener
from megatron_stream.train.stage_optimizer import Stepping

pytestmark = pytest.mark.dist


class _Notes(StepListener):
    """Writes down every call, and whether the published shards are the rounded main parameters."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int, int]] = []
        self.ours: Any = None
        self.stale = 0

    def stepped(self, unit: str, version: int, attempt: int) -> None:
        self.calls.append(("stepped", unit, version, attempt))
        (own,) = [u for u in self.ours.units.all() if u.name == unit]
        self.stale += sum(not torch.equal(s.model, s.main.to(s.model.dtype)) for s in own.shards)

    def validated(self, unit: str, version: int, attempt: int) -> None:
        self.calls.append(("validated", unit, version, attempt))


def _run(case: Case, lr: float | None = None) -> tuple[list[tuple[str, str, int, int]], int, int, bool]:
    """Calls, stale shards, the version reached, and whether weights are those of the start."""
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron_stream.check.exact_train import train
    from megatron_stream.train.stage_optimizer import StageOptimizer

    notes = _Notes()
    start: list[torch.Tensor] = []

    def wrap(optimizer: Any, chunks: list[Any], config: Any, groups: Any) -> Any:
        notes.ours = StageOptimizer(optimizer, chunks, groups, listener=notes)
        notes.ours.attach(config)
        start.extend(p.detach().clone() for chunk in chunks for p in chunk.module.parameters())
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        return notes.ours

    outcome = train(case, wrap)
    end = [v for k, v in outcome.weights.items() if not k.endswith(("expert_bias", "tokens_per_expert"))]
    unchanged = all(torch.equal(a, b) for a, b in zip(start, end, strict=False))
    return notes.calls, notes.stale, notes.ours.version, unchanged


def test_a_version_with_inf_on_one_stage_is_nowhere_published(ranks: Ranks) -> None:
    case = Case(pp=2, tied=True, clip="inf", steps=6)  # steps 3 and 4 are poisoned
    for rank, (calls, _, version, _) in enumerate(ranks.call(2, _run, case)):
        assert version == 4
        validated = [call for call in calls if call[0] == "validated"]
        assert [v for _, unit, v, _ in validated if unit == f"stage {rank}"] == [1, 2, 3, 4]
        attempts = {(unit, v): attempt for name, unit, v, attempt in calls if name == "stepped"}
        assert all(attempts[unit, v] == attempt for _, unit, v, attempt in validated), "the last one stepped is final"


def test_the_units_of_two_interleaved_stages(ranks: Ranks) -> None:
    first, last = ranks.call(2, _run, Case(pp=2, vp=2, tied=True, clip="never", steps=2))
    order = [[unit for name, unit, v, _ in calls if name == "stepped" and v == 1] for calls, *_ in (first, last)]
    assert order == [["stage 0 chunk 1", "stage 0"], ["stage 1 chunk 1", "stage 1", "stage 1 late"]]


def test_one_stage_steps_bucket_by_bucket_from_the_second_step_on(ranks: Ranks) -> None:
    ((calls, _, _, _),) = ranks.call(1, _run, Case(overlap=True, clip="never", steps=2))
    steps = {v: [unit for name, unit, w, _ in calls if name == "stepped" and w == v] for v in (1, 2)}
    assert len(steps[2]) > 3 and set(steps[1]) == set(steps[2])
    validated = [i for i, call in enumerate(calls) if call[0] == "validated" and call[2] == 2]
    stepped = [i for i, call in enumerate(calls) if call[0] == "stepped" and call[2] == 2]
    assert stepped[-2] < validated[0], "all buckets but the last are stepped before the norm is known"


def test_what_is_published_is_the_rounded_main_parameter_also_before_the_gather(ranks: Ranks) -> None:
    for _, stale, _, _ in ranks.call(2, _run, Case(dp=2, overlap=True, dtype="bfloat16", steps=4)):
        assert stale == 0


def test_a_step_with_learning_rate_zero_and_no_optimizer_state_changes_no_weight(ranks: Ranks) -> None:
    for *_, unchanged in ranks.call(2, _run, Case(pp=2, dtype="bfloat16", steps=1), 0.0):
        assert unchanged


def _refused(case: Case, break_: str) -> str:
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron_stream.check.exact_train import train
    from megatron_stream.train.stage_optimizer import StageOptimizer

    def wrap(optimizer: Any, chunks: list[Any], config: Any, groups: Any) -> Any:
        if break_ == "finalize":
            config.finalize_model_grads_func = print
        elif break_:
            target = optimizer.config if hasattr(optimizer.config, break_) else config
            setattr(target, break_, True)
        StageOptimizer(optimizer, chunks, groups).attach(config)

    try:
        train(case, wrap)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("break_", "reason"),
    [
        ("calculate_per_token_loss", "divide the loss by the step's tokens"),
        ("use_precision_aware_optimizer", "inside the fused optimizer"),
        ("optimizer_cpu_offload", "does not support optimizer_cpu_offload"),
        ("mtp_num_layers", "shared by middle stages"),
        ("finalize", "replaces Megatron's own function only"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(ranks: Ranks, break_: str, reason: str) -> None:
    assert reason in ranks.call(1, _refused, Case(steps=1), break_)[0]


def test_two_interleaved_stages_with_swapped_messages_are_refused(ranks: Ranks) -> None:
    for setting in ("batch_p2p_comm", "variable_seq_lengths"):
        for answer in ranks.call(2, _refused, Case(pp=2, vp=2, steps=1), setting):
            assert "confuses the messages of interleaved stages" in answer


@pytest.mark.parametrize("setting", ["mode", "copy_to"])
def test_an_unknown_word_in_stepping_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"Stepping.{setting} is 'optimstic'; it must be one of"):
        Stepping(**{setting: "optimstic"})


def test_the_adoption_example_steps_every_unit_to_the_last_version() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).parents[2] / "examples" / "adopt" / "train.py"
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    for unit in ("stage 0", "stage 1", "stage 1 late"):
        assert f"{unit}: version 5 is final and validated" in run.stdout
