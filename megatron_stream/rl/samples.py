"""The durable sample stream between actor and trainer, on one SQLite file.

Every (prompt, attempt) is one row that moves through these states, each move in one transaction, so that a
kill of any process at any point neither loses nor doubles a prompt:

    due -> reserved -> ready -> claimed        reserve, append, claim
            reserved -> due                    release: the actor that held it is gone
                       ready -> stale          claim, too old; the next attempt of the prompt becomes due
                       claimed -> ready        rewind: the trainer resumed from before that step
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_stream.rl.types import Group

POLL_S = 0.05
_BUSY_S = 30.0  # how long a transaction waits for another process's transaction

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    prompt_index INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL,
    arrival INTEGER,         -- order of append
    oldest_version INTEGER,  -- of its tokens; null: it has none
    step INTEGER,            -- the step that claimed it
    payload BLOB,
    PRIMARY KEY (prompt_index, attempt)
);
CREATE INDEX IF NOT EXISTS by_state ON groups (state, step);
CREATE INDEX IF NOT EXISTS by_arrival ON groups (arrival);
CREATE TABLE IF NOT EXISTS trainer (id INTEGER PRIMARY KEY CHECK (id = 0), step INTEGER NOT NULL);
INSERT OR IGNORE INTO trainer VALUES (0, 0);
"""


class Reservation(NamedTuple):
    """The right and duty to generate one group."""

    prompt_index: int
    attempt: int


@dataclass(frozen=True)
class Counts:
    """Groups by state. `training` are the claimed ones of the step that the trainer is at."""

    ready: int = 0
    reserved: int = 0
    due: int = 0
    claimed: int = 0
    stale: int = 0
    training: int = 0

    @property
    def unconsumed(self) -> int:
        return self.ready + self.reserved + self.training


class SampleStream(Protocol):
    """What actor, trainer and live view need; safe to use from several processes and threads."""

    def reserve(self, n: int, max_unconsumed: int) -> list[Reservation]:
        """Up to n prompts to generate: the due ones first, then new ones; both in order of their index.

        Only as many as keep `counts().unconsumed` within `max_unconsumed` (see `staleness_bound`).
        """

    def append(self, group: Group) -> bool:
        """Deliver a reserved group. False, and no effect, when it was delivered before.

        Raises ValueError when it was never reserved.
        """

    def release(self) -> int:
        """Make every reserved prompt due, and say how many: the actor calls it when it starts and ends."""

    def claim(
        self,
        n_groups: int,
        step: int,
        min_version: int,
        deadline_s: float,
        stop: Callable[[], None] | None = None,
    ) -> list[Group]:
        """The groups of optimizer step `step`: the n that arrived first and are young enough.

        A group with a token older than `min_version` becomes stale, and its prompt due again. A step that
        has its groups already gets the same ones, so that every rank may ask. `stop` is called at each
        poll, and may raise to end the wait. Raises TimeoutError after `deadline_s` seconds.
        """

    def rewind(self, step: int) -> int:
        """Resume after `step`: what later steps claimed becomes ready; says how many groups.

        They keep their order of arrival, so that the repeated steps train on the same groups. Their tokens
        may carry versions that the resume threw away; their log-probabilities still hold.
        """

    def counts(self) -> Counts: ...


def staleness_bound(max_lag_versions: int, groups_per_step: int) -> int:
    """How many groups may be unconsumed (ready, being generated, or in the step being trained).

    The rule of AReaL (arXiv 2505.24298). Were there more, the last of them would be trained on more than
    `max_lag_versions` steps after the weights that start it now: it would be generated for nothing.
    """
    return (max_lag_versions + 1) * groups_per_step


def stream_path(run_dir: Path) -> Path:
    return run_dir / "samples.sqlite"


