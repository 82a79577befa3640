"""Stepping per stage equals stock Megatron-core bit by bit, and the comparison sees what breaks that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_stream.check.exact import check_case, norm_error, one_process
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


def test_the_full_grid_has_every_axis() -> None:
    cases = full_grid()
    assert len(cases) > 200
    for axis, values in {"pp": {1, 2, 4}, "vp": {1, 2}, "tp": {1, 2}, "dp": {1, 2}, "ep": {1, 2}}.items():
        assert {getattr(case, axis) for case in cases} == values
    assert {case.clip for case in cases} == {"never", "some", "always", "inf"}
