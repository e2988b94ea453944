"""The clients: one method per SQL function, on the caller's connection or their own."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
import typing
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import awa
from awa import _calls, keys
from awa.errors import BY_SQLSTATE, is_transient
from conftest import Database

CALLS: dict[str, Callable[..., _calls.Call[Any]]] = {
    name: function
    for name, function in vars(_calls).items()
    if inspect.isfunction(function)
    and not name.startswith("_")
    and function.__module__ == _calls.__name__
    and "schema" in inspect.signature(function).parameters
    and name != "quote_schema"
}
VIEWS = {"settings"}


def _claim(client: awa.Client, instance: uuid.UUID, most: int = 10) -> list[awa.ClaimedJob]:
    client.register_instance(instance)
    return client.claim_ready_runtime("default", most, instance)


def _jobs(client: awa.Client) -> list[awa.JobInfo]:
    assert isinstance(client._conn, psycopg.Connection)
    ids = client._conn.execute("SELECT job_id FROM awa.jobs").fetchall()
    return [client.job(job_id) for (job_id,) in ids]


# The interface and its description agree


def _functions(conn: psycopg.Connection) -> dict[str, tuple[list[str], list[str], str]]:
    rows = conn.execute(
        """
        SELECT p.proname, coalesce(p.proargnames, '{}'),
               ARRAY(SELECT format_type(a, NULL) FROM unnest(p.proargtypes) AS a),
               format_type(p.prorettype, NULL)
        FROM pg_proc AS p WHERE p.pronamespace = 'awa'::regnamespace AND p.proname !~ '^_'
        """
    )
    return {row[0]: (row[1], row[2], row[3].removeprefix("awa.")) for row in rows}


PYTHON_TYPES = {
    "bigint": {"int"},
    "integer": {"int"},
    "text": {"str"},
    "boolean": {"bool"},
    "bytea": {"bytes"},
    "uuid": {"UUID"},
    "timestamp with time zone": {"datetime"},
    "jsonb": {"Json", "Options", "Sequence[Mapping[str, Json]]"},
    "jsonb[]": {"Sequence[Json]"},
    "bigint[]": {"Sequence[int]"},
    "regprocedure": {"str"},
}
SCALARS = {
    "bigint": int,
    "integer": int,
    "text": str,
    "boolean": bool,
    "bytea": bytes,
    "void": type(None),
}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - VIEWS))
def test_a_call_has_the_names_and_types_of_its_function(
    conn: psycopg.Connection, name: str
) -> None:
    names, types, returned = _functions(conn)[name]
    parameters = inspect.signature(CALLS[name]).parameters
    assert [p for p in parameters if p != "schema"] == names
    for parameter, sql_type in zip(names, types, strict=True):
        hint = str(parameters[parameter].annotation).removesuffix(" | None")
        assert hint in PYTHON_TYPES[sql_type], f"{parameter} {sql_type}"
    (row_type,) = typing.get_args(typing.get_type_hints(CALLS[name])["return"])
    if returned in SCALARS:
        assert row_type is SCALARS[returned]
        return
    columns = conn.execute(
        """
        SELECT a.attname FROM pg_attribute AS a
        JOIN pg_class AS c ON c.oid = a.attrelid
        WHERE c.relnamespace = 'awa'::regnamespace AND c.relname = %s AND a.attnum > 0
        ORDER BY a.attnum
        """,
        [returned],
    )
    assert list(row_type.__dataclass_fields__) == [column for (column,) in columns]


def test_json_goes_as_json_whatever_the_library_makes_of_text(conn: psycopg.Connection) -> None:
    given = {
        name
        for names, types, _ in _functions(conn).values()
        for name, sql_type in zip(names, types, strict=False)
        if sql_type.startswith("jsonb")
    }
    assert given == _calls._CASTS.keys()


def test_jobs_are_retried_changed_and_drained(client: awa.Client) -> None:
    job_id = client.insert_job("k").job_id
    client.cancel_job(job_id)
    assert client.retry_job(job_id, opts={"priority": 3}).state == "available"
    assert client.update_job(job_id, {"priority": 1, "metadata": {"by": "hand"}}) == "available"
    info = client.job(job_id)
    assert (info.priority, info.metadata) == (1, {"by": "hand"})
    with pytest.raises(awa.WrongState):
        client.retry_job(job_id)
    assert [client.drain_queue("default"), client.drain_queue("default")] == [1, 0]


def test_a_job_runs_in_the_database_and_is_explained(
    client: awa.Client, conn: psycopg.Connection
) -> None:
    conn.execute(
        "CREATE FUNCTION twice(args jsonb) RETURNS jsonb LANGUAGE sql"
        " AS 'SELECT to_jsonb((args ->> ''n'')::integer * 2)'"
    )
    client.register_sql_handler("twice", "public.twice(jsonb)")
    job_id = client.insert_job("twice", {"n": 4}, opts={"keep_result": True}).job_id
    explanation = client.explain_job(job_id)
    assert explanation.sentence.endswith("the next work() of it may run it.")
    assert explanation.facts["has_sql_handler"] is True
    report = client.work("default", max_jobs=5)
    assert (report.claimed, report.completed) == (1, 1)
    assert client.job(job_id).result == 8
    client.register_sql_handler("twice", None)
    assert "work" in {function.name for function in client.api()}


# In the contract, and written in SQL for other languages or for operators at a psql prompt.
SQL_ONLY = {"set_owner", "grant_producer", "grant_worker", "grant_operator", "grant_reader"}


def test_every_public_function_has_a_call(conn: psycopg.Connection) -> None:
    assert _functions(conn).keys() - SQL_ONLY <= CALLS.keys()


def test_the_error_classes_are_the_codes_of_the_database(client: awa.Client) -> None:
    codes = client.error_codes()
    assert {code.sqlstate for code in codes} == BY_SQLSTATE.keys()
    renamed = {"SerializationFailure", "NotFound"}
    for code in codes:
        camel = "".join(part.title() for part in code.name.split("_"))
        assert BY_SQLSTATE[code.sqlstate].__name__ in {camel, *renamed}


def _public(cls: type) -> dict[str, list[tuple[str, Any, Any]]]:
    def plain(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
        hint = re.sub(r"\bAsync", "", str(parameter.annotation))
        return parameter.name, parameter.default, hint

    return {
        name: [plain(p) for p in inspect.signature(method).parameters.values()]
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    assert _public(awa.Client) == _public(awa.AsyncClient)
    assert CALLS.keys() | {"wait", "close", "load_jobs"} == _public(awa.Client).keys()
    for name, method in vars(awa.Client).items():
        if name in CALLS:
            assert method.__doc__ == vars(awa.AsyncClient)[name].__doc__


# Transactions belong to the caller


def test_an_insert_joins_the_callers_transaction(database: Database, client: awa.Client) -> None:
    with database.connect(autocommit=False) as mine:
        job_id = client.insert_job("k", {"a": 1}, conn=mine).job_id
        assert mine.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        with pytest.raises(awa.SerializationFailure):
            client.job(job_id)
        mine.rollback()
        with pytest.raises(awa.NotFound):
            client.job(job_id)
        job_id = awa.Client(mine).insert_job("k", {"a": 2}).job_id
        mine.commit()
    assert client.job(job_id).args == {"a": 2}


def test_an_error_leaves_the_callers_transaction_to_the_caller(
    database: Database, client: awa.Client
) -> None:
    with database.connect(autocommit=False) as mine:
        mine.execute("CREATE TABLE business (n integer)")
        with pytest.raises(awa.LimitExceeded), mine.transaction():
            client.insert_job("k", priority=9, conn=mine)
        mine.execute("INSERT INTO business VALUES (1)")
        mine.commit()
        assert mine.execute("SELECT n FROM business").fetchall() == [(1,)]


@pytest.fixture(params=["dsn", "pool"])
def own_client(request: pytest.FixtureRequest, database: Database) -> Iterator[awa.Client]:
    if request.param == "dsn":
        with awa.Client(database.dsn) as client:
            yield client
    else:
        with ConnectionPool(database.dsn, min_size=1, max_size=2) as pool:
            yield awa.Client(pool)


def test_a_dsn_and_a_pool_commit_by_themselves(own_client: awa.Client, client: awa.Client) -> None:
    job_id = own_client.insert_job("k").job_id
    assert client.job(job_id).state == "available"
    assert own_client.cancel_job(job_id, reason="test") == "cancelled"
    assert client.job(job_id).state == "cancelled"
    assert own_client.load_jobs([{"kind": "k"}]) == client.queue_counts("default").available == 1


def test_own_connections_are_read_committed_whatever_the_default(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute(
        f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'serializable'"
    )
    with awa.Client(database.dsn) as client:
        job_id = client.insert_job("k").job_id
        assert len(_claim(client, uuid.uuid4())) == 1
        assert client.job(job_id).state == "running"


def test_making_a_client_touches_nothing() -> None:
    awa.Client("host=/nonexistent").close()
    with pytest.raises(TypeError, match="a DSN, a ConnectionPool or a connection of psycopg"):
        awa.Client(5)  # type: ignore[arg-type]


def test_the_async_client_does_the_same(database: Database, client: awa.Client) -> None:
    async def scenario() -> None:
        async with awa.AsyncClient(database.dsn) as own:
            first = (await own.insert_job("k")).job_id
            assert (await own.job(first)).state == "available"
        async with await psycopg.AsyncConnection.connect(database.dsn) as mine:
            other = awa.AsyncClient(mine)
            second = (await other.insert_job("k")).job_id
            assert client.queue_counts("default").available == 1
            await mine.commit()
            assert client.job(second).state == "available"
            with pytest.raises(awa.InvalidArgument):
                await other.insert_job("")
            await mine.rollback()
        async with AsyncConnectionPool(database.dsn, min_size=1, max_size=1, open=False) as pool:
            assert await awa.AsyncClient(pool).insert_many("k", [{}, {}]) != []
            with pytest.raises(TimeoutError, match=f"job {first} is still available"):
                await awa.AsyncClient(pool).wait(first, timeout=0.05)

    asyncio.run(scenario())


# Values


def test_jobs_come_back_as_they_were_enqueued(client: awa.Client) -> None:
    args = {"n": 2**63 + 1, "f": 1.5, "t": "ünï \U0001f600 \\N \t", "d": {"": [None, True, {}]}}
    run_at = datetime(2400, 1, 1, 12, tzinfo=UTC)
    result = client.insert_job(
        "k", args, queue="q", priority=1, max_attempts=3, run_at=run_at, opts={"tags": ["a", "b"]}
    )
    assert result.state == "scheduled"
    assert not result.duplicate
    info = client.job(result.job_id)
    assert (info.args, info.queue, info.priority, info.max_attempts, info.run_at, info.tags) == (
        args,
        "q",
        1,
        3,
        run_at,
        ["a", "b"],
    )


def test_the_three_ways_to_enqueue_answer_in_order(client: awa.Client) -> None:
    many = client.insert_many("k", [{"i": i} for i in range(50)])
    jobs = client.insert_jobs(
        [{"kind": "a", "args": {"i": 0}}, {"kind": "b", "queue": "other", "priority": 1}]
    )
    assert [client.job(job_id).args for job_id in many[:3]] == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert [client.job(result.job_id).kind for result in jobs] == ["a", "b"]
    assert client.queue_counts("default").available == 51
    assert client.queue_counts("other").available == 1


def test_a_load_is_one_statement_that_takes_what_insert_jobs_takes(client: awa.Client) -> None:
    due = datetime(2999, 1, 31, 12, tzinfo=UTC)
    jobs: list[dict[str, Any]] = [
        {"kind": "tab\\\u00e9", "args": {"text": "a\tb\nc\\d", "none": None}, "queue": "q"},
        {"kind": "later", "run_at": due, "priority": 4, "max_attempts": 1},
        {"kind": "null", "args": None, "opts": {"tags": ["t"]}, "priority": None},
    ]
    assert client.load_jobs(iter([])) == 0
    assert client.load_jobs(job for job in jobs) == 3
    loaded = {job.kind: job for job in _jobs(client)}
    assert loaded[jobs[0]["kind"]].args == jobs[0]["args"]
    assert loaded["later"].run_at == due
    assert (loaded["later"].priority, loaded["later"].max_attempts) == (4, 1)
    assert (loaded["null"].args, loaded["null"].tags) == (None, ["t"])


def test_a_load_of_many_jobs(client: awa.Client) -> None:
    count = client.load_jobs({"kind": "k", "args": i} for i in range(5_000))
    assert count == client.queue_counts("default").available == 5_000
    claimed = _claim(client, uuid.uuid4(), 500)
    assert [job.args for job in claimed] == list(range(500))


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        ({"kind": "k", "prio": 1}, awa.InvalidArgument, r'jobs\[1\] has the unknown field "prio"'),
        ({"kind": 5}, awa.InvalidArgument, r"jobs\[1\].kind must be a string"),
        ({"kind": "\0"}, awa.InvalidArgument, r"jobs\[1\].kind must be a string without NUL"),
        ({"kind": "k", "priority": True}, awa.InvalidArgument, r"jobs\[1\].priority must be"),
        ({"kind": "k", "args": "\0"}, awa.InvalidArgument, r"jobs\[1\].args holds a NUL"),
        ({"kind": "k", "run_at": datetime(2400, 1, 1)}, awa.InvalidArgument, "has no time zone"),
        ({"kind": "k", "priority": 9}, awa.LimitExceeded, 'row 2: field "priority" is 9'),
        ({"queue": "q"}, awa.InvalidArgument, 'row 2: field "kind" must not be empty'),
        ({"kind": None}, awa.InvalidArgument, r"jobs\[1\].kind must be a string"),
        ({"kind": "k", "queue": None}, awa.InvalidArgument, r"jobs\[1\].queue must be a string"),
    ],
)
def test_a_load_with_a_bad_job_enqueues_nothing(
    client: awa.Client, job: dict[str, Any], error: type[awa.AwaError], message: str
) -> None:
    with pytest.raises(error, match=message):
        client.load_jobs([{"kind": "k"}, job])
    assert client.load_jobs([{"kind": "k"}]) == client.queue_counts("default").available == 1


def test_one_bad_item_enqueues_nothing_and_is_named(client: awa.Client) -> None:
    with pytest.raises(awa.InvalidArgument, match=r"^args\[1\] holds a NUL character"):
        client.insert_many("k", [{}, {"a": "\0"}])
    with pytest.raises(awa.InvalidArgument, match=r"^jobs\[1\] cannot be written as JSON"):
        client.insert_jobs([{"kind": "k"}, {"kind": "k", "args": {"a": float("nan")}}])
    assert client.queue_counts("default").available == 0


def test_errors_keep_what_the_database_said(client: awa.Client) -> None:
    with pytest.raises(awa.NotFound) as caught:
        client.job(1)
    error = caught.value
    assert error.sqlstate == "42704"
    assert error.hint
    assert error.hint in str(error)
    assert isinstance(error.__cause__, psycopg.Error)
    with pytest.raises(psycopg.errors.UndefinedTable):
        client._one(_calls.Call("SELECT * FROM nowhere", {}, str), None)


def test_errors_that_a_retry_may_cure() -> None:
    assert is_transient(psycopg.errors.SerializationFailure())
    assert is_transient(psycopg.errors.AdminShutdown())
    assert is_transient(psycopg.OperationalError("connection refused"))
    assert not is_transient(psycopg.errors.UniqueViolation())
    assert not is_transient(ValueError())
    assert isinstance(awa.SerializationFailure("x"), psycopg.errors.SerializationFailure)


def test_another_schema_is_quoted() -> None:
    call = _calls.version(schema='100% "mine"')
    assert call.sql == 'SELECT * FROM "100%% ""mine""".version()'
    with pytest.raises(awa.InvalidArgument):
        _calls.version(schema="")


