"""The format: one JSON object per line.

    who     the session, whose lines are in the order in which it wrote them
    what    insert, claim, finish, cancel, retry; commit, rollback; and what the run knows:
            state (of a job whose end no session was told), promise (fifo_within: seconds below
            which inserts of a queue keep their order, null for all; "*" is any queue), drained
    args    of the call, as far as the checker looks at them
    answer  of the call
    start   before the transaction began \\ seconds of the machine's monotonic clock,
    end     after its COMMIT was answered / the same for all processes
    commit  "known", or "unknown" where the transaction may or may not have committed
    txn     number of the transaction, where its end is a line of its own

The calls of a transaction are written before its COMMIT is sent, as unknown; a line `commit` or
`rollback` with the same number follows when its end is known. A process that is killed in between
leaves them unknown.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

KNOWN, UNKNOWN, UNDONE = "known", "unknown", "undone"

Call = tuple[str, dict[str, Any], dict[str, Any]]  # what, args, answer


@dataclass(frozen=True, slots=True)
class Event:
    """A call and its answer. An end that nobody knows is at infinity."""

    who: str
    what: str
    args: dict[str, Any]
    answer: dict[str, Any]
    start: float
    end: float
    commit: str = KNOWN
    where: str = ""  # file and line

    @property
    def job(self) -> int | None:
        found = self.answer.get("job", self.args.get("job"))
        return None if found is None else int(found)

    def __str__(self) -> str:
        return f"{self.where} {self.who} {self.what} {self.args} -> {self.answer} ({self.commit})"


class Writer:
    """Appends the history of one session to a file."""

    def __init__(self, path: Path, who: str) -> None:
        self.who, self.txn = who, 0
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, **fields: object) -> None:
        os.write(self.file, (json.dumps({"who": self.who, **fields}) + "\n").encode())

    def begin(self) -> float:
        """Number the next transaction, and return when it began."""
        self.txn += 1
        return time.monotonic()

    def intend(self, calls: Iterable[Call], start: float) -> None:
        """Write the calls of a transaction, before its COMMIT is sent."""
        lines = [
            {
                "who": self.who,
                "txn": self.txn,
                "what": what,
                "args": args,
                "answer": answer,
                "start": start,
                "end": None,
                "commit": UNKNOWN,
            }
            for what, args, answer in calls
        ]
        os.write(self.file, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def settle(self, what: str) -> None:
        """Write what became of the transaction: commit or rollback."""
        self.write(txn=self.txn, what=what, end=time.monotonic())

    def note(self, what: str, args: dict[str, Any], answer: dict[str, Any]) -> None:
        """Write something that holds from now on."""
        now = time.monotonic()
        self.write(what=what, args=args, answer=answer, start=now, end=now, commit=KNOWN)


def read(path: Path) -> Iterator[Event]:
    """The events of a file. Only the transactions that are open are held in memory."""
    pending: dict[tuple[str, int], list[Event]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # a kill may cut the last line short, before its COMMIT was sent
            record = json.loads(line)
            session = (record["who"], record.get("txn", 0))
            if record["what"] in ("commit", "rollback"):
                commit = KNOWN if record["what"] == "commit" else UNDONE
                for event in pending.pop(session, ()):
                    yield replace(event, end=record["end"], commit=commit)
                continue
            event = Event(
                record["who"],
                record["what"],
                record.get("args") or {},
                record.get("answer") or {},
                record["start"],
                inf if record.get("end") is None else record["end"],
                record.get("commit", KNOWN),
                f"{path.name}:{number}",
            )
            if "txn" in record and event.commit == UNKNOWN:
                pending.setdefault(session, []).append(event)
            else:
                yield event
    for events in pending.values():
        yield from events
