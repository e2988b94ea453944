"""Case b09: a rescue that chose an attempt which ended, or whose worker came back, before it wrote.

What a stale token may do is shown for every way of ending in test_guarantees.py
(test_g2_a_stale_token_changes_nothing_and_is_told), races of completion and rescue with real
workers in test_completion.py, races of everything in test_race.py. Callbacks do not exist yet.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import psycopg
import pytest

import awa
from conftest import Database
from engine import (
    Attempt,
    claim,
    complete,
    counts,
    finish,
    insert_many,
    set_settings,
    tick,
    value,
)
from test_guarantees import paused

OLD = uuid.UUID(int=11, version=4)
NEW = uuid.UUID(int=12, version=4)
Chosen = Callable[[psycopg.Connection, str], list[Attempt]]


def overdue(conn: psycopg.Connection, queue: str) -> list[Attempt]:
    """Attempts past their deadline, in a batch each."""
    return [claim(conn, queue, 1, OLD, deadline_seconds=0.001)[0] for _ in range(3)]


def silent(conn: psycopg.Connection, queue: str) -> list[Attempt]:
    """Attempts of a worker that is dead by its heartbeats."""
    attempts = [claim(conn, queue, 1, OLD)[0] for _ in range(3)]
    conn.execute("SELECT awa.heartbeat(%s)", [OLD])
    conn.execute(
        "UPDATE awa.runtime_instances SET heartbeat_at = now() - interval '1 hour',"
        " suspect_at = now() - interval '1 hour' WHERE instance_id = %s",
        [OLD],
    )
    return attempts


def evacuated(conn: psycopg.Connection, queue: str) -> list[Attempt]:
    """The same, moved out of their slot."""
    attempts = silent(conn, queue)
    for attempt in attempts:
        lease = "SELECT awa._lease_receipts(%s, %s, 10, clock_timestamp())"
        assert value(conn, lease, attempt.claim_slot, attempt.batch_id) == 1
    return attempts


def run_again(conn: psycopg.Connection, attempt: Attempt, outcome: str) -> Attempt:
    """End an attempt in a way after which its job is claimed again, by another worker."""
    fields = {} if outcome == "released" else {"delay_seconds": 0}
    queue = value(conn, "SELECT (awa.job(%s)).queue", attempt.job_id)
    assert finish(conn, [attempt.item(outcome, **fields)], OLD) == ["done"]
    tick(conn, "promote")
    conn.execute("SELECT awa.heartbeat(%s)", [NEW])
    [again] = claim(conn, queue, instance=NEW)
    assert again.job_id == attempt.job_id
    assert again.run_lease == attempt.run_lease + 1
    return again


# What happens between the choice and the write; the attempt that is running afterwards.
def completes(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    assert complete(conn, [attempt], OLD) == ["done"]
    return None


def fails_and_runs_again(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    return run_again(conn, attempt, "retry")


def is_released_and_runs_again(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    return run_again(conn, attempt, "released")


def fails_for_good(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    assert finish(conn, [attempt.item("fail")], OLD) == ["done"]
    return None


def is_snoozed(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    assert finish(conn, [attempt.item("snooze", delay_seconds=3600)], OLD) == ["done"]
    return None


def is_cancelled(conn: psycopg.Connection, attempt: Attempt) -> Attempt | None:
    assert awa.Client(conn).cancel_job(attempt.job_id) == "cancelled_running"
    return None


MEANWHILE = [
    completes,
    fails_and_runs_again,
    is_released_and_runs_again,
    fails_for_good,
    is_snoozed,
    is_cancelled,
]


def check_ledger(conn: psycopg.Connection, queue: str) -> None:
    """Each job is in one place, and each attempt was closed once at most."""
    assert sum(counts(conn, queue).values()) == 3
    listed = "SELECT count(*), count(DISTINCT job_id) FROM awa.jobs WHERE queue = %s"
    assert conn.execute(listed, [queue]).fetchall() == [(3, 3)]
    [(every, different)] = conn.execute(
        "SELECT count(*), count(DISTINCT (c.batch_id, p)) FROM awa.lease_claim_closures c,"
        " unnest(awa._to_list(c.closed)) p"
    ).fetchall()
    assert every == different


def race(
    database: Database,
    conn: psycopg.Connection,
    chosen: Chosen,
    meanwhile: Callable[[psycopg.Connection, Attempt], Attempt | None],
) -> None:
    """Hold a rescue between its choice of three attempts and its write, and end one of them."""
    queue = meanwhile.__name__
    insert_many(conn, 3, queue)
    first, ended, last = chosen(conn, queue)
    with database.connect() as rescuer:
        rescue = threading.Thread(target=lambda: tick(rescuer, "rescue"))
        # Else a rescue that has just looked at all attempts looks at these a moment later.
        conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
        with paused(conn, *PLACES[chosen]) as rescue_waits:
            rescue.start()
            rescue_waits()
            again = meanwhile(conn, ended)
            before = value(conn, "SELECT awa.job(%s)::text", ended.job_id)
        rescue.join()
    client = awa.Client(conn)
    assert [client.attempt_status(*a.token) for a in (first, last)] == ["rescued", "rescued"]
    assert client.attempt_status(*ended.token) != "rescued"
    assert value(conn, "SELECT awa.job(%s)::text", ended.job_id) == before
    check_ledger(conn, queue)
    # The worker comes back with what it held.
    states = counts(conn, queue)
    for attempt in (first, ended, last):
        [answer] = complete(conn, [attempt], OLD)
        is_repeated = attempt == ended and meanwhile is completes
        assert answer == ("already_done" if is_repeated else "stale")
    assert counts(conn, queue) == states
    if again is not None:
        assert client.attempt_status(*again.token) == "open"
        assert complete(conn, [again], NEW) == ["done"]
    check_ledger(conn, queue)


PLACES: dict[Chosen, tuple[str, str]] = {
    overdue: ("_rescue_attempts", "rescue"),
    silent: ("_rescue_attempts", "rescue"),
    evacuated: ("_rescue_leases", "rescue_lease"),
}


# Broken by a rescue that closes what it chose instead of what is open now (_rescue_positions, and
# _rescue_lease without a look at the outcome).
@pytest.mark.parametrize("chosen", PLACES)
def test_b09_rescue_leaves_alone_what_ended_between_its_choice_and_its_write(
    database: Database, conn: psycopg.Connection, chosen: Chosen
) -> None:
    set_settings(conn, heartbeat_seconds=0.05)
    for meanwhile in MEANWHILE:
        race(database, conn, chosen, meanwhile)


# Broken by a rescue that takes a worker for dead which was so when the step began.
@pytest.mark.parametrize("chosen", [silent, evacuated])
def test_b09_rescue_leaves_alone_a_worker_that_beats_before_its_write(
    database: Database, conn: psycopg.Connection, chosen: Chosen
) -> None:
    insert_many(conn, 3, "beats")
    attempts = chosen(conn, "beats")
    with database.connect() as rescuer:
        rescue = threading.Thread(target=lambda: tick(rescuer, "rescue"))
        # Else a rescue that has just looked at all attempts looks at these a moment later.
        conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
        with paused(conn, *PLACES[chosen]) as rescue_waits:
            rescue.start()
            rescue_waits()
            conn.execute("SELECT awa.heartbeat(%s)", [OLD])
        rescue.join()
    assert counts(conn, "beats") == {"running": 3}
    assert complete(conn, attempts, OLD) == ["done"] * 3
    check_ledger(conn, "beats")
