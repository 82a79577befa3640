"""The rules of commit under any order of arrival: nothing torn, nothing unvalidated, nobody starves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stream.stream.ledger import Decision, Ledger

pytestmark = pytest.mark.unit

WORKERS = {"stage 0": frozenset({0}), "stage 1": frozenset({1}), "stage 1 late": frozenset({1})}


@dataclass
class Unit:
    """A sender of one unit as `EngineLink` behaves: newest wins, one write at a time."""

    name: str
    pending: int | None = None
    asking: int | None = None
    writing: int | None = None
    passed: list[int] = field(default_factory=list)
    stepped: int = 0


class Model:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.units = {name: Unit(name) for name in WORKERS}
        self.staging: dict[str, int] = {}
        self.commits: list[int] = []
        for name, workers in WORKERS.items():
            self.ledger.register(name, workers)

    def step(self, unit: Unit) -> None:
        unit.stepped += 1
        if unit.pending is not None:
            unit.passed.append(unit.pending)
        unit.pending = unit.stepped
        self.ledger.validated(unit.name, unit.stepped, 1)

    def advance(self, unit: Unit) -> bool:
        """One move of the sender's thread; False if it can only wait."""
        if unit.writing is not None:
            self.staging[unit.name] = unit.writing
            for worker in WORKERS[unit.name]:
                self.ledger.staged(unit.name, worker, unit.writing, 1)
            unit.writing = None
            return True
        if unit.asking is None:
            if unit.passed:
                self.ledger.passed(unit.passed.pop(0))
                return True
            if unit.pending is None:
                return False
            unit.asking = unit.pending
        decision = self.ledger.begin(unit.name, unit.asking, 1)
        if decision is Decision.WAIT:
            return False
        wanted, unit.asking = unit.asking, None
        if unit.pending == wanted:
            unit.pending = None
            if decision is Decision.WRITE:
                assert self.ledger.committing is None, "writing while workers copy"
                unit.writing = wanted
        return True

    def commit(self) -> bool:
        version = self.ledger.ready()
        if version is None:
            return False
        assert set(self.staging.values()) == {version}, "a torn version would be committed"
        assert all(u.writing is None for u in self.units.values())
        self.ledger.commit_started(version)
        assert not any(self.advance(u) for u in self.units.values() if u.writing or u.asking == version)
        self.ledger.commit_done(version)
        self.commits.append(version)
        return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(WORKERS)), st.booleans()), max_size=80))
def test_any_interleaving_commits_whole_versions_in_order_and_ends_with_the_last(moves: list[tuple[str, bool]]) -> None:
    model = Model()
    for name, trains in moves:
        unit = model.units[name]
        if trains and unit.stepped <= min(u.stepped for u in model.units.values()):
            model.step(unit)
        else:
            model.advance(unit)
        model.commit()
    last = max(u.stepped for u in model.units.values())
    for unit in model.units.values():
        while unit.stepped < last:
            model.step(unit)
    queue = deque(range(1000))
    while queue and (model.commit() or any([model.advance(u) for u in model.units.values()])):
        queue.popleft()
    assert model.ledger.committed == last, f"stuck: {model.ledger}, {model.units}"
    assert model.commits == sorted(set(model.commits))


def ready_ledger(attempts: dict[str, int]) -> Ledger:
    ledger = Ledger()
    for unit, workers in WORKERS.items():
        ledger.register(unit, workers)
        assert ledger.begin(unit, 1, attempts[unit]) is Decision.WRITE
        for worker in workers:
            ledger.staged(unit, worker, 1, attempts[unit])
    return ledger


def test_a_version_is_ready_only_when_every_unit_is_validated() -> None:
    ledger = ready_ledger(dict.fromkeys(WORKERS, 1))
    for unit in WORKERS:
        assert ledger.ready() is None
        ledger.validated(unit, 1, 1)
    assert ledger.ready() == 1


def test_a_rejected_attempt_is_never_ready() -> None:
    ledger = ready_ledger(dict.fromkeys(WORKERS, 1))
    for unit in WORKERS:
        ledger.validated(unit, 1, 2 if unit == "stage 1" else 1)
    assert ledger.ready() is None
    assert ledger.begin("stage 1", 1, 2) is Decision.WRITE
    assert ledger.ready() is None
    ledger.staged("stage 1", 1, 1, 2)
    assert ledger.ready() == 1


def test_nothing_is_written_while_workers_copy() -> None:
    ledger = ready_ledger(dict.fromkeys(WORKERS, 1))
    for unit in WORKERS:
        ledger.validated(unit, 1, 1)
    ledger.commit_started(1)
    assert ledger.begin("stage 0", 2, 1) is Decision.WAIT
    ledger.commit_done(1)
    assert ledger.begin("stage 0", 2, 1) is Decision.WRITE
    assert ledger.begin("stage 1", 1, 1) is Decision.SKIP
