"""The actors of the race in a storm, and the queue that real workers serve."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import psycopg

from crashes.session import SURVIVED, Session
from race import actors
from race.ledger import Effect

WORKED_QUEUE = "worked"


@dataclass(frozen=True, slots=True)
class Stage(actors.Stage):
    """Whose sessions survive."""

    def session(self, name: str) -> Session:
        return Session(self.dsn, self.directory / f"{name}.ledger")


class Producer(actors.Producer):
    """Enqueues for the workers as well."""

    def _job(self) -> dict[str, object]:
        job = super()._job()
        if self.rng.random() < 0.3:
            job |= {"queue": WORKED_QUEUE, "kind": "any", "priority": 2}
        return job


class Claimer(actors.Claimer):
    """As in the race."""


class Ticker(actors.Ticker):
    """A step may fail for a reason that the storm has made."""

    def run(self) -> None:
        while not self.stage.board.stopped:
            with contextlib.suppress(psycopg.OperationalError):
                self.tick()
            time.sleep(0.03)

    def tick(self) -> None:
        def body(conn: psycopg.Connection, _: list[Effect]) -> None:
            rows = conn.execute("SELECT step, outcome, detail FROM awa.tick()").fetchall()
            for step, outcome, detail in rows:
                if outcome != "failed":
                    self.session.write(f"{step} {outcome}")
                elif detail["sqlstate"] in SURVIVED:
                    self.session.write(f"{step} failed", detail["sqlstate"])
                else:
                    self.session.write("failed", "tick", f"{step}: {detail}")

        self.session.transact(body)
