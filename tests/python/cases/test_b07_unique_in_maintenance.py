"""Case b07: one job that has lost its unique key does not hold up a round of maintenance.

The transitions one by one (retry, snooze, release, promotion, dead letters) are in
tests/sql/execution/unique_keys.sql, and what happens while the key is busy in test_unique.py
(test_a_retry_does_not_wait_for_a_producer_of_its_key). Callbacks do not exist yet.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import psycopg
import pytest

import awa
from engine import Attempt, claim, counts, finish
from test_unique import NARROW, Answer, make_due, state, unique

OTHERS = 1000  # due jobs that have nothing to do with it
STALE = 50  # attempts of the same dead worker
DEAD = uuid.UUID(int=7, version=4)
ALIVE = uuid.UUID(int=8, version=4)
WAITING = ["scheduled", "available"]  # neither running nor retryable: promotion needs the key
WITH_RETRYABLE = NARROW  # the retry itself needs it
LATER = {"delay_seconds": 3600}


def others(conn: psycopg.Connection) -> None:
    """A thousand jobs of other queues that are to be promoted in the next round."""
    for number in range(10):
        awa.Client(conn).insert_many(
            "other", [{}] * (OTHERS // 10), queue=f"other {number}", opts=LATER
        )


def waiting_others(conn: psycopg.Connection) -> int:
    return sum(counts(conn, f"other {number}").get("scheduled", 0) for number in range(10))


def full_tick(conn: psycopg.Connection) -> None:
    """A round with every step; none may fail."""
    reports = awa.Client(conn).tick(budget={"milliseconds": 60_000, "rows": 5000})
    assert [report for report in reports if report.outcome in ("failed", "skipped_budget")] == []


# Job 1, on its way back to a state that needs its key. Key and queue have the same name.
def failed_once(conn: psycopg.Connection, name: str, states: list[str]) -> Attempt:
    unique(conn, name, name, states=states)
    [attempt] = claim(conn, name, instance=ALIVE)
    assert finish(conn, [attempt.item("retry", delay_seconds=3600)], ALIVE) == ["done"]
    return attempt


def stale(conn: psycopg.Connection, name: str, states: list[str]) -> Attempt:
    unique(conn, name, name, states=states)
    [attempt] = claim(conn, name, instance=DEAD)
    return attempt


def past_its_deadline(conn: psycopg.Connection, name: str, states: list[str]) -> Attempt:
    unique(conn, name, name, states=states)
    [attempt] = claim(conn, name, instance=ALIVE, deadline_seconds=0.001)
    return attempt


Start = Callable[[psycopg.Connection, str, list[str]], Attempt]
STARTS: list[tuple[Start, list[str]]] = [
    (failed_once, WAITING),
    (stale, WAITING),
    (stale, WITH_RETRYABLE),
    (past_its_deadline, WAITING),
    (past_its_deadline, WITH_RETRYABLE),
]


def heartbeats(conn: psycopg.Connection) -> None:
    """One worker lives, the other one has been silent and suspect for long."""
    for instance in (ALIVE, DEAD):
        conn.execute("SELECT awa.heartbeat(%s)", [instance])
    conn.execute(
        "UPDATE awa.runtime_instances SET heartbeat_at = now() - interval '1 hour',"
        " suspect_at = now() - interval '1 hour' WHERE instance_id = %s",
        [DEAD],
    )


# Broken by an error in place of the cancellation (_promote_waiting, _keep_key).
def test_b07_a_job_whose_key_another_one_has_ends_and_the_others_go_on(
    conn: psycopg.Connection,
) -> None:
    client = awa.Client(conn)
    pairs = []
    for number, (start, states) in enumerate(STARTS):
        name = f"{number} {start.__name__}"
        first = start(conn, name, states)
        second = unique(conn, name, name, states=states)
        assert not second.duplicate
        pairs.append((name, first, second.job_id))
    client.insert_many("stale", [{}] * STALE, queue="stale")
    assert len(claim(conn, "stale", limit=STALE, instance=DEAD)) == STALE
    others(conn)
    heartbeats(conn)
    make_due(conn)
    full_tick(conn)
    assert waiting_others(conn) == 0
    assert counts(conn, "stale") == {"retryable": STALE}
    make_due(conn)  # what was rescued waits for its backoff
    full_tick(conn)
    assert counts(conn, "stale") == {"available": STALE}
    full_tick(conn)  # nothing is left to do, or to fail
    for name, first, holder in pairs:
        info = client.job(first.job_id)
        assert (info.state, info.reason) == ("cancelled", f"unique key held by job {holder}")
        # The late worker is told, and changes nothing.
        instance = DEAD if "stale" in name else ALIVE
        assert finish(conn, [first.item("completed")], instance) == ["stale"]
        assert counts(conn, name) == {"available": 1, "cancelled": 1}
        assert state(conn, holder) == "available"


def test_b07_a_job_does_not_conflict_with_itself(conn: psycopg.Connection) -> None:
    alone = []
    for number, (start, states) in enumerate([*STARTS, (failed_once, WITH_RETRYABLE)]):
        name = f"{number} {start.__name__}"
        alone.append((name, states, start(conn, name, states).job_id))
    heartbeats(conn)
    for _ in range(2):
        make_due(conn)
        full_tick(conn)
    for name, states, job_id in alone:
        assert counts(conn, name) == {"available": 1}
        assert unique(conn, name, name, states=states) == Answer(job_id, "available", True)


def test_b07_of_two_retryable_jobs_with_one_key_one_goes_on(conn: psycopg.Connection) -> None:
    twins = [failed_once(conn, "twins", WAITING) for _ in range(2)]
    others(conn)
    make_due(conn)
    full_tick(conn)
    assert waiting_others(conn) == 0
    full_tick(conn)
    assert counts(conn, "twins") == {"available": 1, "cancelled": 1}
    states = {state(conn, twin.job_id): twin.job_id for twin in twins}
    reason = awa.Client(conn).job(states["cancelled"]).reason
    assert reason == f"unique key held by job {states['available']}"


def test_b07_a_dead_letter_whose_key_another_job_has_stays_or_ends(
    conn: psycopg.Connection,
) -> None:
    client = awa.Client(conn)
    client.declare_queue("K", opts={"dlq": True})
    letters = []
    for _ in range(2):
        attempt = stale(conn, "K", ["available"])
        assert finish(conn, [attempt.item("fail")], DEAD) == ["done"]
        letters.append(attempt.job_id)
    holder = unique(conn, "K", "K", states=["available"])
    assert not holder.duplicate
    with pytest.raises(awa.UniqueConflict, match=f"job {holder.job_id} holds the unique key"):
        client.retry_dlq(letters[0])
    # With a delay it needs the key later, in the middle of a round.
    assert client.retry_dlq(letters[1], opts=LATER).state == "scheduled"
    others(conn)
    make_due(conn)
    full_tick(conn)
    assert waiting_others(conn) == 0
    full_tick(conn)
    assert counts(conn, "K") == {"available": 1, "cancelled": 1, "dead_lettered": 1}
    assert client.job(letters[1]).reason == f"unique key held by job {holder.job_id}"
    client.cancel_job(holder.job_id)
    assert client.retry_dlq(letters[0]).state == "available"
