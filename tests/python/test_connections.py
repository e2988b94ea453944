"""Enqueue and complete_job join the application's transaction, whatever library it is of."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import sqlalchemy
from django.db import transaction

import awa
from awa import _loads
from awa._adapters import _interval, numbered
from conftest import Database, DatabaseServer
from connections import LIBRARIES, Application, Make, django_connection, url
from engine import Attempt, claim_all, insert

Scenario = Callable[[Application], Awaitable[None]]


@pytest.fixture(params=list(LIBRARIES.values()), ids=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> Make:
    make: Make = request.param
    return make


@pytest.fixture(scope="module")
def database(server: DatabaseServer, template: Database) -> Iterator[Database]:
    """One database for all of these tests; each has a queue of its own."""
    with server.fresh(template.name) as database:
        yield database


@pytest.fixture
def queue() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def run(library: Make, database: Database) -> Callable[[Scenario], None]:
    """Run a scenario with a connection of each library."""

    def run(scenario: Scenario) -> None:
        async def main() -> None:
            async with library(database.dsn) as application:
                await scenario(application)

        asyncio.run(main())

    return run


@pytest.fixture
def attempt(conn: psycopg.Connection, queue: str) -> Attempt:
    """A job that runs, and a table for its effect."""
    conn.execute("DROP TABLE IF EXISTS business")
    conn.execute("CREATE TABLE business (note text)")
    insert(conn, queue)
    [attempt] = claim_all(conn, queue)
    return attempt


def notes(conn: psycopg.Connection) -> list[str]:
    return [note for (note,) in conn.execute("SELECT note FROM business ORDER BY note")]


def status(conn: psycopg.Connection, attempt: Attempt) -> str:
    return str(awa.Client(conn).attempt_status(*attempt.token))


def test_enqueue_joins_the_applications_transaction(
    run: Callable[[Scenario], None], conn: psycopg.Connection, queue: str
) -> None:
    async def scenario(app: Application) -> None:
        async with app.transaction():
            kept = await app.call("insert_job", "k", {"n": "50 % of $1"}, queue=queue)
            assert awa.Client(conn).queue_counts("default").available == 0
        assert awa.Client(conn).job(kept.job_id).args == {"n": "50 % of $1"}
        with pytest.raises(ZeroDivisionError):
            async with app.transaction():
                await app.call("insert_many", "k", [{"i": 1}, [None], "text"], queue=queue)
                assert await app.call("load_jobs", [{"kind": "k", "queue": queue}] * 2) == 2
                raise ZeroDivisionError
        assert awa.Client(conn).queue_counts(queue).available == 1

    run(scenario)


# Broken by json.loads for the rows, and by a cursor without the loader.
def test_a_number_that_python_does_not_read_comes_as_its_text(
    run: Callable[[Scenario], None], conn: psycopg.Connection, queue: str
) -> None:
    opts = {"metadata": {"n": 1}}
    job_id = awa.Client(conn).insert_job("k", [7, 0.5], queue=queue, opts=opts).job_id
    conn.execute("SELECT awa.update_job(%s, '{\"args\": [1e5000, -1e5000, 7, 0.5]}')", [job_id])

    async def scenario(app: Application) -> None:
        info = await app.call("job", job_id)
        large = "1" + 5000 * "0"
        assert (info.args, info.metadata) == ([large, "-" + large, 7, 0.5], {"n": 1})

    run(scenario)


def test_a_load_is_all_or_nothing_without_a_transaction_as_well(
    run: Callable[[Scenario], None],
    conn: psycopg.Connection,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_loads, "PORTION", 2)

    async def scenario(app: Application) -> None:
        with pytest.raises(awa.InvalidArgument, match="kind"):
            await app.call("load_jobs", [{"kind": k, "queue": queue} for k in ("a", "b", "")])

    run(scenario)
    assert awa.Client(conn).queue_counts(queue).available == 0


def test_completion_and_business_rows_are_committed_together(
    run: Callable[[Scenario], None], conn: psycopg.Connection, attempt: Attempt
) -> None:
    async def scenario(app: Application) -> None:
        with pytest.raises(ZeroDivisionError):
            async with app.transaction():
                await app.execute("INSERT INTO business VALUES ('rolled back')")
                await app.call("complete_job", *attempt.token)
                raise ZeroDivisionError
        assert status(conn, attempt) == "open"
        async with app.transaction():
            await app.execute("INSERT INTO business VALUES ('done')")
            receipt = await app.call("complete_job", *attempt.token, opts={"result": {"a": 1}})
        assert receipt.outcome == status(conn, attempt) == "completed"
        assert receipt.finalized_at.tzinfo is not None
        # The token is used up: what comes with a second completion goes with it.
        with pytest.raises(awa.StaleAttempt) as caught:
            async with app.transaction():
                await app.execute("INSERT INTO business VALUES ('twice')")
                await app.call("complete_job", *attempt.token)
        assert (caught.value.hint or "").startswith("Drop this result and roll back")
        assert notes(conn) == ["done"]

    run(scenario)


def test_an_error_that_is_swallowed_still_rolls_the_transaction_back(
    run: Callable[[Scenario], None], conn: psycopg.Connection, attempt: Attempt
) -> None:
    awa.Client(conn).cancel_job(attempt.job_id)

    async def scenario(app: Application) -> None:
        # Some libraries say so at the commit, some do not.
        refused = False
        with contextlib.suppress(Exception):
            async with app.transaction():
                await app.execute("INSERT INTO business VALUES ('stale')")
                try:
                    await app.call("complete_job", *attempt.token)
                except awa.StaleAttempt:
                    refused = True
        assert refused
        assert notes(conn) == []

    run(scenario)


def test_a_savepoint_can_undo_a_completion_and_can_hide_that_it_failed(
    run: Callable[[Scenario], None], conn: psycopg.Connection, attempt: Attempt
) -> None:
    """Both are the caller's mistakes, and the docs say so: this is what they lead to."""

    async def scenario(app: Application) -> None:
        async with app.transaction():
            await app.execute("INSERT INTO business VALUES ('without completion')")
            with pytest.raises(ZeroDivisionError):
                async with app.savepoint():
                    receipt = await app.call("complete_job", *attempt.token)
                    raise ZeroDivisionError
        assert receipt.outcome == "completed"
        assert status(conn, attempt) == "open"

        awa.Client(conn).cancel_job(attempt.job_id)
        async with app.transaction():
            await app.execute("INSERT INTO business VALUES ('of a stale attempt')")
            with pytest.raises(awa.StaleAttempt):
                async with app.savepoint():
                    await app.call("complete_job", *attempt.token)
        assert notes(conn) == ["of a stale attempt", "without completion"]

    run(scenario)