# Attempts


def test_an_attempt_can_be_completed_in_the_applications_transaction(
    database: Database, client: awa.Client
) -> None:
    client.insert_job("k", opts={"keep_result": True})
    instance = uuid.uuid4()
    (job,) = _claim(client, instance)
    token = (job.job_id, job.run_lease, job.claim_slot, job.batch_id, job.position)
    with database.connect(autocommit=False) as mine:
        client.complete_job(*token, conn=mine)
        mine.rollback()
        assert client.attempt_status(*token) == "open"
        receipt = client.complete_job(*token, opts={"result": {"ok": 1}}, conn=mine)
        assert receipt.outcome == "completed"
        mine.commit()
    assert client.attempt_status(*token) == "completed"
    assert client.job(job.job_id).result == {"ok": 1}


def test_a_stale_attempt_is_an_error_of_its_own(client: awa.Client) -> None:
    client.insert_job("k")
    instance = uuid.uuid4()
    (job,) = _claim(client, instance)
    token = (job.job_id, job.run_lease, job.claim_slot, job.batch_id, job.position)
    keys = ("job_id", "run_lease", "claim_slot", "batch_id", "position")
    item = {**dict(zip(keys, token, strict=True)), "outcome": "cancel", "reason": "r"}
    assert [r.result for r in client.finish_jobs(instance, [item])] == ["done"]
    with pytest.raises(awa.StaleAttempt):
        client.complete_job(*token)
    assert client.set_progress(*token, {"a": 1}) is False


