"""Deferred jobs: what promotion costs under a pinned snapshot, and when buckets are emptied.

Above each test stands how it was broken once. Time passes by the p_now of the engine's functions.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import IsolationLevel

from conftest import Database
from engine import WAIT_SECONDS, counts, insert, open_transaction, read_buffers, value

PROMOTE = "SELECT awa._promote_due(4096, %s)"
REFILL = "SELECT awa._refill_buckets(4096, %s)"
PRUNE = "SELECT outcome || coalesce(' ' || (detail ->> 'slot'), '') FROM awa._prune_deferred(%s)"
MINUTE = timedelta(minutes=1)
MANY = 2000  # more than 256 kB


@pytest.fixture(autouse=True)
def lanes(conn: psycopg.Connection) -> None:
    """The functions called here would make lanes that belong to the caller. Nothing may wait."""
    conn.execute("SELECT awa.declare_queue('default')")
    conn.execute("SET lock_timeout = '3s'")


def fill(conn: psycopg.Connection, run_at: datetime, count: int = MANY) -> None:
    """Defer jobs to one time."""
    conn.execute(
        "SELECT count(*) FROM awa.insert_many('k',"
        ' array_fill(\'{"text": "some text, so that fewer jobs are enough"}\'::jsonb, ARRAY[%s]),'
        " run_at => %s)",
        [count, run_at],
    )


def next_minute(ahead: int = 1) -> datetime:
    """A time in the middle of a coming minute."""
    now = datetime.now(UTC).replace(second=30, microsecond=0)
    return now + ahead * MINUTE


def slot_at(conn: psycopg.Connection, moment: datetime) -> int:
    return int(value(conn, "SELECT awa._deferred_slot(%s, %s)", moment, moment))


def a_used_bucket(conn: psycopg.Connection) -> tuple[datetime, int]:
    """A bucket whose jobs were all promoted; its time, and its slot."""
    due = next_minute(2)
    fill(conn, due)
    assert value(conn, PROMOTE, due) == MANY
    return due, slot_at(conn, due)


# Broken by a prune that does nothing (_prune_deferred), for cost and room of the buckets; by a
# refill that always looks from the start, for its cost.
def test_g8_promotion_costs_the_same_however_long_a_snapshot_is_pinned(
    database: Database, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    costs: list[int] = []
    refills: list[int] = []
    sizes: list[int] = []
    now = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(hours=1)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as reader:
        value(reader, "SELECT txid_current_snapshot()::text")
        for _ in range(45):
            now += MINUTE
            fill(conn, now + timedelta(minutes=10), 750)
            fill(conn, now + timedelta(minutes=10, seconds=30), 750)
            # A look from the start is allowed by what it costs; here it never is.
            conn.execute(
                "SELECT setval('awa.deferred_full_look', %s)", [int(now.timestamp()) + 900]
            )
            value(conn, REFILL, now + timedelta(seconds=1))
            value(conn, REFILL, now + timedelta(seconds=31))
            value(conn, PROMOTE, now + timedelta(seconds=45))
            # Autovacuum may come at any moment; it changes no plan.
            conn.execute("VACUUM ANALYZE awa.deferred_jobs_16")
            refills.append(read_buffers(conn, REFILL, now + timedelta(seconds=46)))
            costs.append(read_buffers(conn, PROMOTE, now + timedelta(seconds=46)))
            value(conn, PRUNE, now + timedelta(seconds=50))
            sizes.append(
                value(
                    conn,
                    "SELECT sum(bytes)::bigint FROM awa._ring_status(%s)"
                    " WHERE ring = 'deferred' AND slot < 16",
                    now,
                )
            )
    with capsys.disabled():
        print(f"\nwith nothing due: promotion {costs[14:18]} .. {costs[-4:]} buffers")
        print(f"refill {refills[14:18]} .. {refills[-4:]} buffers")
        print(f"buckets {sizes[20] >> 10} .. {sizes[-1] >> 10} kB")
    assert max(costs[-16:]) <= 1.1 * max(costs[14:30])
    assert max(refills[-16:]) <= 1.1 * max(refills[14:30])
    assert max(sizes[-16:]) <= 1.1 * max(sizes[14:30])
    assert counts(conn)["scheduled"] < 11 * 1500


# Broken by TRUNCATE without the NOWAIT lock before it (_prune_bucket): it waits for the reader.
def test_g6_a_reader_keeps_its_bucket_and_stops_nobody(
    database: Database, conn: psycopg.Connection
) -> None:
    due, slot = a_used_bucket(conn)
    with open_transaction(database) as reader:
        reader.execute(f"SELECT count(*) FROM awa.deferred_jobs_{slot}")
        assert value(conn, PRUNE, due + 2 * MINUTE) == f"locked {slot}"
        fill(conn, due + 10 * MINUTE)
        other = due + 12 * MINUTE
        value(conn, REFILL, other)
        assert value(conn, PROMOTE, other) == MANY
        assert value(conn, PRUNE, other + 2 * MINUTE) == f"pruned {slot_at(conn, other)}"
    assert value(conn, PRUNE, other + 2 * MINUTE).startswith("pruned")


# Broken by looking up a job without giving the locks of the other leaves back (_find_deferred).
def test_g6_an_application_that_cancelled_a_job_and_idles_keeps_one_bucket(
    database: Database, conn: psycopg.Connection
) -> None:
    due, slot = a_used_bucket(conn)
    job_id = insert(conn, run_at=due + 3 * MINUTE)
    with open_transaction(database) as idle:
        assert value(idle, "SELECT awa.cancel_job(%s)", job_id) == "cancelled"
        value(idle, "SELECT (awa.job(%s)).state", insert(conn, run_at=due + 4 * MINUTE))
        assert value(conn, PRUNE, due + 2 * MINUTE) == f"pruned {slot}"


# Broken by TRUNCATE without any lock before it (_prune_bucket): it waits for the inserter and
# would take away the row that was committed meanwhile.
def test_g1_a_job_that_commits_after_its_bucket_was_to_be_emptied_is_not_lost(
    database: Database, conn: psycopg.Connection
) -> None:
    due, slot = a_used_bucket(conn)
    with open_transaction(database) as late:
        job_id = insert(late, run_at=due)
        assert value(conn, PRUNE, due + 2 * MINUTE) == f"locked {slot}"
        late.commit()
    assert value(conn, PRUNE, due + 3 * MINUTE) == f"moved {slot}"
    assert value(conn, PRUNE, due + 5 * MINUTE) == f"pruned {slot}"
    assert value(conn, PROMOTE, due + 5 * MINUTE) == 1
    assert value(conn, "SELECT (awa.job(%s)).state", job_id) == "available"


# Broken by a prune that looks only before it has the lock (_prune_bucket).
def test_g1_a_job_that_commits_while_prune_looks_is_not_lost(
    database: Database, conn: psycopg.Connection
) -> None:
    due, slot = a_used_bucket(conn)
    source = value(conn, "SELECT pg_get_functiondef('awa._prune_bucket'::regproc)")
    assert "-- pause point: prune" in source
    halt = "PERFORM pg_advisory_lock(77); PERFORM pg_advisory_unlock(77);"
    conn.execute(source.replace("-- pause point: prune", halt).encode())
    outcomes: list[str] = []
    with database.connect() as gate, database.connect() as pruner:
        gate.execute("SELECT pg_advisory_lock(77)")
        prune = threading.Thread(
            target=lambda: outcomes.append(value(pruner, PRUNE, due + 3 * MINUTE))
        )
        prune.start()
        end = time.monotonic() + WAIT_SECONDS
        while not value(conn, "SELECT pg_blocking_pids(%s)", pruner.info.backend_pid):
            assert time.monotonic() < end
        job_id = insert(conn, run_at=due)
        gate.execute("SELECT pg_advisory_unlock(77)")
        prune.join()
    assert outcomes == [f"moved {slot}"]  # in_use, and so few that they make room
    assert value(conn, PROMOTE, due + 3 * MINUTE) == 1
    assert value(conn, "SELECT (awa.job(%s)).state", job_id) == "available"


# Broken by a prune that does not wait a minute (_slot_is_calm): the job is in neither place.
def test_g1_a_dump_finds_a_job_that_was_promoted_before_it_had_its_locks(
    database: Database, conn: psycopg.Connection
) -> None:
    due = next_minute(2)
    fill(conn, due)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as dump:
        dump.execute("SELECT 1")  # its snapshot
        assert value(conn, PROMOTE, due) == MANY
        assert value(conn, PRUNE, due + timedelta(seconds=59)) == "nothing"
        assert value(dump, "SELECT count(*) FROM awa.ready_entries") == 0
        assert value(dump, "SELECT count(*) FROM awa.deferred_jobs") == MANY
