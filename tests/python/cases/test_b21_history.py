"""Case b21: failed jobs can be retried for as long as is written, however often the ring turns.

Shown elsewhere: a failed job is copied when its slot goes, listed once and counted once, and
forgotten after three days (retention.sql); dead letters after thirty (dead_letters.sql); history
yields when room is short (prune_ring.sql). The ring has 16 slots, whatever the case has.
"""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest

from engine import (
    claim,
    claim_all,
    complete,
    counts,
    finish,
    insert,
    insert_many,
    prune_all,
    rotate,
    set_settings,
    tick,
    value,
)

SLOTS = 16
ENDED = {"completed": 5, "failed": 5, "cancelled": 5}


def wrap(conn: psycopg.Connection, times: int) -> int:
    """Turn the ring so often all around, by other jobs; how many slots were emptied."""
    pruned = 0
    for _ in range(times * SLOTS):
        insert_many(conn, 10)
        complete(conn, claim_all(conn))
        rotate(conn)
        pruned += prune_all(conn)
    return pruned


def listed(conn: psycopg.Connection) -> Counter[str]:
    rows = conn.execute("SELECT state FROM awa.terminal_jobs WHERE queue = 'kept'")
    return Counter(state for (state,) in rows)


def retry(conn: psycopg.Connection, job_id: int) -> str:
    """The state after a retry, or the message of the refusal."""
    try:
        return str(value(conn, "SELECT (awa.retry_job(%s)).state::text", job_id))
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        return error.diag.message_primary or ""


# Broken by a prune that copies nothing (_keep_failed), and by one that folds what it has copied.
@pytest.mark.parametrize("wraps", [1, pytest.param(3, marks=pytest.mark.long)])
def test_b21_failed_jobs_outlive_the_ring_and_can_be_retried(
    conn: psycopg.Connection, wraps: int
) -> None:
    for _ in range(15):
        insert(conn, "kept", kind="mail", max_attempts=1, args='{"to": "x"}')
    attempts = claim(conn, "kept")
    finish(conn, [a.item("completed") for a in attempts[:5]])
    # Given up by the handler, or out of attempts.
    finish(conn, [a.item("fail", error="no") for a in attempts[5:8]])
    finish(conn, [a.item("retry", error="no") for a in attempts[8:10]])
    finish(conn, [a.item("cancel") for a in attempts[10:14]])
    assert value(conn, "SELECT awa.cancel_job(%s)", attempts[14].job_id) == "cancelled_running"
    assert counts(conn, "kept") == ENDED
    assert wrap(conn, wraps) >= wraps * SLOTS - 1
    # Counted apart from each other for ever, listed as long as they are kept.
    assert counts(conn, "kept") == ENDED
    assert listed(conn) == {"failed": 5}
    failed = "SELECT job_id FROM awa.terminal_jobs WHERE state = 'failed' AND kind = 'mail'"
    ids = [job_id for (job_id,) in conn.execute(failed)]
    assert sorted(ids) == sorted(a.job_id for a in attempts[5:10])
    assert [retry(conn, job_id) for job_id in ids] == ["available"] * 5
    # What is gone is no silent success.
    for attempt in (attempts[0], attempts[10]):
        assert retry(conn, attempt.job_id) == (f'field "job_id": job {attempt.job_id} is pruned')
        assert value(conn, "SELECT awa.cancel_job(%s)", attempt.job_id) == "pruned"
    again = claim_all(conn, "kept")
    assert {(a.attempt, a.run_lease) for a in again} == {(1, 2)}
    assert counts(conn, "kept") == {"completed": 5, "cancelled": 5, "running": 5}
    finish(conn, [a.item("completed") for a in again[:2]])
    finish(conn, [a.item("fail") for a in again[2:]])
    wrap(conn, 1)
    assert counts(conn, "kept") == {"completed": 7, "failed": 3, "cancelled": 5}
    assert listed(conn) == {"failed": 3}


# Broken by an expiry that forgets one of them (_expire_failed, _expire_dead_letters, prune).
def test_b21_every_ended_state_has_its_end(conn: psycopg.Connection) -> None:
    conn.execute("SELECT awa.declare_queue('letters', '{\"dlq\": true}')")
    for queue in ("kept", "letters"):
        insert_many(conn, 15, queue)
        attempts = claim(conn, queue)
        for start, outcome in ((0, "completed"), (5, "fail"), (10, "cancel")):
            finish(conn, [a.item(outcome) for a in attempts[start : start + 5]])
    wrap(conn, 1)
    assert counts(conn, "kept") == ENDED
    assert counts(conn, "letters") == {"completed": 5, "dead_lettered": 5, "cancelled": 5}
    assert listed(conn) == {"failed": 5}
    [(job_id,)] = conn.execute(
        "SELECT job_id FROM awa.terminal_jobs WHERE state = 'failed' LIMIT 1"
    )
    set_settings(conn, failed_retention_seconds=0, dlq_retention_seconds=1)
    conn.execute("UPDATE awa.dlq_entries SET dlq_at = dlq_at - interval '2 seconds'")
    assert tick(conn, "expire") == {"expire": "done"}
    assert retry(conn, job_id) == f'field "job_id": job {job_id} is pruned'
    # No row of any of them is left, in whichever table; the counts are.
    for view in ("jobs", "terminal_jobs", "dlq"):
        query = f"SELECT count(*) FROM awa.{view} WHERE queue IN ('kept', 'letters')"
        assert value(conn, query) == 0
    for table in ("failed_entries", "dlq_entries", "leases", "attempt_state", "deferred_jobs"):
        assert value(conn, f"SELECT count(*) FROM awa.{table}") == 0
    assert counts(conn, "kept") == ENDED
    assert counts(conn, "letters") == {"completed": 5, "cancelled": 5}
