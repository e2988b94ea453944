"""What each process was told by the database, in a file that outlives the process.

The effects of a transaction are written before its COMMIT is sent, the answer after it came. Where
a kill fell between the two, the server is asked later what became of the transaction id.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from history.records import Call, Writer

RETRYABLE = {"40001", "40P01", "55P03", "JQ001"}


@dataclass(frozen=True, slots=True)
class Insert:
    """A job was enqueued."""

    job_id: int
    queue: str
    max_attempts: int
    token: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A job was not enqueued, because another one holds its unique key."""

    job_id: int
    queue: str
    key: str


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt was handed out."""

    job_id: int
    run_lease: int
    attempt: int
    max_attempts: int
    batch_id: int
    position: int
    token: str


@dataclass(frozen=True, slots=True)
class End:
    """An attempt was ended by its worker; the outcome is what was asked for."""

    job_id: int
    run_lease: int
    batch_id: int
    position: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """A job was cancelled; `running` tells whether an attempt ended by it."""

    job_id: int
    running: bool


Effect = Insert | Duplicate | Claim | End | Cancel


def told(effect: Effect) -> Call:
    """An effect as the history has it."""
    args: dict[str, Any]
    answer: dict[str, Any]
    match effect:
        case Insert():
            args = {"queue": effect.queue, "key": effect.key}
            return ("insert", args, {"job": effect.job_id})
        case Duplicate():
            args = {"queue": effect.queue, "key": effect.key}
            return ("insert", args, {"job": effect.job_id, "duplicate": True})
        case Claim():
            is_last = effect.attempt >= effect.max_attempts
            answer = {"job": effect.job_id, "lease": effect.run_lease, "is_last": is_last}
            return ("claim", {}, answer)
        case End():
            args = {"job": effect.job_id, "lease": effect.run_lease, "outcome": effect.outcome}
            return ("finish", args, {"result": "done"})
        case Cancel():
            answer = {"answer": "cancelled_running" if effect.running else "cancelled"}
            return ("cancel", {"job": effect.job_id}, answer)


CLASSES: dict[str, type[Effect]] = {c.__name__: c for c in (Insert, Duplicate, Claim, End, Cancel)}


class Session:
    """A connection whose transactions are all in the ledger file."""

    def __init__(self, dsn: str, path: Path) -> None:
        self.conn = psycopg.connect(dsn)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.history = Writer(path.with_suffix(".history"), path.stem)

    def tries(self, job_id: int) -> None:
        """Say, before it, that a cancel is tried: it holds up the job also where it fails."""
        self.history.note("cancel", {"job": job_id}, {"answer": "tried"})

    def write(self, *record: object) -> None:
        os.write(self.file, (json.dumps(record) + "\n").encode())

    def commit(self, name: str, effects: list[Effect], start: float) -> None:
        """Commit a transaction, which has a name in the ledger, and say so before and after."""
        named = [[type(e).__name__, *(getattr(e, f) for f in e.__slots__)] for e in effects]
        self.write("intent", name, named)
        self.history.intend(map(told, effects), start)
        self.conn.commit()
        self.history.settle("commit")
        self.write("committed", name)

    def transact(
        self,
        body: Callable[[psycopg.Connection, list[Effect]], None],
        *,
        rollback: bool = False,
        hold_seconds: float = 0,
    ) -> list[Effect] | None:
        """Run a body in one transaction; return its effects if it committed, else None."""
        effects: list[Effect] = []
        start = self.history.begin()
        try:
            body(self.conn, effects)
            if hold_seconds:
                time.sleep(hold_seconds)
            if rollback:
                self.conn.rollback()
                self.write("rolled back")
                return None
            if not effects:
                self.conn.commit()
                return effects
            row = self.conn.execute("SELECT pg_current_xact_id()::text").fetchone()
            assert row
            self.commit(row[0], effects, start)
        except psycopg.Error as error:
            if error.sqlstate not in RETRYABLE:
                self.write("failed", error.sqlstate, str(error))
                raise
            self.conn.rollback()
            self.history.settle("rollback")
            self.write("error", error.sqlstate)
            return None
        return effects


@dataclass(slots=True)
class Story:
    """All committed effects of a race, and how often things happened."""

    effects: list[Effect]
    counts: Counter[str]
    failures: list[str]


def read_story(directory: Path, is_committed: Callable[[str], bool]) -> Story:
    """Read every ledger file; ask about commits whose answer was lost, by what they are called."""
    story = Story([], Counter(), [])

    def settle(pending: tuple[str, list[Effect]] | None) -> None:
        if pending:
            story.counts["unanswered commits"] += 1
            if is_committed(pending[0]):
                story.counts["unanswered commits that held"] += 1
                story.effects += pending[1]

    for path in sorted(directory.glob("*.ledger")):
        pending: tuple[str, list[Effect]] | None = None
        for record in _records(path):
            match record:
                case ["intent", xid, effects]:
                    pending = (xid, [CLASSES[name](*fields) for name, *fields in effects])
                case ["committed", xid]:
                    assert pending
                    assert pending[0] == xid
                    story.effects += pending[1]
                    story.counts["commits"] += 1
                    pending = None
                case ["failed", sqlstate, message]:
                    story.failures.append(f"{path.name}: {sqlstate} {message}")
                case [kind, *rest]:
                    story.counts[" ".join([kind, *rest])] += 1
                    if kind == "lost":
                        settle(pending)
                    pending = None
        settle(pending)
    return story


def _records(path: Path) -> Iterator[list[Any]]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # a kill may cut the last line short, before its COMMIT was sent
            yield json.loads(line)


def is_committed(conn: psycopg.Connection, xid: str) -> bool:
    """What became of a transaction, waited for."""
    while True:
        row = conn.execute("SELECT pg_xact_status(%s::xid8)", [xid]).fetchone()
        assert row
        if row[0] != "in progress":
            return bool(row[0] == "committed")
        time.sleep(0.01)
