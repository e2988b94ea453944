"""Case b12: how a worker process stops.

Threads that outlive their worker keep their lease, handlers that refuse to stop and a database that
is away do not keep the process: see test_worker_process.py. Process pools are in test_executors.py.
The rule for attempts that are cut short is in docs/python.md.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest

import awa
from conftest import Database
from engine import set_settings, value
from test_worker_process import (  # noqa: F401 - a fixture
    client,
    has_more,
    marks,
    process,
    until,
    worker_sessions,
)

AHEAD = 10  # jobs that are claimed and wait behind a handler
# Seconds: the handlers, the grace period, until SIGTERM, until one is cancelled, staleness.
SHORT = (3.5, 30.0, 0.1, 0.5, 2.0)
FULL = (15.0, 30.0, 1.0, 4.0, 6.0)


def nothing_is_left(conn: psycopg.Connection) -> None:
    """No session, and no lock that would keep another process from maintenance."""
    assert worker_sessions(conn) == []
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database ="
    held += " (SELECT oid FROM pg_database WHERE datname = current_database())"
    assert value(conn, held) == 0
    assert {report.outcome for report in awa.Client(conn).tick()}.isdisjoint(
        {"contended", "failed"}
    )


# Broken by side tasks that stop first: then neither the heartbeat nor the cancel would be heard.
@pytest.mark.parametrize("times", [SHORT, pytest.param(FULL, marks=pytest.mark.long)])
def test_b12_handlers_end_within_the_grace_period_and_can_be_cancelled(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
    times: tuple[float, float, float, float, float],
) -> None:
    seconds, grace, before, until_cancel, staleness = times
    set_settings(conn, staleness_seconds=staleness, heartbeat_seconds=staleness / 4)
    jobs = [
        client.insert_job(kind, {"seconds": seconds}).job_id
        for kind in ("async_sleep", "thread_sleep", "async_sleep", "thread_sleep")
    ]
    first = client.insert_job("async_sleep", {"seconds": seconds / 2}, queue="ahead").job_id
    waiting = client.insert_many("quick", [{}] * AHEAD, queue="ahead")
    queues = {"default": 4, "ahead": 1}
    with (
        process(database, grace=grace, queues=queues, prefetch=AHEAD) as worker,
        process(database, queues={"nothing": 1}),  # somebody to rescue what is stale
    ):
        until(lambda: len(marks(conn, "start")) == 5)
        held = [job_id for job_id in waiting if client.job(job_id).state == "running"]
        time.sleep(before)
        worker.send_signal(signal.SIGTERM)
        if held:
            # What was claimed and not started goes back at once, and is not charged.
            until(lambda: client.queue_counts("ahead").running == 1)
        time.sleep(until_cancel)
        late = client.insert_job("quick").job_id
        assert client.cancel_job(jobs[1]) == "cancelled_running"
        until(lambda: marks(conn, "cancelled") == [(jobs[1], 1)], 3)
        assert worker.wait(60) == 0
    assert [client.job(job_id).state for job_id in jobs] == [
        "completed",
        "cancelled",
        "completed",
        "completed",
    ]
    assert marks(conn, "start") == sorted((job_id, 1) for job_id in [*jobs, first])
    assert client.job(first).state == "completed"
    assert client.job(late).state == "available"
    assert {(info.state, info.attempt) for info in map(client.job, waiting)} == {("available", 0)}
    nothing_is_left(conn)


# Broken by results that are dropped at the end, and by a claim that is not handed back.
def test_b12_sigterm_at_any_moment_loses_and_repeats_nothing(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
) -> None:
    jobs = client.insert_many("quick", [{}] * 600)
    for _ in range(2):
        with process(database, queues={"default": 20}) as worker:
            before = len(marks(conn, "end"))
            until(partial(has_more, conn, before + 50))
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0
        counts = client.queue_counts("default")
        assert counts.running == 0
        assert counts.completed == len(marks(conn, "end"))
    with process(database, queues={"default": 50}):
        until(lambda: client.queue_counts("default").completed == 600, 30)
    assert marks(conn, "end") == sorted((job_id, 1) for job_id in jobs)


# Async handlers are cut short and retried at once, under their lease; threads cannot be stopped.
@pytest.mark.parametrize("by", ["grace", "second signal"])
def test_b12_unfinished_attempts_are_handed_back_when_the_worker_does_not_wait(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
    by: str,
) -> None:
    asynchronous = client.insert_job("async_sleep", {"seconds": 60}).job_id
    thread = client.insert_job("thread_sleep", {"seconds": 60}).job_id
    with process(database, grace=0.5 if by == "grace" else 60) as worker:
        until(lambda: len(marks(conn, "start")) == 2)
        worker.send_signal(signal.SIGTERM)
        start = time.monotonic()
        if by == "second signal":
            time.sleep(0.3)
            worker.send_signal(signal.SIGTERM)
        # The thread does not keep the process alive.
        assert worker.wait(10) == 1
        assert time.monotonic() - start < 5
    info = client.job(asynchronous)
    assert info.state in {"retryable", "scheduled", "available"}
    assert (info.attempt, info.errors[-1]["error"]) == (1, "worker shut down")
    assert client.job(thread).state == "running"
    nothing_is_left(conn)
    with process(database):
        until(lambda: (asynchronous, 2) in marks(conn, "start"))


@contextmanager
def locked(database: Database, table: str) -> Iterator[None]:
    """Nothing is written to a table for as long as this lasts."""
    with database.connect(autocommit=False) as other:
        other.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE".encode())
        yield


def waits_for(conn: psycopg.Connection, role: str) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return bool(value(conn, f"{query} AND application_name = %s", f"awa {role}"))


# Broken by a claim whose rows are dropped when it comes back after the signal.
def test_b12_sigterm_between_claim_and_start(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
) -> None:
    with process(database) as worker:
        client.insert_job("quick")
        until(lambda: has_more(conn, 0))
        with locked(database, "awa.lease_claim_batches"):
            jobs = client.insert_many("quick", [{}] * 5)
            until(lambda: waits_for(conn, "claim"))
            worker.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert worker.poll() is None
        assert worker.wait(20) == 0
    assert {(i.state, i.attempt) for i in map(client.job, jobs)} == {("available", 0)}
    assert len(marks(conn, "end")) == 1
    nothing_is_left(conn)


# Broken by an end that does not wait for the last flush.
def test_b12_sigterm_while_completions_are_not_stored_yet(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
) -> None:
    with process(database, queues={"default": 20}) as worker:
        until(lambda: worker_sessions(conn))
        with locked(database, "awa.lease_claim_closures"):
            jobs = client.insert_many("quick", [{}] * 5)
            until(lambda: waits_for(conn, "finish"))
            until(lambda: len(marks(conn, "end")) == 5)
            worker.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert worker.poll() is None
        assert worker.wait(20) == 0
    assert {(i.state, i.attempt) for i in map(client.job, jobs)} == {("completed", 1)}
    assert marks(conn, "end") == sorted((job_id, 1) for job_id in jobs)
    nothing_is_left(conn)