def test_wait_returns_when_the_job_ends(database: Database, client: awa.Client) -> None:
    job_id = client.insert_job("k").job_id
    with pytest.raises(TimeoutError, match=f"job {job_id} is still available after 0.05 s"):
        client.wait(job_id, timeout=0.05)

    def cancel_later() -> None:
        time.sleep(0.2)
        with database.connect() as conn:
            awa.Client(conn).cancel_job(job_id)

    thread = threading.Thread(target=cancel_later)
    thread.start()
    start = time.monotonic()
    assert client.wait(job_id, timeout=10).state == "cancelled"
    assert time.monotonic() - start < 2
    thread.join()
    with pytest.raises(awa.NotFound):
        client.wait(1)


def test_waiting_again_for_a_job_that_ended_answers_at_once(
    database: Database, client: awa.Client
) -> None:
    job_id = client.insert_job("k").job_id
    client.cancel_job(job_id, reason="enough")

    async def scenario() -> awa.JobInfo:
        async with awa.AsyncClient(database.dsn) as own:
            return await own.wait(job_id, timeout=0)

    info = asyncio.run(scenario())
    assert (info.state, info.reason) == ("cancelled", "enough")
    assert client.wait(job_id, timeout=0) == info


def test_a_job_of_an_open_transaction_may_still_come_also_in_a_lane_of_its_own(
    database: Database, client: awa.Client
) -> None:
    for queue in ("new", "client"):
        with database.connect() as open_one, open_one.transaction(force_rollback=queue == "new"):
            job_id = awa.Client(open_one).insert_job("k", queue=queue).job_id
            for call in (client.job, client.explain_job, client.cancel_job, client.retry_job):
                with pytest.raises(awa.SerializationFailure):
                    call(job_id)
            with pytest.raises(TimeoutError, match="still not committed"):
                client.wait(job_id, timeout=0)
        if queue == "new":
            with pytest.raises(awa.NotFound):
                client.job(job_id)
        else:
            assert client.job(job_id).state == "available"


