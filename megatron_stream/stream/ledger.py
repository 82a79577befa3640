"""The rules of commit, as a state machine without I/O.

One version at a time is *open*: its units may be written into staging memory. It is *ready* when every unit
is validated and every worker has staged that very attempt; then it is committed, and nothing may be written
until the workers have copied it. A version whose sender passed it over is dead, and the newest requested
version is opened next: newest wins, and an open version is never starved by a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Attempt = tuple[int, int]  # (version, attempt)


class Decision(Enum):
    WRITE = "write"
    SKIP = "skip"
    WAIT = "wait"


@dataclass
class Ledger:
    """State of one engine. `units` maps each unit to the workers that hold it."""

    committed: int = 0
    committing: int | None = None
    open: int | None = None
    units: dict[str, frozenset[int]] = field(default_factory=dict)
    # (unit, version) -> attempt: the next version may be validated before this one is staged everywhere
    _validated: dict[tuple[str, int], int] = field(default_factory=dict)
    _staged: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    _dead: set[int] = field(default_factory=set)

    def register(self, unit: str, workers: frozenset[int]) -> None:
        self.units[unit] = workers

    def begin(self, unit: str, version: int, attempt: int) -> Decision:
        """May `unit` overwrite its staging memory with `version`?"""
        assert unit in self.units, f"unit {unit} was not registered"
        if version <= self.committed or version in self._dead:
            return Decision.SKIP
        if self.committing is not None:
            return Decision.WAIT
        if self.open is None:
            self.open = version
        if version < self.open:
            self._dead.add(version)  # this unit leaves it out, so it can never be whole
            return Decision.SKIP
        if version > self.open:
            return Decision.WAIT
        for worker in self.units[unit]:
            self._staged.pop((unit, worker), None)
        return Decision.WRITE

    def passed(self, version: int) -> None:
        """Some unit will never send `version`: it can never be whole."""
        if version <= self.committed or version == self.committing:
            return
        self._dead.add(version)
        if self.open == version:
            self.open = None

    def staged(self, unit: str, worker: int, version: int, attempt: int) -> None:
        self._staged[unit, worker] = (version, attempt)

    def validated(self, unit: str, version: int, attempt: int) -> None:
        if version > self.committed:
            self._validated[unit, version] = attempt

    def ready(self) -> int | None:
        """The open version, when every unit is validated and staged everywhere in the same attempt."""
        if self.open is None or self.committing is not None or not self.units:
            return None
        for unit, workers in self.units.items():
            attempt = self._validated.get((unit, self.open))
            if attempt is None or any(self._staged.get((unit, w)) != (self.open, attempt) for w in workers):
                return None
        return self.open

    def commit_started(self, version: int) -> None:
        assert self.ready() == version
        self.committing = version

    def commit_done(self, version: int) -> None:
        assert self.committing == version > self.committed
        self.committed, self.committing, self.open = version, None, None
        self._dead = {dead for dead in self._dead if dead > version}
        self._validated = {key: a for key, a in self._validated.items() if key[1] > version}
