"""Clients and workers through PgBouncer, in session mode and in transaction mode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest

import awa
import test_client
from awa import listener
from awa._pooler import BACKEND, is_pooled
from awa._session import AsyncSession, SessionSettings, connect_blocking
from awa._version import SCHEMA_VERSION
from conftest import Database, DatabaseServer
from engine import WAIT_SECONDS, value
from test_client import own_client  # noqa: F401 - a fixture
from tools.pgbouncer import PgBouncer

# In session mode a client keeps its server connection: a worker has five.
POOL_SIZES = {"session": "30", "transaction": "2"}
CLIENTS = 20
FAR = 3600
STATE = """
    SELECT (SELECT count(*) FROM pg_listening_channels()),
           (SELECT count(*) FROM pg_prepared_statements),
           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
           current_setting('idle_session_timeout'),
           current_setting('default_transaction_isolation')
"""
NO_STATE = (0, 0, 0, "0", "read committed")


@pytest.fixture(scope="module")
def poolers(server: DatabaseServer) -> Iterator[dict[str, PgBouncer]]:
    with contextlib.ExitStack() as stack:
        yield {
            mode: stack.enter_context(PgBouncer(server.dsn, mode, {"default_pool_size": size}))
            for mode, size in POOL_SIZES.items()
        }


@pytest.fixture(params=list(POOL_SIZES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def direct(server: DatabaseServer, template: Database) -> Iterator[Database]:
    """A fresh database, reached without a pooler."""
    with server.fresh(template.name) as database:
        yield database


@pytest.fixture
def database(direct: Database, mode: str, poolers: dict[str, PgBouncer]) -> Database:
    """The same, reached through a pooler."""
    return Database(direct.name, poolers[mode].dsn(direct.dsn))


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    """A connection of the application's, which is set up for a pooler."""
    with database.connect() as connection:
        connection.prepare_threshold = None
        yield connection


# The client's own tests, through the pooler: this module's fixtures apply.
test_inserts_join = test_client.test_an_insert_joins_the_callers_transaction
test_errors_are_the_callers = test_client.test_an_error_leaves_the_callers_transaction_to_the_caller
test_a_dsn_and_a_pool_commit = test_client.test_a_dsn_and_a_pool_commit_by_themselves
test_async_clients = test_client.test_the_async_client_does_the_same
test_values_come_back = test_client.test_jobs_come_back_as_they_were_enqueued
test_ways_to_enqueue = test_client.test_the_three_ways_to_enqueue_answer_in_order
test_loads = test_client.test_a_load_is_one_statement_that_takes_what_insert_jobs_takes
test_completions = test_client.test_an_attempt_can_be_completed_in_the_applications_transaction
test_stale_attempts = test_client.test_a_stale_attempt_is_an_error_of_its_own
test_waits = test_client.test_wait_returns_when_the_job_ends
test_operator_calls = test_client.test_operator_calls_answer_with_their_types
test_database_jobs = test_client.test_a_job_runs_in_the_database_and_is_explained


def test_many_clients_share_few_connections(
    database: Database, direct: Database, mode: str
) -> None:
    def enqueue(number: int) -> None:
        # More calls than psycopg makes before it prepares a statement.
        with awa.Client(database.dsn) as client:
            for n in range(10):
                job_id = client.insert_job("k", {"client": number, "n": n}).job_id
                assert client.job(job_id).args == {"client": number, "n": n}
                assert client.insert_many("k", [1, 2], queue="many")[1] > 0

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(enqueue, range(CLIENTS)))
    with awa.Client(direct.dsn) as client:
        for queue, count in (("default", CLIENTS * 10), ("many", CLIENTS * 20)):
            counts = client.queue_counts(queue)
            # Those that came while another one made the lane wait for their promotion.
            assert counts.available + counts.scheduled == count
    if mode == "transaction":
        assert_no_state_is_left(database)


def assert_no_state_is_left(database: Database) -> None:
    """Look at every server connection of the pool: transactions that are open at once have all."""
    with contextlib.ExitStack() as stack:
        seen = set()
        for _ in range(int(POOL_SIZES["transaction"])):
            conn = stack.enter_context(psycopg.connect(database.dsn, prepare_threshold=None))
            assert conn.execute(STATE).fetchone() == NO_STATE
            seen.add(value(conn, BACKEND))
    assert len(seen) == int(POOL_SIZES["transaction"])


def work(
    database: Database,
    handlers: awa.Handlers | dict[str, Callable[..., Any]],
    scenario: Callable[[awa.Worker], Awaitable[None]],
    **options: Any,
) -> None:
    async def run() -> None:
        async with awa.Worker(database.dsn, handlers, **options) as worker:
            await asyncio.wait_for(scenario(worker), WAIT_SECONDS)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def has_ended(client: awa.Client, job_id: int) -> bool:
    return client.job(job_id).is_terminal


