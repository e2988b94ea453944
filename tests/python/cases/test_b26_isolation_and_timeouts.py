"""Case b26: whatever isolation level and timeouts a database or a role has by default.

Shown elsewhere: clients over a DSN and over a pool are READ COMMITTED
(test_own_connections_are_read_committed_whatever_the_default in test_client.py); a call that needs
it and runs in an older snapshot is refused, never answered with nothing
(test_g7_an_old_snapshot_is_refused in test_guarantees.py); waits between tries grow and differ
(test_waits_grow_up_to_their_cap in test_handlers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import IsolationLevel

import awa
from awa.cli.app import main
from conftest import Database
from engine import (
    claim_all,
    complete,
    counts,
    insert,
    open_transaction,
    rotate,
    set_settings,
    value,
)

FAR = 3600
LEVELS = ("repeatable read", "serializable")
# Serialization failure, deadlock, lock timeout, statement timeout.
CURABLE = ("40001", "40P01", "55P03", "57014")
CALLS = (
    *("claim_ready_runtime", "claim_status", "complete_jobs", "finish_jobs"),
    *("set_progress", "attempt_status", "heartbeat", "tick"),
)


def set_defaults(conn: psycopg.Connection, database: Database, **settings: str) -> None:
    """What every new session of the database begins with."""
    for name, setting in settings.items():
        conn.execute(f"ALTER DATABASE {database.name} SET {name} = '{setting}'")


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What workers logged, but for handlers that failed and jobs that were cancelled."""
    expected = ("failed: ValueError", "was taken away before it finished")
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and not any(e in record.message for e in expected)
    ]


