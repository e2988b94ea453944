"""The locks of each call, in order, are the ones of the model of lock order: none is missing there.

The lists are read out of correctness/models/lock_order.pml. Each call is made in the situations that matter to its
locks, and what it has at its end is compared: advisory locks and leaves from pg_locks, rows by who can have them. The
order comes from a _lock_key() that says which lock is about to be taken.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from conftest import Database, DatabaseServer
from engine import (
    PRUNE_AT_ONCE,
    WORKER,
    Attempt,
    claim,
    claim_all,
    complete,
    finish,
    insert,
    open_transaction,
    rotate,
    set_settings,
    tick,
    value,
    wait_until_blocked,
)

MODEL = Path(__file__).parents[2] / "correctness/models/lock_order.pml"


# Broken by a _lock_ready() that locks the position of a job that was claimed. The model found it.
def test_two_cancels_of_a_job_that_moves_do_not_wait_for_each_other(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = insert(conn)
    answers: dict[str, str] = {}

    def cancel(name: str, connection: psycopg.Connection) -> threading.Thread:
        def body() -> None:
            try:
                answers[name] = value(connection, "SELECT awa.cancel_job(%s)", job_id)
            except psycopg.Error as error:
                answers[name] = str(error.sqlstate)

        thread = threading.Thread(target=body)
        thread.start()
        wait_until_blocked(conn, connection)
        return thread

    with (
        open_transaction(database) as gate,
        open_transaction(database) as worker,
        open_transaction(database) as updater,
        open_transaction(database) as first,
        open_transaction(database) as second,
    ):
        gate.execute("SELECT pg_advisory_xact_lock(awa._lock_key('position', %s))", [job_id])
        for connection in (first, second):
            connection.execute("SET LOCAL deadlock_timeout = '50ms'")
        [attempt] = claim(worker)
        first_thread = cancel("first", first)  # it has seen the job wait, and waits for the claim
        assert finish(worker, [attempt.item("released")]) == ["done"]
        worker.commit()
        updater.execute("SELECT awa.update_job(%s, '{\"delay_seconds\": 60}')", [job_id])
        second_thread = cancel("second", second)  # it waits where the job waits now
        assert wait_until_blocked(conn, first) == [gate.info.backend_pid]
        gate.rollback()  # the first has the old position, and wants the new one
        while gate.info.backend_pid in wait_until_blocked(conn, first):
            pass
        updater.commit()  # the job is deferred: the second must not want the old position
        second_thread.join()
        second.commit()
        first_thread.join()
        first.commit()
    assert answers == {"first": "already_cancelled", "second": "cancelled"}