def test_a_completion_in_a_released_savepoint_counts(
    run: Callable[[Scenario], None], conn: psycopg.Connection, attempt: Attempt
) -> None:
    async def scenario(app: Application) -> None:
        async with app.transaction():
            async with app.savepoint():
                await app.execute("INSERT INTO business VALUES ('done')")
                await app.call("complete_job", *attempt.token)
            assert status(conn, attempt) == "open"
        assert status(conn, attempt) == "completed"
        assert notes(conn) == ["done"]

    run(scenario)


def test_every_library_reads_the_same_values(
    run: Callable[[Scenario], None], conn: psycopg.Connection, queue: str
) -> None:
    me = uuid.uuid4()
    client = awa.Client(conn)
    opts = {"tags": ["a", "b"], "metadata": {"é": [1.5, None]}, "trace": "t", "keep_result": True}
    waiting = client.insert_job("k", {"big": 2**70, "text": '"'}, queue=queue, opts=opts).job_id
    ended = client.insert_job("k", "just text", queue=queue + "e", opts=opts).job_id
    [job] = client.claim_ready_runtime(queue + "e", 1, me)
    token = (job.job_id, job.run_lease, job.claim_slot, job.batch_id, job.position)
    client.complete_job(*token, opts={"result": "4"})

    async def scenario(app: Application) -> None:
        for name, *args in (
            ("job", waiting),
            ("job", ended),
            ("queue_counts", queue),
            ("queue_depths",),
            ("settings",),
            ("error_codes",),
            ("schema_version",),
            ("attempt_status", *token),
            ("ordering_shard", "key", 8),
            ("concurrency_digest", "key"),
            ("unique_key", "k", None, {"a": 1}, 7),
            ("cancel_by_unique_key", bytes(16)),
        ):
            assert await app.call(name, *args) == getattr(client, name)(*args)
        [slot, *_] = await app.call("ring_status")
        [plain, *_] = client.ring_status()
        assert dataclasses.replace(slot, age=None) == dataclasses.replace(plain, age=None)
        assert type(slot.age) is type(plain.age)
        run_at = datetime(2400, 1, 1, 12, tzinfo=UTC)
        later = await app.call("insert_job", "k", run_at=run_at)
        assert later.state == "scheduled"
        heard = await app.call("heartbeat", me, holds=[])
        assert (heard.cancelled, heard.drain) == ([], False)
        [claimed] = await app.call("claim_ready_runtime", queue, 5, me)
        assert (claimed.tags, claimed.metadata) == (opts["tags"], opts["metadata"])
        assert (claimed.args, claimed.job_id) == ({"big": 2**70, "text": '"'}, waiting)
        assert isinstance(claimed.run_at, datetime)
        answers = await app.call(
            "complete_jobs", me, claimed.claim_slot, claimed.batch_id, [claimed.position]
        )
        assert [answer.result for answer in answers] == ["done"]
        assert await app.call("register_instance", me) is None

    run(scenario)