class Produced:
    """What producers did, and how often each job ran to its end."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ended: Counter[int] = Counter()
        self.answers: Counter[str] = Counter()
        self.handlers = awa.Handlers()
        self.handlers.task(retry=[0])(self.mixed)

    async def mixed(self, job: awa.Job, n: int) -> None:
        """Every tenth fails once, every tenth is put off once."""
        if n % 10 == 0 and job.attempt == 1:
            raise ValueError("again")
        if n % 10 == 1 and job.token[1] == 1:
            raise awa.Snooze(0.01)
        await asyncio.sleep(0)
        self.ended[job.id] += 1

    def produce(self, dsn: str, seconds: float, number: int) -> None:
        """Enqueue over a client with a DSN, and cancel some."""
        end = time.monotonic() + seconds
        with awa.Client(dsn) as client:
            for n in itertools.count():
                if time.monotonic() > end:
                    return
                ids = client.insert_many("mixed", [{"n": n} for n in range(20)])
                self.ids += [*ids, client.insert_job("mixed", {"n": n}, priority=1).job_id]
                with contextlib.suppress(awa.SerializationFailure):
                    self.answers[client.cancel_job(ids[number])] += 1
                time.sleep(0.02)


# Broken by sessions of the worker that keep the database's default (_SET_UP).
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.long)])
def test_b26_workers_and_producers_work_whatever_the_default_isolation(
    database: Database,
    conn: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
    level: str,
    seconds: float,
) -> None:
    produced = Produced()
    set_defaults(conn, database, default_transaction_isolation=level)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(awa.Worker(database.dsn, produced.handlers))
            producers = [
                asyncio.to_thread(produced.produce, database.dsn, seconds, number)
                for number in range(4)
            ]
            await asyncio.gather(*producers)
            await until(lambda: not set(counts(conn)) & {"available", "running", "scheduled"})
            await until(lambda: not counts(conn).get("retryable"))

    asyncio.run(scenario())
    ended = counts(conn)
    assert set(ended) <= {"completed", "cancelled"}
    assert sum(ended.values()) == len(produced.ids) == len(set(produced.ids)) > 400
    cancelled = produced.answers["cancelled"] + produced.answers["cancelled_running"]
    assert ended.get("cancelled", 0) == cancelled
    completed = {
        job_id
        for (job_id,) in conn.execute("SELECT job_id FROM awa.jobs WHERE state = 'completed'")
    }
    assert completed <= set(produced.ended)
    # One that was cancelled while it ran may have come to its end all the same.
    assert len(produced.ended) <= len(completed) + produced.answers["cancelled_running"]
    assert set(produced.ended.values()) == {1}
    assert complaints(caplog) == []


def make_faulty(conn: psycopg.Connection, function: str) -> None:
    """Let the first calls of a function end with one curable error after the other."""
    conn.execute(f"CREATE SEQUENCE public.fault_{function}")
    conn.execute(f"GRANT USAGE ON SEQUENCE public.fault_{function} TO PUBLIC")
    source = value(conn, "SELECT pg_get_functiondef(%s::regproc)", f"awa.{function}")
    fault = (
        f"IF nextval('public.fault_{function}') <= {len(CURABLE)} THEN"
        f" RAISE EXCEPTION USING MESSAGE = 'fault', ERRCODE = ('{{{','.join(CURABLE)}}}'::text[])"
        f"[currval('public.fault_{function}')]; END IF;"
    )
    assert source.count("\nBEGIN\n") == 1
    conn.execute(source.replace("\nBEGIN\n", f"\nBEGIN\n{fault}\n").encode())


# Broken by a claim whose error passes for no jobs, and by leaving a code out of _TRANSIENT_CODES.
def test_b26_what_time_cures_is_tried_again_and_never_read_as_no_job(
    database: Database, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    # Whoever believed that there was no job would sleep for a minute.
    set_settings(conn, idle_poll_ms=60000, heartbeat_seconds=0.05)
    for function in CALLS:
        make_faulty(conn, function)
    runs: Counter[int] = Counter()
    handlers = awa.Handlers()

    @handlers.task(retry=[0])
    async def k(job: awa.Job) -> None:
        if job.attempt == 1:
            assert await job.set_progress({"half": True})
            raise ValueError("again")
        runs[job.id] += 1

    @handlers.task(completes_itself=True)
    def own(job: awa.Job) -> None:
        with database.connect(autocommit=False) as mine:
            job.complete(mine)
            mine.commit()
        runs[job.id] += 1

    ids = [insert(conn) for _ in range(5)] + [insert(conn, kind="own") for _ in range(5)]

    async def scenario() -> None:
        async with awa.Worker(database.dsn, handlers, listen=False, poll_interval=FAR):
            await until(lambda: counts(conn) == {"completed": 10})
            # And after it has been idle: nothing tells of this one but the poll that is far away.
            await until(lambda: all(calls(function) > len(CURABLE) for function in CALLS))

    def calls(function: str) -> int:
        return int(value(conn, f"SELECT last_value FROM public.fault_{function}"))

    asyncio.run(scenario())
    assert runs == Counter(ids)
    assert [text for text in complaints(caplog) if "trying again" not in text] == []


def backlog(conn: psycopg.Connection, count: int, **options: str) -> None:
    """Enqueue jobs of the kind k, ten thousand a call."""
    more = "".join(f", {name} => {expression}" for name, expression in options.items())
    for start in range(0, count, 10_000):
        conn.execute(
            "SELECT count(*) FROM awa.insert_many('k', array_fill('{}'::jsonb,"
            f" ARRAY[{min(10_000, count - start)}]), queue => 'backlog'{more})"
        )


class OpenTransactions:
    """Looks whether some session of a worker has a transaction open between its calls."""

    QUERY = """
        SELECT application_name FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'awa %'
          AND state LIKE 'idle in transaction%'
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._end = threading.Event()
        self.seen: list[str] = []
        self.looks = 0

    def watch(self) -> None:
        with self._database.connect() as conn:
            while not self._end.wait(0.01):
                self.seen += [name for (name,) in conn.execute(self.QUERY)]
                self.looks += 1

    def stop(self) -> None:
        self._end.set()