class SqliteSampleStream:
    """A `SampleStream` in one SQLite file (WAL mode), for the processes of one host.

    Every transaction is on disk when its call returns. Not for network file systems: WAL needs memory that
    the processes share.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()  # one connection, used by several threads
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._enter_wal_mode()
        self._db.execute("PRAGMA synchronous=FULL")
        with self._transaction() as db:
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)

    def _enter_wal_mode(self) -> None:
        # SQLite does not apply its busy timeout here, when two processes create the file at once.
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            # IMMEDIATE: a transaction that reads first and writes later could not wait for its turn.
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def reserve(self, n: int, max_unconsumed: int) -> list[Reservation]:
        with self._transaction() as db:
            n = max(0, min(n, max_unconsumed - _counts(db).unconsumed))
            taken = [
                Reservation(*row)
                for row in db.execute(
                    "SELECT prompt_index, attempt FROM groups WHERE state = 'due' ORDER BY 1, 2 LIMIT ?", (n,)
                )
            ]
            (fresh,) = db.execute("SELECT coalesce(max(prompt_index) + 1, 0) FROM groups").fetchone()
            taken += [Reservation(fresh + i, 0) for i in range(n - len(taken))]
            db.executemany(
                "INSERT OR REPLACE INTO groups (prompt_index, attempt, state) VALUES (?, ?, 'reserved')",
                taken,
            )
        return taken

    def append(self, group: Group) -> bool:
        key = (group.prompt_index, group.attempt)
        with self._transaction() as db:
            query = "SELECT state FROM groups WHERE (prompt_index, attempt) = (?, ?)"
            row = db.execute(query, key).fetchone()
            if row is None:
                raise ValueError(f"prompt {key[0]}, attempt {key[1]} was never reserved")
            # Also from 'due': a released prompt's late delivery is as good as a second one.
            if row[0] not in ("reserved", "due"):
                return False
            db.execute(
                "UPDATE groups SET state = 'ready', oldest_version = ?, payload = ?,"
                " arrival = (SELECT coalesce(max(arrival), 0) + 1 FROM groups)"
                " WHERE (prompt_index, attempt) = (?, ?)",
                (group.oldest_version, group.to_json(), *key),
            )
        return True

    def release(self) -> int:
        with self._transaction() as db:
            return db.execute("UPDATE groups SET state = 'due' WHERE state = 'reserved'").rowcount

    def claim(
        self,
        n_groups: int,
        step: int,
        min_version: int,
        deadline_s: float,
        stop: Callable[[], None] | None = None,
    ) -> list[Group]:
        deadline = time.monotonic() + deadline_s
        while True:
            with self._transaction() as db:
                groups = _try_claim(db, n_groups, step, min_version)
            if groups is not None:
                return groups
            if stop is not None:
                stop()
            if time.monotonic() > deadline:
                counts = self.counts()
                raise TimeoutError(
                    f"step {step} waited {deadline_s:g} s for {n_groups} groups without tokens older than "
                    f"version {min_version}: {counts.ready} are ready, {counts.reserved} being generated, "
                    f"{counts.due} due for generation, {counts.stale} were too old ({self._path})"
                )
            time.sleep(POLL_S)

    def rewind(self, step: int) -> int:
        with self._transaction() as db:
            db.execute("UPDATE trainer SET step = ?", (step + 1,))
            return db.execute(
                "UPDATE groups SET state = 'ready', step = NULL WHERE state = 'claimed' AND step > ?", (step,)
            ).rowcount

    def counts(self) -> Counts:
        with self._lock:
            return _counts(self._db)

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _counts(db: sqlite3.Connection) -> Counts:
    by_state = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    (training,) = db.execute(
        "SELECT count(*) FROM groups, trainer WHERE state = 'claimed' AND groups.step >= trainer.step"
    ).fetchone()
    return Counts(**by_state, training=training)


def _try_claim(db: sqlite3.Connection, n_groups: int, step: int, min_version: int) -> list[Group] | None:
    """One poll of `claim`; None when there are not yet n groups."""
    # Asking for step s says that the steps before it are done: their groups are consumed.
    db.execute("UPDATE trainer SET step = ? WHERE step < ?", (step, step))
    held = db.execute(
        "SELECT payload FROM groups WHERE state = 'claimed' AND step = ? ORDER BY arrival", (step,)
    ).fetchall()
    if held:
        return [Group.from_json(payload) for (payload,) in held]
    db.execute(
        "INSERT INTO groups (prompt_index, attempt, state) SELECT prompt_index, attempt + 1, 'due'"
        " FROM groups WHERE state = 'ready' AND oldest_version < ?",
        (min_version,),
    )
    db.execute(
        "UPDATE groups SET state = 'stale', payload = NULL WHERE state = 'ready' AND oldest_version < ?",
        (min_version,),
    )
    rows = db.execute(
        "SELECT rowid, payload FROM groups WHERE state = 'ready' ORDER BY arrival LIMIT ?", (n_groups,)
    ).fetchall()
    if len(rows) < n_groups:
        return None
    db.executemany(
        "UPDATE groups SET state = 'claimed', step = ? WHERE rowid = ?", [(step, rowid) for rowid, _ in rows]
    )
    return [Group.from_json(payload) for _, payload in rows]
