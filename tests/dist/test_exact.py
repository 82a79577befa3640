"""Stepping per stage equals stock Megatron-core bit by bit, and the comparison sees what breaks that."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from megatron_stream.check.exact import check_case, compare, norm_error, one_process
from megatron_stream.check.exact_case import Case, full_grid, quick_grid
from megatron_stream.check.ranks import Ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("case", quick_grid(), ids=lambda case: case.name.replace(" ", "-"))
def test_it_equals_stock(ranks: Ranks, case: Case) -> None:
    result = check_case(ranks, case)
    assert result.differences == []
    if case.clip == "never":
        assert result.rollbacks == 0
    elif case.pp > 1:
        assert result.rollbacks > 0, "nothing was stepped before the norm was known"


def _no_rollback(ours: Any) -> None:
    def forget() -> None:
        for unit in ours.units.all():
            unit.stepped = False

    ours._roll_back = forget


def _late_unit_early(ours: Any) -> None:
    start = ours._start_stats

    def start_and_step_late_unit() -> Any:
        stats = start()
        if ours.units.late.shards:
            ours._step_early(ours.units.late)
        return stats

    ours._start_stats = start_and_step_late_unit


def _norm_term_dropped(ours: Any) -> None:
    start = ours._start_stats

    def without_first_gradient() -> Any:
        parameter = ours._chain[0].get_parameters()[0]
        grad, parameter.grad = parameter.grad, None
        stats = start()
        parameter.grad = grad
        return stats

    ours._start_stats = without_first_gradient


@pytest.mark.parametrize("break_", [_no_rollback, _late_unit_early, _norm_term_dropped])
@pytest.mark.parametrize("vp", [1, 2])
def test_the_comparison_sees_a_planted_fault(ranks: Ranks, break_: Any, vp: int) -> None:
    case = Case(pp=2, vp=vp, tied=True, steps=6)
    assert check_case(ranks, case, break_).differences


@pytest.mark.parametrize("case", [Case(pp=2, tied=True), Case(pp=2, vp=2), Case(tp=2), Case(pp=4, vp=2, tied=True)])
def test_it_equals_one_process_to_rounding(ranks: Ranks, case: Case) -> None:
    """Both sides of a bitwise comparison could share a wrong setting; one process cannot."""
    case = replace(case, steps=4, clip="never")
    one = replace(one_process(case), steps=4)
    error = norm_error(check_case(ranks, case), check_case(ranks, one))
    assert error is not None and error < 1e-3


def _stock_norms(case: Case, batch_p2p_comm: bool) -> list[float]:
    from megatron_stream.platform.cpu import enable_cpu

    enable_cpu()
    from megatron_stream.check.exact_train import train

    return [float(step[1] or 0.0) for step in train(case, batch_p2p_comm=batch_p2p_comm).steps]


def test_one_process_sees_a_wrong_setting_that_both_sides_share(ranks: Ranks) -> None:
    """On gloo the batched messages of two interleaved stages are swapped (DESIGN 5.4): stock is wrong without a word."""
    case = Case(pp=2, vp=2, clip="never", steps=2)
    (one,) = ranks.call(1, _stock_norms, one_process(case), False)
    right, wrong = (ranks.call(2, _stock_norms, case, batched)[0] for batched in (False, True))
    assert right == pytest.approx(one, rel=1e-3)
    assert wrong != pytest.approx(one, rel=1e-3)


def test_lengths_that_differ_over_eight_ranks(ranks: Ranks) -> None:
    """Sequences of 5, 9, 3 and 7 tokens with tp2 pp4."""
    case = Case(pp=4, tp=2, clip="never", steps=2)
    result = check_case(ranks, case)
    assert result.differences == []
    error = norm_error(result, check_case(ranks, replace(one_process(case), steps=2)))
    assert error is not None and error < 1e-3


def _with_deferred_head_gradients(case: Case) -> tuple[list[str], list[float | None]]:
    """Compare with Megatron's deferred gradient of the output layer, its CUDA kernel written in torch."""
    from megatron.core.tensor_parallel import layers

    from megatron_stream.check import exact_job

    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = lambda inputs, grads, into: into.add_(grads.t() @ inputs)  # type: ignore[attr-defined]
    sys.modules[kernel.__name__] = layers.fused_weight_gradient_mlp_cuda = kernel
    layers._grad_accum_fusion_available = True
    make_config, make_chunks = exact_job.make_config, exact_job.make_chunks

    def config_that_defers(*args: Any) -> Any:
        config = make_config(*args)
        config.gradient_accumulation_fusion = config.defer_embedding_wgrad_compute = True
        return config

    def chunks_that_defer(*args: Any) -> list[Any]:
        """Transformer Engine's layers leave the setting alone; Megatron's own would all defer."""
        chunks = make_chunks(*args)
        for chunk in chunks:
            for name, module in chunk.module.named_modules():
                if isinstance(module, layers.ColumnParallelLinear) and name != "output_layer":
                    module.config = copy.copy(module.config)
                    module.config.defer_embedding_wgrad_compute = False
        return chunks

    exact_job.make_config, exact_job.make_chunks = config_that_defers, chunks_that_defer
    differences, norms, _, _ = compare(case)
    return differences, norms


@pytest.mark.parametrize("vp", [1, 2])
def test_a_deferred_gradient_of_the_head_is_in_before_its_unit_steps(ranks: Ranks, vp: int) -> None:
    case = Case(pp=2, vp=vp, clip="some", steps=4)
    plain = check_case(ranks, case).norms
    for differences, norms in ranks.call(2, _with_deferred_head_gradients, case):
        assert differences == []
        assert norms == pytest.approx(plain, rel=1e-5)


def test_the_full_grid_has_every_axis() -> None:
    cases = full_grid()
    assert len(cases) > 200
    for axis, values in {"pp": {1, 2, 4}, "vp": {1, 2}, "tp": {1, 2}, "dp": {1, 2}, "ep": {1, 2}}.items():
        assert {getattr(case, axis) for case in cases} == values
    assert {case.clip for case in cases} == {"never", "some", "always", "inf"}
