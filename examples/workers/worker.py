"""A worker in plain synchronous Python and psycopg, without the awa package: one job at a time.

    AWA_DSN=postgresql:///app AWA_QUEUE=default python worker.py HANDLERS

HANDLERS is a module with a function for each kind, called with the args. It returns None when the
job is completed, or the outcome as finish_jobs takes it; what it raises means a retry.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

DSN = os.environ["AWA_DSN"]
QUEUE = os.environ.get("AWA_QUEUE", "default")
ME = uuid.uuid4()
TOKEN = ("job_id", "run_lease", "claim_slot", "batch_id", "position")
SCHEMA_VERSION = 2  # the one this worker was written for; a later one will do
stopping = threading.Event()


class Session:
    """A connection that is made anew when it was lost; a call is repeated until it is answered."""

    def __init__(self) -> None:
        self.conn: psycopg.Connection[dict[str, Any]] | None = None

    def call(self, query: str, *params: object) -> list[dict[str, Any]]:
        while True:
            try:
                if self.conn is None or self.conn.closed:
                    self.conn = psycopg.connect(DSN, autocommit=True, row_factory=dict_row)
                return self.conn.execute(query.encode(), params).fetchall()
            except psycopg.OperationalError as error:
                print(f"trying again: {error}", file=sys.stderr)
                time.sleep(0.5)


def beat() -> None:
    """Heartbeats and housekeeping, while the main thread runs handlers."""
    session = Session()
    while True:
        session.call("SELECT 1 FROM awa.heartbeat(%s)", ME)
        session.call("SELECT 1 FROM awa.tick()")
        time.sleep(1)


def outcome_of(handlers: object, job: dict[str, Any]) -> dict[str, Any]:
    handler: Callable[[Any], dict[str, Any] | None] | None = getattr(handlers, job["kind"], None)
    if handler is None:
        return {"outcome": "released", "reason": "unknown_kind"}
    try:
        return handler(job["args"]) or {"outcome": "completed"}
    except Exception as error:  # noqa: BLE001 - whatever a handler raises
        return {"outcome": "retry", "error": f"{type(error).__name__}: {error}"}


def finish(session: Session, job: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Report an outcome; one that is refused becomes a retry."""
    token = {key: job[key] for key in TOKEN}
    query = "SELECT result, reason FROM awa.finish_jobs(%s, %s::jsonb)"
    while True:
        try:
            [answer] = session.call(query, ME, json.dumps([token | outcome]))
        except (TypeError, ValueError, psycopg.DataError) as error:  # no JSON
            answer = {"result": "invalid", "reason": type(error).__name__}
        if answer["result"] == "busy":
            time.sleep(0.1)
        elif answer["result"] == "invalid":
            reason = f"the outcome was refused: {answer['reason']}"
            outcome = {"outcome": "retry", "error": reason}
        else:  # also stale: another worker has the job by now, or it was cancelled
            return


def sleep_until_work(session: Session) -> None:
    """Wait for a notification, but look again after a while."""
    status = session.call("SELECT * FROM awa.claim_status(%s, arm => true)", QUEUE)[0]
    if status["reason"] == "ready" or session.conn is None:
        return
    seconds = min(status["retry_after_ms"] / 1000, 2)  # so that SIGTERM does not wait long
    if status["channel"] is None or status["reason"] in ("in_flight", "contended"):
        stopping.wait(seconds)
        return
    try:
        session.conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(status["channel"])))
        # Armed again after LISTEN: what was rung in between is seen now.
        again = session.call("SELECT reason FROM awa.claim_status(%s, arm => true)", QUEUE)[0]
        if again["reason"] in ("idle", "paused"):
            list(session.conn.notifies(timeout=seconds, stop_after=1))
    except psycopg.OperationalError:
        pass  # the next call connects again


def main() -> None:
    sys.path.insert(0, "")
    handlers = importlib.import_module(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    session = Session()
    if session.call("SELECT awa.schema_version() AS number")[0]["number"] < SCHEMA_VERSION:
        sys.exit("JQ006: the database has an older awa: run `awa upgrade`")
    session.call("SELECT awa.register_instance(%s, %s)", ME, '{"client": "plain python"}')
    threading.Thread(target=beat, daemon=True).start()
    while not stopping.is_set():
        jobs = session.call("SELECT * FROM awa.claim_ready_runtime(%s, 1, %s)", QUEUE, ME)
        if not jobs:
            sleep_until_work(session)
        for job in jobs:
            finish(session, job, outcome_of(handlers, job))


if __name__ == "__main__":
    main()
