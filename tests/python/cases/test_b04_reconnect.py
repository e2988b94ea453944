"""Case b04: connections that are lost, one, all, or with the whole server.

Failover to another server is in test_failover.py, a server that does not let the worker in, a
database that is away at the start or at the end, and how often trouble is logged in
test_worker_process.py; a listener that hears nothing in test_poolers.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import awa
from conftest import TEMPLATE_SCRIPT, Database
from engine import value
from tools.servers import Cluster, ensure_tree

CONNECTIONS = 5  # claim, finish, heartbeat, listener, maintenance
# Far longer than a test: what is found is found by a notification or by the look after it.
POLL_MS = "60000"
START_SECONDS = 3
LINES_PER_SECOND, CPU_SHARE = 5, 0.1


@pytest.fixture
def restartable() -> Iterator[Cluster]:
    """A server of its own, with the extension, that keeps what it has committed."""
    tree = ensure_tree(int(os.environ["AWA_PG_VERSION"]))
    with Cluster(tree, {"synchronous_commit": "on"}) as cluster:
        with psycopg.connect(cluster.dsn, autocommit=True) as conn:
            conn.execute(TEMPLATE_SCRIPT.read_bytes())
        yield cluster


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Running:
    """A worker, idle or with a handler that runs all along."""

    def __init__(self, dsn: str, client: awa.Client, is_busy: bool) -> None:
        self.client = client
        self.release = asyncio.Event()
        self.started: list[int] = []
        self.is_busy = is_busy
        handlers: dict[str, Any] = {"quick": self.quick, "long": self.long}
        self.worker = awa.Worker(dsn, handlers, queues={"default": 2})

    async def quick(self, job: awa.Job) -> None:
        self.started.append(job.id)

    async def long(self, job: awa.Job) -> None:
        self.started.append(job.id)
        await self.release.wait()

    async def settle(self, conn: psycopg.Connection) -> None:
        """Wait until everything is connected, and the listener listens to the queue."""
        [dispatcher] = self.worker.dispatchers
        await until(lambda: len(backends(conn)) == CONNECTIONS)
        await until(
            lambda: self.worker.listener and self.worker.listener.hears(dispatcher.channel or "")
        )
        await until(lambda: self.worker.is_ready)

    async def runs(self) -> None:
        """Enqueue a job and wait until it is done, for much less than a poll."""
        job_id = self.client.insert_job("quick").job_id
        await until(lambda: self.client.job(job_id).state == "completed", START_SECONDS)

    async def check_end(self, long: int | None) -> None:
        """The handler that ran all along ends once, with its first lease."""
        if long is not None:
            self.release.set()
            await until(lambda: self.client.job(long).state == "completed")
            assert self.client.job(long).run_lease == 1
        assert len(self.started) == len(set(self.started))

    async def begin(self, conn: psycopg.Connection) -> int | None:
        long = self.client.insert_job("long").job_id if self.is_busy else None
        await until(lambda: long is None or long in self.started)
        await self.runs()
        await self.settle(conn)
        return long


def count_tries(worker: awa.Worker) -> list[str]:
    """What the worker finds that it cannot do, each time it tries."""
    tries: list[str] = []
    report = worker._outage.report

    def counted(what: str, error: BaseException) -> None:
        tries.append(what)
        report(what, error)

    worker._outage.report = counted  # type: ignore[method-assign]
    return tries


def backends(conn: psycopg.Connection, role: str = "") -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s"
    query += " AND datname = current_database()"
    return [pid for (pid,) in conn.execute(query, [f"awa {role}%"])]


# Broken by a listener that connects without listening, and by one that does not look afterwards.
@pytest.mark.parametrize("is_busy", [False, True])
def test_b04_a_worker_reconnects_when_the_server_ends_its_sessions(
    database: Database,
    client: awa.Client,
    conn: psycopg.Connection,
    is_busy: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.set_setting("idle_poll_ms", POLL_MS)
    caplog.set_level(logging.INFO, "awa")

    async def scenario() -> None:
        running = Running(database.dsn, client, is_busy)
        async with running.worker:
            long = await running.begin(conn)
            for role in ("listener", "claim", "finish", "heartbeat", ""):
                gone = backends(conn, role)
                assert len(gone) == (1 if role else CONNECTIONS)
                for pid in gone:
                    assert value(conn, "SELECT pg_terminate_backend(%s, 5000)", pid)
                await running.runs()  # by the look after the reconnect
                await running.settle(conn)
                assert not set(gone) & set(backends(conn))
                await running.runs()  # by a notification
            await running.check_end(long)

    asyncio.run(scenario())
    assert len(caplog.records) < 40


# Broken by waits that do not grow, by an `is_ready` that trusts the last answer, and by an
# exception of the connection that ends a task.
@pytest.mark.parametrize(
    ("is_busy", "seconds"),
    [
        (True, 2),
        pytest.param(False, 90, marks=pytest.mark.long),
        pytest.param(True, 60, marks=pytest.mark.long),
    ],
)
def test_b04_a_worker_sits_out_a_restart_of_the_server(
    restartable: Cluster, is_busy: bool, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "awa")
    dsn = restartable.dsn

    async def scenario() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            client = awa.Client(conn)
            client.set_setting("idle_poll_ms", POLL_MS)
            running = Running(dsn, client, is_busy)
            await running.worker.__aenter__()
            long = await running.begin(conn)
        tries = count_tries(running.worker)
        restartable.kill()
        lines, cpu, start = len(caplog.records), time.process_time(), time.monotonic()
        await until(lambda: not running.worker.is_ready)
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - start
        assert not running.worker.is_ready
        assert time.process_time() - cpu < CPU_SHARE * elapsed + 0.2
        assert len(caplog.records) - lines < LINES_PER_SECOND * elapsed
        # Six short waits, and then about a second each.
        assert CONNECTIONS < len(tries) < CONNECTIONS * (elapsed / 0.5 + 6)
        restartable.restart()
        with psycopg.connect(dsn, autocommit=True) as conn:
            running.client = awa.Client(conn)
            await running.runs()
            await running.settle(conn)
            await running.runs()
            await running.check_end(long)
            await running.worker.__aexit__(None, None, None)
            await until(lambda: backends(conn) == [])

    asyncio.run(scenario())
