"""A session of the race that outlives its connection, its server and a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from race.ledger import RETRYABLE, Effect
from race.ledger import Session as PlainSession

# A row per transaction that said what it did. The id of a transaction will not do: one whose WAL
# was lost with the server can be given out again.
WITNESS = "CREATE TABLE observed.commits (token text)"
RECONNECT_SECONDS = 60
# What a call may meet in a storm: timeouts, cancels, terminations, a server that starts, no room.
SURVIVED = RETRYABLE | {
    "57014",
    "57P01",
    "57P02",
    "57P03",
    "57P05",
    "25P03",
    "25P04",
    "53100",
}


class Session(PlainSession):
    """Writes down what became of each transaction, also where it cannot know."""

    def __init__(self, dsn: str, path: Path) -> None:
        self._dsn = psycopg.conninfo.make_conninfo(dsn, application_name=path.stem)
        self._name, self._count = path.stem, 0
        super().__init__(self._dsn, path)

    def transact(
        self,
        body: Callable[[psycopg.Connection, list[Effect]], None],
        *,
        rollback: bool = False,
        hold_seconds: float = 0,
    ) -> list[Effect] | None:
        """Run a body in one transaction; return its effects if it certainly committed."""
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
            else:
                self._count += 1
                token = f"{self._name}/{self._count}"
                self.conn.execute("INSERT INTO observed.commits VALUES (%s)", [token])
                self.commit(token, effects, start)
        except psycopg.Error as error:
            self._note(error)
            return None
        return effects

    def _note(self, error: psycopg.Error) -> None:
        is_broken = self.conn.closed
        if not is_broken and error.sqlstate not in SURVIVED:
            self.write("failed", error.sqlstate, str(error))
            raise error
        self.write("lost", error.sqlstate or "connection")
        try:
            self.conn.rollback()
        except psycopg.Error:
            self.reconnect()

    def reconnect(self) -> None:
        """Connect again, as soon as the server lets us in."""
        self.conn.close()
        end = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                self.conn = psycopg.connect(self._dsn)
                return
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
