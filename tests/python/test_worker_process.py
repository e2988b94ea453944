"""Workers as processes: signals, shutdown, kill -9, blocked event loops, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import awa
from awa._batches import Batch, Holds
from awa._finisher import _busy_delay
from awa._session import Outage
from awa._threads import DaemonThreads
from awa.errors import is_refusal
from conftest import Database

SCRIPT = Path(__file__).parent / "worker_process.py"


@pytest.fixture
def client(conn: psycopg.Connection) -> awa.Client:
    conn.execute("CREATE TABLE marks (job_id bigint, attempt integer, event text)")
    return awa.Client(conn)


@contextlib.contextmanager
def process(database: Database, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A running worker process, killed at the end unless it ended before."""
    worker = subprocess.Popen([sys.executable, SCRIPT, database.dsn, json.dumps(options)])
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def until(condition: Callable[[], object], seconds: float = 15) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"still not so after {seconds} s")
        time.sleep(0.01)


def marks(conn: psycopg.Connection, event: str) -> list[tuple[int, int]]:
    query = "SELECT job_id, attempt FROM marks WHERE event = %s ORDER BY job_id, attempt"
    return [(job_id, attempt) for job_id, attempt in conn.execute(query, [event])]


def worker_sessions(conn: psycopg.Connection) -> list[tuple[int]]:
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    return conn.execute(f"{query} AND application_name ~ '^awa '").fetchall()


def has_more(conn: psycopg.Connection, count: int) -> bool:
    return len(marks(conn, "end")) > count


def quick_rescue(client: awa.Client, seconds: int) -> None:
    client.set_setting("heartbeat_seconds", "1")
    client.set_setting("staleness_seconds", str(seconds))


# Shutdown


def test_a_thread_that_outlives_its_worker_keeps_its_lease(
    database: Database, client: awa.Client
) -> None:
    quick_rescue(client, 2)
    release = threading.Event()
    started = threading.Event()
    attempts: list[int] = []

    def stubborn(job: awa.Job) -> None:
        attempts.append(job.attempt)
        started.set()
        release.wait(30)

    job_id = client.insert_job("stubborn").job_id

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"stubborn": stubborn}, grace=0.1):
            await asyncio.to_thread(started.wait, 10)
        async with awa.Worker(database.dsn, {"stubborn": stubborn}):
            await asyncio.sleep(5)
            assert client.job(job_id).state == "running"
            release.set()
            while client.job(job_id).state != "completed":
                await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert attempts == [1]


@pytest.mark.parametrize("kind", ["stubborn", "hang_in_a_thread"])
def test_a_process_ends_although_a_handler_refuses_to_stop(
    database: Database, client: awa.Client, conn: psycopg.Connection, kind: str
) -> None:
    with process(database, grace=0.5) as worker:
        client.insert_job(kind)
        until(lambda: marks(conn, "start"))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 1


def test_a_process_ends_although_threads_outlive_their_handlers(
    database: Database, client: awa.Client
) -> None:
    with process(database, grace=0.5) as worker:
        # More than there are threads.
        ids = client.insert_many("give_up_a_thread", [{}] * 40, max_attempts=1)
        until(lambda: all(client.job(job_id).state == "failed" for job_id in ids))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 1


def test_a_keyboard_interrupt_in_a_handler_is_its_failure_only(
    database: Database, client: awa.Client
) -> None:
    with process(database) as worker:
        ids = [
            client.insert_job("interrupted", {"by": by}, max_attempts=1).job_id
            for by in ("async", "wait", "thread")
        ]
        until(lambda: all(client.job(job_id).state == "failed" for job_id in ids))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0


def test_a_worker_can_be_stopped_while_the_database_is_away() -> None:
    command = [sys.executable, str(SCRIPT), "host=127.0.0.1 port=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert "trying again" in worker.stderr.readline()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0


def test_a_worker_that_the_server_does_not_let_in_says_so_and_ends(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    for mistake in ({"dbname": "not there"}, {"user": "not there"}):
        refused = subprocess.run(
            [sys.executable, SCRIPT, make_conninfo(database.dsn, **mistake)],
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
        assert refused.returncode == 1
        assert '"not there" does not exist' in refused.stderr
    # Once it works, even that is an outage.
    with process(database):
        until(lambda: client.insert_job("quick") and has_more(conn, 0))
        name = sql.Identifier(database.name)
        with psycopg.connect(database.dsn, dbname="postgres", autocommit=True) as admin:
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
            for (pid,) in worker_sessions(conn):
                admin.execute("SELECT pg_terminate_backend(%s)", [pid])
            time.sleep(0.5)
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        before = len(marks(conn, "end"))
        client.insert_job("quick")
        until(lambda: has_more(conn, before))


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ('FATAL:  password authentication failed for user "app"', True),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app"', True),
        ('FATAL:  role "app" is not permitted to log in', True),
        ("fe_sendauth: no password supplied", True),
        ("FATAL:  the database system is starting up", False),
        ("FATAL:  sorry, too many clients already", False),
        ("failed: Connection refused", False),
    ],
)
def test_a_refusal_is_told_from_an_outage(text: str, is_refused: bool) -> None:
    assert is_refusal(psycopg.OperationalError(f"connection failed: {text}")) is is_refused


def test_a_batch_that_stays_busy_is_tried_for_ever() -> None:
    assert 0 < _busy_delay(0) < 0.01
    assert 0.1 < _busy_delay(100_000) <= 0.25


# Death and heartbeats


def test_the_jobs_of_a_killed_worker_run_again(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    quick_rescue(client, 2)
    jobs = client.insert_many("async_sleep", [{"seconds": 60}] * 50)
    with process(database, queues={"default": 50}) as worker:
        until(lambda: len(marks(conn, "start")) == 50, 30)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    done = sorted(jobs)

    async def quickly(job: awa.Job) -> None:
        assert job.attempt == job.run_lease == 2

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"async_sleep": quickly}):
            while client.queue_counts("default").completed < 50:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(scenario(), 30))
    infos = [client.job(job_id) for job_id in done]
    assert {(i.state, i.attempt, i.run_lease) for i in infos} == {("completed", 2, 2)}


