"""Retry, update and drain among concurrent sessions: each job is in one place, and counted once."""

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg.types.json import Jsonb

from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    claim,
    claim_all,
    complete,
    counts,
    finish,
    insert,
    insert_many,
    open_transaction,
    prune_all,
    rotate,
    set_settings,
    tick,
    value,
    wait_until_blocked,
)
from test_guarantees import paused


def retry(conn: psycopg.Connection, job_id: int, **opts: object) -> str:
    return str(value(conn, "SELECT state FROM awa.retry_job(%s, %s)", job_id, Jsonb(opts)))


def update(conn: psycopg.Connection, job_id: int, **changes: object) -> str:
    return str(value(conn, "SELECT awa.update_job(%s, %s)", job_id, Jsonb(changes)))


def state(conn: psycopg.Connection, job_id: int) -> str:
    return str(value(conn, "SELECT state FROM awa.job(%s)", job_id))


def fail_one(conn: psycopg.Connection) -> int:
    job_id = insert(conn)
    [attempt] = claim(conn)
    assert finish(conn, [attempt.item("fail", error="e")]) == ["done"]
    return job_id


def in_thread(answers: list[str], conn: psycopg.Connection, job_id: int) -> threading.Thread:
    """Start a retry that may have to wait; its answer, or its SQLSTATE, is appended."""

    def body() -> None:
        try:
            answers.append(retry(conn, job_id))
        except psycopg.Error as error:
            answers.append(str(error.sqlstate))

    thread = threading.Thread(target=body)
    thread.start()
    return thread


# Broken by not taking the position lock (_take_ended), and by an undo that does not look again.
@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("commits", [False, True])
def test_of_two_retries_one_wins(
    database: Database, conn: psycopg.Connection, is_pruned: bool, commits: bool
) -> None:
    job_id = fail_one(conn)
    if is_pruned:
        rotate(conn)
        assert prune_all(conn) == 1
    with open_transaction(database) as first, database.connect() as second:
        assert retry(first, job_id) == "available"
        answers: list[str] = []
        thread = in_thread(answers, second, job_id)
        assert wait_until_blocked(conn, second) == [first.info.backend_pid]
        if commits:
            first.commit()
        else:
            first.rollback()
        thread.join()
    assert answers == ["55000" if commits else "available"]
    assert counts(conn) == {"available": 1}
    assert [a.job_id for a in claim_all(conn)] == [job_id]


# Broken by _undo_done looking in a block whose locks vanish: prune would empty the slot meanwhile.
def test_a_prune_meets_a_retry(database: Database, conn: psycopg.Connection) -> None:
    job_id = fail_one(conn)
    rotate(conn)
    set_settings(conn, **PRUNE_AT_ONCE)
    answers: list[str] = []
    with database.connect() as retrier:
        with paused(conn, "_undo_done", "undo_seen") as retry_waits:
            thread = in_thread(answers, retrier, job_id)
            retry_waits()
            assert tick(conn, "prune_queue") == {"prune_queue": "locked"}
            assert state(conn, job_id) == "failed"
        thread.join()
    assert answers == ["available"]
    assert prune_all(conn) == 1
    assert counts(conn) == {"available": 1}
    [attempt] = claim(conn)
    assert (attempt.job_id, attempt.run_lease, attempt.attempt) == (job_id, 2, 1)
    assert complete(conn, [attempt]) == ["done"]
    assert counts(conn) == {"completed": 1}


# Broken by an undo that trusts the look before the lock: the job would be listed as failed besides.
@pytest.mark.parametrize(("function", "point"), [("_retry_job", "retry"), ("_undo_done", "undo")])
def test_a_retry_meets_a_prune_that_has_copied_the_job(
    database: Database, conn: psycopg.Connection, function: str, point: str
) -> None:
    job_id = fail_one(conn)
    rotate(conn)
    set_settings(conn, **PRUNE_AT_ONCE)
    answers: list[str] = []
    with database.connect() as retrier:
        with paused(conn, function, point) as retry_waits:
            thread = in_thread(answers, retrier, job_id)
            retry_waits()  # it has seen the job in its slot
            assert tick(conn, "prune_queue") == {"prune_queue": "pruned"}
        thread.join()
    assert answers == ["available"]
    assert counts(conn) == {"available": 1}
    assert value(conn, "SELECT count(*) FROM awa.jobs") == 1
    assert [a.job_id for a in claim_all(conn)] == [job_id]


# Broken by _take_available without the position lock.
def test_an_open_update_holds_its_job_and_no_other(
    database: Database, conn: psycopg.Connection
) -> None:
    first, second, third = insert(conn), insert(conn), insert(conn)
    with open_transaction(database) as other:
        assert update(other, second, args={"new": True}) == "available"
        assert {a.job_id for a in claim_all(conn)} == {first, third}
        other.rollback()
    assert [a.job_id for a in claim_all(conn)] == [second]
    with open_transaction(database) as other:
        fourth = insert(conn)
        assert update(other, fourth, args={"new": True}) == "available"
        assert claim_all(conn) == []
        other.commit()
    [attempt] = claim_all(conn)
    assert attempt.job_id == fourth
    assert value(conn, "SELECT args FROM awa.job(%s)", fourth) == {"new": True}


# Broken by an update that does not look again under the lock.
def test_a_claim_overtakes_an_update(database: Database, conn: psycopg.Connection) -> None:
    job_id = insert(conn)
    errors: list[str | None] = []

    def body() -> None:
        with database.connect() as updater, pytest.raises(psycopg.Error) as error:
            update(updater, job_id, priority=1)
        errors.append(error.value.sqlstate)

    thread = threading.Thread(target=body)
    with paused(conn, "_update_job", "update") as update_waits:
        thread.start()
        update_waits()  # it has seen the job waiting
        [attempt] = claim(conn)
    thread.join()
    assert errors == ["55000"]
    assert complete(conn, [attempt]) == ["done"]
    assert counts(conn) == {"completed": 1}


def test_drain_leaves_what_others_hold_and_what_is_not_committed(
    database: Database, conn: psycopg.Connection
) -> None:
    ids = insert_many(conn, 10)
    with open_transaction(database) as producer, open_transaction(database) as claimer:
        late = insert(producer)
        assert len(claim(claimer, limit=4)) == 4
        with pytest.raises(psycopg.errors.SerializationFailure):
            conn.execute("SELECT awa.drain_queue('default')")
        claimer.commit()
        assert value(conn, "SELECT awa.drain_queue('default')") == 6
        producer.commit()
    assert counts(conn) == {"available": 1, "running": 4, "cancelled": 6}
    assert [a.job_id for a in claim_all(conn)] == [late]
    assert late not in ids


# Broken by drain without the mutation lock.
def test_drain_keeps_out_of_the_way_of_an_open_cancel(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = insert(conn)
    insert(conn)
    with open_transaction(database) as other:
        assert value(other, "SELECT awa.cancel_job(%s)", job_id) == "cancelled"
        with pytest.raises(psycopg.errors.SerializationFailure):
            conn.execute("SELECT awa.drain_queue('default')")
        other.commit()
    assert value(conn, "SELECT awa.drain_queue('default')") == 1
    assert counts(conn) == {"cancelled": 2}