def test_errors_say_the_same_in_every_library(
    run: Callable[[Scenario], None], conn: psycopg.Connection
) -> None:
    with pytest.raises(awa.AwaError) as plain:
        awa.Client(conn).insert_job("k", opts={"nonsense": 1})

    async def scenario(app: Application) -> None:
        with pytest.raises(awa.InvalidArgument) as caught:
            async with app.transaction():
                await app.call("insert_job", "k", opts={"nonsense": 1})
        assert str(caught.value) == str(plain.value)
        assert caught.value.__cause__ is not None
        # What is not ours stays the library's own.
        with pytest.raises(Exception, match=r"permission|denied") as other:
            async with app.transaction():
                await app.execute("SET ROLE pg_monitor")
                await app.call("insert_job", "k")
        assert not isinstance(other.value, awa.AwaError)

    run(scenario)


def test_a_task_is_enqueued_over_any_connection(
    run: Callable[[Scenario], None], conn: psycopg.Connection
) -> None:
    handlers = awa.Handlers()

    @handlers.task()
    def greet(name: str) -> None: ...

    async def scenario(app: Application) -> None:
        async with app.transaction():
            answer: Any = greet.insert(app.conn, "Ada")
            result = await answer if asyncio.iscoroutine(answer) else answer
        assert awa.Client(conn).job(result.job_id).args == {"name": "Ada"}

    run(scenario)


def test_django_rolls_back_what_its_atomic_block_rolls_back(
    database: Database, conn: psycopg.Connection
) -> None:
    connection = django_connection(database.dsn)
    try:
        client = awa.Client(connection)
        with transaction.atomic():
            client.insert_job("outer")
            with pytest.raises(awa.InvalidArgument), transaction.atomic():
                client.insert_job("inner")
                client.insert_job("")
        rows = conn.execute("SELECT kind FROM awa.jobs WHERE kind IN ('outer', 'inner')").fetchall()
        assert rows == [("outer",)]
    finally:
        connection.close()


def test_other_drivers_and_databases_are_refused_by_name() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(TypeError, match=r"postgresql.*not pysqlite"):
        awa.Client(conn).insert_job("k")
    engine.dispose()
    for wrong in (5, object()):
        with pytest.raises(TypeError, match=f"is needed, not {type(wrong).__name__}"):
            awa.Client(wrong)  # type: ignore[arg-type]
    assert url("host=h port=1 user=u dbname=d", "asyncpg").host == "h"


def test_a_scoped_session_is_a_session(
    database: Database, conn: psycopg.Connection, queue: str
) -> None:
    engine = sqlalchemy.create_engine(url(database.dsn, "psycopg"))
    session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(engine))
    awa.Client(session).insert_job("k", queue=queue)
    session.commit()
    session.remove()
    engine.dispose()
    assert awa.Client(conn).queue_counts(queue).available == 1


def test_parameters_are_numbered_and_intervals_read() -> None:
    assert numbered("f(%(a)s, %(b)s, %(a)s, 5 %% 2)", {"a": 1, "b": 2}) == (
        "f($1, $2, $1, 5 % 2)",
        (1, 2),
    )
    assert _interval("1 day 02:03:04.5").total_seconds() == 93784.5
    assert _interval("-00:00:01").total_seconds() == -1
    assert _interval("3 days -01:00:00").total_seconds() == 255600