# Connections


def backends(conn: psycopg.Connection, role: str = "") -> list[int]:
    return [
        pid
        for (pid,) in conn.execute(
            """
            SELECT pid FROM pg_stat_activity
            WHERE application_name LIKE %s AND datname = current_database()
            """,
            [f"awa {role}%"],
        )
    ]


def test_no_answer_is_read_as_an_empty_queue_under_hostile_defaults(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    for setting in (
        "default_transaction_isolation = 'serializable'",
        "statement_timeout = '2s'",
        "lock_timeout = '100ms'",
        "idle_in_transaction_session_timeout = '1s'",
        "timezone = 'Asia/Kolkata'",
        "client_encoding = 'LATIN1'",
        "idle_session_timeout = '300ms'",
    ):
        conn.execute(f"ALTER DATABASE {database.name} SET {setting}")
    seen: list[int] = []

    async def handler(i: int, name: str) -> str:
        await asyncio.sleep(1.5 if i < 5 else 0.001)
        seen.append(i)
        assert name == "\u6f22"
        return name

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"k": handler}):
            for n in range(0, 500, 50):
                client.insert_many("k", [{"i": i, "name": "\u6f22"} for i in range(n, n + 50)])
                await asyncio.sleep(0.05)
            while client.queue_counts("default").completed < 500:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert sorted(seen) == list(range(500))


# Parts


def test_a_claim_that_is_still_unread_at_the_next_heartbeat_makes_the_worker_hold_everything() -> (
    None
):
    holds = Holds()
    batch = holds.batches[3, 7] = Batch(3, 7)
    batch.open = dict.fromkeys([11, 12])  # type: ignore[assignment]
    known = [{"claim_slot": 3, "batch_id": 7, "positions": [11, 12]}]
    assert holds.snapshot() == known
    holds.claim_started("a")
    # Missing from one heartbeat does not matter, from two it would.
    assert holds.snapshot() == known
    assert holds.snapshot() is None
    holds.claim_ended("a")
    holds.claim_started("b")
    assert holds.snapshot() == known
    holds.claim_ended("b")
    holds.drop(batch, [11])
    assert holds.snapshot() == [{"claim_slot": 3, "batch_id": 7, "positions": [12]}]
    holds.drop(batch, [12])
    assert holds.snapshot() == []


def test_trouble_is_logged_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(first=0.05, most=0.2)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        outage.report("claiming", OSError("gone"))
        time.sleep(0.001)
    assert 4 <= len(caplog.records) <= 9
    assert "more messages left out" in caplog.records[-1].getMessage()


def test_daemon_threads_run_what_they_are_given() -> None:
    threads = DaemonThreads(3)
    barrier = threading.Barrier(3, timeout=5)
    futures = [threads.submit(barrier.wait) for _ in range(3)]
    assert sorted(future.result(5) for future in futures) == [0, 1, 2]
    assert threads.submit(lambda: threading.current_thread().daemon).result(5) is True
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(5)
    threads.shutdown(wait=True)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(print)


def test_another_thread_takes_the_place_of_one_that_is_lost() -> None:
    threads = DaemonThreads(2)
    release = threading.Event()
    hanging = [threads.submit(release.wait, 10) for _ in range(2)]
    waiting = threads.submit(threading.get_ident)
    while not all(future.running() for future in hanging):
        time.sleep(0.001)
    assert not threads.lose(waiting)
    assert threads.lose(hanging[0])
    assert waiting.result(5)
    assert threads.lose(hanging[1])
    more = [threads.submit(release.wait, 10) for _ in range(2)]
    while not all(future.running() for future in more):
        time.sleep(0.001)
    # As many again, and no more.
    assert not any(threads.lose(future) for future in more)
    last = threads.submit(threading.get_ident)
    assert threads.lost == 2
    assert not last.running()
    release.set()
    assert last.result(5)
    assert all(future.result(5) for future in (*hanging, *more))
    barrier = threading.Barrier(3)
    busy = [threads.submit(barrier.wait, 0.2) for _ in range(3)]
    for future in busy:
        with pytest.raises(threading.BrokenBarrierError):
            future.result(5)
    assert threads.lost == 0
    assert threads.ended(5)


class Argument:
    """Something that a weak reference can follow."""


def test_daemon_threads_do_not_keep_what_was_cancelled() -> None:
    threads = DaemonThreads(1)
    release = threading.Event()
    busy = threads.submit(release.wait, 10)
    arguments = [Argument() for _ in range(100)]
    kept = weakref.WeakSet(arguments)
    futures = [threads.submit(id, argument) for argument in arguments]
    last = threads.submit(threading.get_ident)
    del arguments
    assert len(kept) == 100
    assert all(future.cancel() for future in futures)
    assert len(kept) == 0
    assert not threads.ended(0.01)
    release.set()
    assert busy.result(5)
    assert last.result(5)
    assert threads.ended(5)
