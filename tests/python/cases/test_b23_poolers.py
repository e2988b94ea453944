"""Case b23: poolers that give each transaction any server connection.

Shown elsewhere, in test_poolers.py: the client's own tests in both modes, 20 clients over 2 server
connections (test_many_clients_share_few_connections), workers with heartbeats, cancellation and
completion (test_workers_do_everything_through_a_pooler), statements prepared and lost
(test_lost_prepared_statements_are_met_once), the self-test of LISTEN
(test_notifications_are_tested_before_they_are_relied_upon). There is no leader, and a worker has
one DSN: pickup within milliseconds takes a direct one (poolers.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

import awa
from awa._pooler import BACKEND
from conftest import Database, DatabaseServer
from engine import counts, value
from tools.pgbouncer import PgBouncer

SERVER_CONNECTIONS = 2
# Whatever a session may hold on to; the pooler itself gives each client its own application_name.
STATE = (
    "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name'",
    "SELECT pg_listening_channels()",
    "SELECT name FROM pg_prepared_statements",
    "SELECT name FROM pg_cursors WHERE name <> '' AND is_holdable",
    "SELECT mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    "SELECT relname FROM pg_class WHERE relpersistence = 't'",
)


@pytest.fixture(scope="module")
def pooler(server: DatabaseServer) -> Iterator[PgBouncer]:
    with PgBouncer(server.dsn, "transaction") as pooler:
        yield pooler


def state(dsn: str) -> dict[int, list[list[tuple[object, ...]]]]:
    """What each server connection of the pool has kept: transactions open at once have them all."""
    with ExitStack() as stack:
        found = {}
        for _ in range(SERVER_CONNECTIONS):
            conn = stack.enter_context(psycopg.connect(dsn, prepare_threshold=None))
            found[int(value(conn, BACKEND))] = [conn.execute(q.encode()).fetchall() for q in STATE]
        assert len(found) == SERVER_CONNECTIONS
        return found


# Broken by a setting that outlives its transaction (set_config without is_local in _tick), and by a
# worker's session settings (_SET_UP) that are made there as well.
def test_b23_nothing_is_left_behind_on_a_server_connection(
    database: Database, conn: psycopg.Connection, pooler: PgBouncer
) -> None:
    """Every sort of call at once, from more clients than there are connections."""
    dsn = pooler.dsn(database.dsn)
    before = state(dsn)
    handlers = awa.Handlers()

    @handlers.task(retry=[0])
    async def k(job: awa.Job) -> None:
        if job.attempt == 1 and job.id % 3 == 0:
            await job.set_progress({"half": True})
            raise ValueError("again")

    @handlers.task(completes_itself=True)
    def own(job: awa.Job) -> None:
        with psycopg.connect(dsn, prepare_threshold=None) as mine:
            job.complete(mine)

    def produce(number: int) -> None:
        with awa.Client(dsn) as client:
            client.insert_many("k", [number] * 5)
            client.insert_job("own", opts={"backpressure": "signal"})
            client.load_jobs([{"kind": "k", "args": n} for n in range(5)])
            ids = [client.insert_job("k", n, queue="other").job_id for n in range(3)]
            client.cancel_job(ids[0])
            client.update_job(ids[1], {"priority": 1})
            client.insert_job("k", number, opts={"unique": {}}, queue="unique")
            assert client.job(ids[2]).state in ("available", "scheduled")
            client.ring_status()

    async def scenario() -> None:
        async with awa.Worker(dsn, handlers, listen=False, poll_interval=0.1):
            with ThreadPoolExecutor(20) as pool:
                loop = asyncio.get_running_loop()
                await asyncio.gather(*(loop.run_in_executor(pool, produce, n) for n in range(20)))
            async with asyncio.timeout(30):
                while counts(conn) != {"completed": 220}:
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())
    after = state(dsn)
    assert list(after.values()) == list(before.values())
    assert counts(conn, "other") == {"available": 40, "cancelled": 20}