def test_workers_do_everything_through_a_pooler(
    database: Database, direct: Database, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = awa.Handlers()
    seen: list[int] = []

    @handlers.task(retry=[0])
    async def twice(job: awa.Job, n: int) -> None:
        if job.attempt == 1:
            await job.set_progress({"n": n})
            raise ValueError("again")
        assert job.progress == {"n": n}
        seen.append(n)

    @handlers.task()
    async def forever(job: awa.Job) -> None:
        await asyncio.sleep(FAR)

    with awa.Client(direct.dsn) as client:

        async def scenario(worker: awa.Worker) -> None:
            async with awa.Worker(database.dsn, handlers, poll_interval=0.2, grace=1):
                jobs = [twice.insert(client, n=n).job_id for n in range(60)]
                hanging = forever.insert(client).job_id
                later = twice.options(delay=0.5).insert(client, n=60).job_id
                for job_id in [*jobs, later]:
                    await until(partial(has_ended, client, job_id))
                await until(lambda: client.job(hanging).state == "running")
                # Heard by the heartbeat, of whichever worker has it.
                client.cancel_job(hanging)
                await until(lambda: client.job(hanging).state == "cancelled")

        work(database, handlers, scenario, poll_interval=0.2, grace=1)
        assert sorted(seen) == list(range(61))
        assert client.queue_counts("default").completed == 61
    problems = [record.message for record in caplog.records if record.levelno > logging.WARNING]
    assert problems == []
    if mode == "transaction":
        assert_no_state_is_left(database)


def test_notifications_are_tested_before_they_are_relied_upon(
    database: Database, direct: Database, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In session mode they arrive; else one warning, and the worker polls."""
    started: list[int] = []

    with awa.Client(direct.dsn) as client:
        client.set_setting("idle_poll_ms", "60000")

        async def scenario(worker: awa.Worker) -> None:
            mine = worker.listener
            assert mine is not None
            await until(lambda: mine._is_tested or not mine.works)
            assert mine.works is (mode == "session")
            for n in range(3):
                await until(lambda: worker._claims.is_connected)
                await asyncio.sleep(0.3)
                client.insert_job("k")
                await until(lambda n=n: len(started) > n)  # type: ignore[misc]

        # Were a notification not heard in session mode, nothing else would come for an hour.
        most = FAR if mode == "session" else 0.2
        work(database, {"k": lambda: started.append(1)}, scenario, poll_interval=most)
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    if mode == "session":
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert "pooler in transaction mode" in warnings[0]
        assert_no_state_is_left(database)


def test_a_notification_that_does_not_arrive_is_missed(
    direct: Database, poolers: dict[str, PgBouncer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no look at the backends gives the pooler away."""
    monkeypatch.setattr(listener, "SESSION_LOOKS", 0)
    monkeypatch.setattr(listener, "SELF_TEST_SECONDS", 1)

    async def scenario(worker: awa.Worker) -> None:
        mine = worker.listener
        assert mine is not None
        await until(lambda: not mine.works)

    work(
        Database(direct.name, poolers["transaction"].dsn(direct.dsn)), {"k": lambda: None}, scenario
    )


def test_a_pooler_is_seen_in_any_mode(database: Database, direct: Database) -> None:
    for dsn, pooled in ((database.dsn, True), (direct.dsn, False)):
        with psycopg.connect(dsn, autocommit=True) as conn:
            assert is_pooled(conn, value(conn, BACKEND)) is pooled
        with connect_blocking(SessionSettings(dsn, "awa"), "test") as conn:
            assert (conn.prepare_threshold is None) is pooled
            assert conn.autocommit is not pooled


# As behind a pooler that passes the backend's id on: prepared statements are not there.
FORGET = "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"


def test_lost_prepared_statements_are_met_once(
    direct: Database, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SessionSettings(direct.dsn, "awa")

    async def run() -> None:
        session, other = AsyncSession(settings, "test"), AsyncSession(settings, "other")
        assert await other.fetch("SELECT 1 + %s", (1,)) == [(2,)]
        for _ in range(3):
            for _ in range(3):
                assert await session.fetch("SELECT 1 + %s", (1,)) == [(2,)]
            conn = session._conn
            assert conn is not None
            await conn.execute(FORGET, prepare=False)
        conn = other._conn
        assert conn is not None
        await conn.execute(FORGET, prepare=False)
        assert await other.fetch("SELECT 1 + %s", (1,)) == [(2,)]
        await session.close()
        await other.close()

    asyncio.run(run())
    assert not settings.preparing.works
    with awa.Client(direct.dsn) as client:
        for _ in range(7):
            client.schema_version()
        with client._connection(None) as conn:
            conn.execute(FORGET, prepare=False)
            forgotten = conn.info.backend_pid
        for _ in range(7):
            assert client.schema_version() == SCHEMA_VERSION
        with client._connection(None) as conn:
            assert conn.info.backend_pid == forgotten
            assert conn.prepare_threshold is None
    warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all("prepared statements get lost" in warning for warning in warnings)


def test_async_clients_prepare_nothing_after_they_lost_a_statement(
    direct: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with awa.AsyncClient(direct.dsn) as client:
            for _ in range(7):
                await client.schema_version()
            async with client._connection(None) as conn:
                await conn.execute(FORGET, prepare=False)
            for _ in range(7):
                assert await client.schema_version() == SCHEMA_VERSION

    asyncio.run(run())
    assert len([r for r in caplog.records if "prepared statements get lost" in r.message]) == 1
