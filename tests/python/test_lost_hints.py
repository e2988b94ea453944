"""Hints are UNLOGGED: a recovery can leave them without a page, and nothing waits for them.

PostgreSQL before 15.19, 16.15, 17.11 and 18.6 does that by itself where a standby is promoted (see
test_failover.py). Here the init forks are damaged, and a crash copies them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import TEMPLATE_SCRIPT
from engine import claim, claim_all, complete, counts, insert_many, tick, value
from tools.servers import Cluster, ensure_tree

PAGE = 8192
# One lane, several lanes, and one that was idle, so that its hint said so.
QUEUES = ("default", "sharded", "idle")
JOBS = 20
UNLOGGED = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relpersistence = 'u' ORDER BY 1"


@pytest.fixture
def server() -> Iterator[Cluster]:
    with Cluster(ensure_tree(int(os.environ["AWA_PG_VERSION"]))) as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(TEMPLATE_SCRIPT.read_bytes())
            conn.execute("SELECT awa.declare_queue('sharded', '{\"enqueue_shards\": 4}')")
        yield server


def names(conn: psycopg.Connection) -> list[str]:
    """Names of all UNLOGGED relations."""
    return [name for (name,) in conn.execute(UNLOGGED)]


def readable(conn: psycopg.Connection) -> list[str]:
    """Names of those that can be read."""
    good = []
    for name in names(conn):
        try:
            conn.execute("SELECT pg_sequence_last_value(%s::regclass)", [name])
            good.append(name)
        except (psycopg.errors.InternalError_, psycopg.errors.DataCorrupted):
            pass
    return good


def crash_and_lose_hints(server: Cluster) -> None:
    """Lose the server, and the only page of each hint: zeros in its place, or an empty file."""
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        hints = names(conn)
        files = [value(conn, "SELECT pg_relation_filepath(%s::regclass)", name) for name in hints]
        # What is not replayed after the crash stays as we leave it.
        conn.execute("CHECKPOINT")
    server.kill()
    for number, file in enumerate(files):
        fork = Path(server.directory, "data", f"{file}_init")
        assert fork.stat().st_size == PAGE
        with fork.open("r+b") as page:
            page.truncate(0)
            page.truncate(PAGE * (number % 2))
    server.restart()


def work_off(conn: psycopg.Connection) -> None:
    """Run every job."""
    for queue in QUEUES:
        attempts = claim_all(conn, queue)
        assert set(complete(conn, attempts)) == {"done"}
        assert counts(conn, queue).keys() == {"completed"}
        assert claim(conn, queue) == []


def mend_by_tick(conn: psycopg.Connection) -> None:
    assert "failed" not in tick(conn).values()


def mend_by_verify(conn: psycopg.Connection) -> None:
    conn.execute("SELECT awa.verify()")


def test_claims_do_without_hints_until_they_are_made_anew(server: Cluster) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        for queue in QUEUES:
            insert_many(conn, JOBS, queue)
        work_off(conn)
    done = JOBS
    mends: list[Callable[[psycopg.Connection], None]] = [mend_by_tick, mend_by_verify]
    for mend in mends:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            for queue in ("default", "sharded"):
                insert_many(conn, JOBS, queue)
            assert readable(conn) == names(conn) != []
        crash_and_lose_hints(server)
        with (
            psycopg.connect(server.dsn, autocommit=True) as conn,
            psycopg.connect(server.dsn, autocommit=True) as other,
        ):
            assert readable(conn) == []
            insert_many(conn, JOBS, "idle")
            statuses = [
                value(conn, "SELECT reason FROM awa.claim_status(%s, true)", q) for q in QUEUES
            ]
            assert statuses == ["ready"] * len(QUEUES)
            work_off(conn)
            done += JOBS
            assert readable(conn) == []

            mend(other)
            assert readable(conn) == names(conn)
            assert value(conn, "SELECT count(*) FROM awa.queue_lanes") == len(names(conn))
            # Sessions that had to do without go by the hints again.
            for session in (conn, other):
                for queue in QUEUES:
                    insert_many(session, JOBS, queue)
                work_off(session)
                done += JOBS
                hints = "SELECT pg_sequence_last_value(hint_seq) FROM awa.queue_lanes"
                assert 0 not in [hint or 0 for (hint,) in session.execute(hints)]
            assert [counts(conn, queue) for queue in QUEUES] == [{"completed": done}] * len(QUEUES)
