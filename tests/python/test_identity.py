"""Rows that were moved to another database are verified by maintenance, without anybody's call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg

import awa
from conftest import Database, DatabaseServer
from engine import claim_all, complete, counts, insert, insert_many, open_transaction, tick, value
from test_dump_restore import copy


def leave_a_horizon(conn: psycopg.Connection) -> None:
    """Bring a lane's emission row to hold a transaction id."""
    insert(conn)
    with conn.transaction(force_rollback=True):
        insert_many(conn, 3)
    insert(conn)
    assert set(complete(conn, claim_all(conn))) == {"done"}
    with conn.transaction(force_rollback=True):
        insert_many(conn, 3)
    insert(conn)
    conn.execute("SELECT FROM awa.claim_ready_runtime('default', 1, gen_random_uuid())")
    assert horizons(conn) == 1


def horizons(conn: psycopg.Connection) -> int:
    return int(
        value(
            conn,
            "SELECT count(*) FROM awa.queue_lanes l, LATERAL awa._newest_emission(l.lane_id) e"
            " WHERE e.horizon IS NOT NULL",
        )
    )


def verified(conn: psycopg.Connection) -> tuple[str, int]:
    """What the step of tick says: its outcome, and how much it changed."""
    row = conn.execute("""SELECT outcome, rows FROM awa.tick('{"steps": ["verify"]}')""").fetchone()
    assert row
    return row[0], row[1]


def test_a_restored_database_verifies_itself(
    database: Database, empty_database: Database, tmp_path: Path
) -> None:
    with database.connect() as conn:
        tick(conn)
        leave_a_horizon(conn)
        assert verified(conn) == ("done", 0)
    copy(database, empty_database, tmp_path)
    with empty_database.connect() as conn:
        conn.execute("SELECT setval('awa.job_ids', 1, false), setval('awa.queue_ring', 64)")
        assert horizons(conn) == 1
        outcome, changed = verified(conn)
        assert outcome == "done"
        assert changed >= 3  # the ring's cursor, the horizon, the identity
        assert horizons(conn) == 0
        assert verified(conn) == ("done", 0)
        insert(conn)
        claimed = claim_all(conn)
        assert set(complete(conn, claimed)) == {"done"}
        assert counts(conn)["completed"] >= 2 + len(claimed)


def test_a_copy_of_the_files_verifies_itself(server: DatabaseServer, database: Database) -> None:
    """CREATE DATABASE ... TEMPLATE: another database of the same cluster."""
    with database.connect() as conn:
        tick(conn)
        leave_a_horizon(conn)
    with server.fresh(database.name) as copied, copied.connect() as conn:
        assert horizons(conn) == 1
        outcome, changed = verified(conn)
        assert (outcome, changed >= 2, horizons(conn)) == ("done", True, 0)
        assert verified(conn) == ("done", 0)


def test_maintenance_does_not_wait_for_a_lane_to_verify(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    # Only a lane that must be repaired is waited for.
    conn.execute("SELECT setval('awa.lane_1_hint', (awa.insert_job('k')).job_id + 9)")
    with open_transaction(database) as claimer:
        claimer.execute("SELECT awa._wait_for_lane(1)")
        assert tick(conn)["verify"] == "locked"
    assert tick(conn)["verify"] == "done"
    assert verified(conn) == ("done", 0)


def test_a_worker_verifies_before_it_claims(server: DatabaseServer, database: Database) -> None:
    with database.connect() as conn:
        tick(conn)
        leave_a_horizon(conn)

    async def start_and_stop(dsn: str) -> None:
        async with awa.Worker(dsn, {"none": print_nothing}, queues=["none"], maintenance=False):
            pass

    with server.fresh(database.name) as copied, copied.connect() as conn:
        asyncio.run(start_and_stop(copied.dsn))
        assert horizons(conn) == 0
        assert verified(conn) == ("done", 0)


def print_nothing() -> None:
    """Do nothing."""