# Broken by an _ended_state that asks nobody, and by _numbers_settle without its rounds.
def test_a_deferred_job_of_an_open_transaction_may_still_come(
    database: Database, client: awa.Client
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    for commits in (False, True):
        with database.connect() as open_one, open_one.transaction(force_rollback=not commits):
            job_id = awa.Client(open_one).insert_job("k", run_at=later).job_id
            for call in (client.job, client.explain_job, client.cancel_job, client.retry_job):
                with pytest.raises(awa.SerializationFailure):
                    call(job_id)
            with pytest.raises(TimeoutError, match="still not committed"):
                client.wait(job_id, timeout=0.3)
        assert client.job(job_id).state == ("scheduled" if commits else "pruned")

    # Others that come and go leave no doubt about an id that was given out before.
    enough = threading.Event()

    def produce() -> None:
        with database.connect() as conn:
            while not enough.is_set():
                awa.Client(conn).insert_job("k", run_at=later)

    with database.connect() as conn, conn.transaction(force_rollback=True):
        gone = awa.Client(conn).insert_job("k", run_at=later).job_id
    threads = [threading.Thread(target=produce) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert {client.job(gone).state for _ in range(50)} == {"pruned"}
        assert client.wait(gone, timeout=0).state == "pruned"
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def test_wait_does_not_keep_a_transaction_open(own_client: awa.Client, client: awa.Client) -> None:
    """It polls with a connection of its own, so it sees the end and holds no snapshot meanwhile."""
    job_id = client.insert_job("k").job_id
    thread = threading.Timer(0.1, client.cancel_job, [job_id])
    thread.start()
    assert own_client.wait(job_id, timeout=10).state == "cancelled"
    thread.join()


def test_operator_calls_answer_with_their_types(client: awa.Client) -> None:
    client.declare_queue("q", opts={"enqueue_shards": 2})
    assert client.pause_queue("q") is True
    assert client.resume_queue("q") is True
    assert client.claim_status("q", arm=True).reason in {"idle", "in_flight"}
    assert 0 <= client.ordering_shard("key", 4) < 4
    assert client.unique_key("k", None, None, 7) == keys.unique_key("k", period_bucket=7)
    assert client.concurrency_digest("key") == keys.concurrency_digest("key")
    assert any(s.name == "staleness_seconds" for s in client.settings())
    client.set_setting("staleness_seconds", "60")
    assert any((s.name, s.value) == ("staleness_seconds", "60") for s in client.settings())
    assert {report.step for report in client.tick(budget={"steps": ["promote"]})} == {"promote"}
    assert {slot.ring for slot in client.ring_status()} >= {"queue", "claim"}
    client.insert_job("k", queue="q")
    assert sum(lane.depth for lane in client.queue_depths() if lane.queue == "q") == 1
    assert client.schema_version() >= 1
    assert client.version()
    client.verify()