# Broken by a maintenance session that keeps the role's statement_timeout: promotion and prune are
# cut off each time, and never get on.
@pytest.mark.parametrize(
    ("timeout", "due", "waiting", "handler"),
    [
        (40, 6_000, 10_000, 0.5),
        pytest.param(200, 100_000, 300_000, 5, marks=pytest.mark.long),
    ],
)
def test_b26_short_timeouts_stop_neither_handlers_nor_maintenance(
    database: Database,
    conn: psycopg.Connection,
    server_version: int,
    timeout: int,
    due: int,
    waiting: int,
    handler: float,
) -> None:
    # A slot whose history takes longer to count than a statement may.
    backlog(conn, waiting)
    done = claim_all(conn, "backlog", 1000)
    assert len(done) == waiting
    complete(conn, done)
    rotate(conn)
    set_settings(conn, terminal_retention_seconds=0, dump_lock_seconds=0)
    backlog(conn, waiting)
    backlog(conn, due, run_at="clock_timestamp() + interval '1 second'")
    set_defaults(
        conn,
        database,
        statement_timeout=f"{timeout}ms",
        lock_timeout="100ms",
        idle_in_transaction_session_timeout="1s",
        **({"transaction_timeout": "1s"} if server_version >= 17 else {}),
    )
    ended: list[int] = []

    async def slow(n: int) -> None:
        await asyncio.sleep(handler)
        ended.append(n)

    def promoted() -> bool:
        return "scheduled" not in counts(conn, "backlog")

    def pruned() -> bool:
        return bool(value(conn, "SELECT pg_relation_size('awa.ready_entries_0') = 0"))

    look = OpenTransactions(database)
    patience = 30 + handler + (due + waiting) / 1000

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"slow": slow, "k": lambda: None}, queues=["slow"]):
            watching = asyncio.create_task(asyncio.to_thread(look.watch))
            try:
                for n in range(10):
                    insert(conn, "slow", kind="slow", args=f'{{"n": {n}}}')
                await until(lambda: len(ended) == 10 and promoted() and pruned(), patience)
            finally:
                look.stop()
            await watching

    asyncio.run(scenario())
    assert sorted(ended) == list(range(10))
    assert counts(conn, "backlog") == {"available": waiting + due, "completed": waiting}
    assert look.looks > 10
    assert look.seen == []


# Broken by an insert that answers with a lock, or without its own row, in an older snapshot.
def test_b26_an_insert_in_the_callers_serializable_transaction_is_repeated_with_it(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE orders (n integer)")
    insert(conn)
    failures: Counter[str] = Counter()
    together = threading.Barrier(4)

    def order(number: int) -> int:
        """Write down how many orders there were, and enqueue, until that commits."""
        with database.connect(autocommit=False) as mine:
            mine.isolation_level = IsolationLevel.SERIALIZABLE
            client = awa.Client(mine)
            for attempt in itertools.count():
                try:
                    before = value(mine, "SELECT count(*) FROM orders")
                    if attempt == 0:
                        together.wait()
                    mine.execute("INSERT INTO orders VALUES (%s)", [before])
                    job_id = client.insert_job("order", before).job_id
                    mine.commit()
                    return job_id
                except psycopg.errors.SerializationFailure as error:
                    failures[error.sqlstate or ""] += 1
                    mine.rollback()
        raise AssertionError

    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(order, range(4)))
    assert failures["40001"] >= 1
    rows = sorted(n for (n,) in conn.execute("SELECT n FROM orders"))
    assert rows == [0, 1, 2, 3]
    jobs = conn.execute("SELECT job_id, args FROM awa.jobs WHERE kind = 'order'").fetchall()
    assert sorted(args for _, args in jobs) == rows
    assert {job_id for job_id, _ in jobs} == set(ids)


# Broken by a read in the insert of what other inserts write (a look at the lane's last row).
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_b26_producers_in_older_snapshots_do_not_fail_each_other(
    database: Database, conn: psycopg.Connection, level: IsolationLevel
) -> None:
    insert(conn)
    with contextlib.ExitStack() as stack:
        producers = [stack.enter_context(open_transaction(database, level)) for _ in range(4)]
        for _ in range(3):
            for producer in producers:
                insert(producer)
        claim_all(conn)
        for producer in producers:
            producer.commit()
    assert len(claim_all(conn)) == 12


# Broken by a command line whose connection has the database's default.
def test_b26_the_command_line_works_whatever_the_defaults(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = str(insert(conn))
    set_defaults(conn, database, default_transaction_isolation="serializable")
    for words in (
        ["insert", "k"],
        ["jobs"],
        ["jobs", "show", job_id],
        ["jobs", "explain", job_id],
        ["jobs", "update", job_id, '{"priority": 1}'],
        ["jobs", "cancel", job_id],
        ["jobs", "retry", job_id],
        ["queues"],
        ["queues", "lanes"],
        ["queues", "pause", "default"],
        ["queues", "drain", "default", "--yes"],
        ["dlq"],
        ["settings"],
        ["tick"],
        ["install", "--schema", "second"],
    ):
        done = CliRunner().invoke(main, [*words, "--dsn", database.dsn])
        assert done.exit_code == 0, (words, done.output)
    assert counts(conn) == {"cancelled": 2}
