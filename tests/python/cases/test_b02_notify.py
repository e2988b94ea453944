"""Case b02: NOTIFY takes a lock of the whole cluster at commit, and its queue can fill up.

That polling alone is enough is in test_worker.py (test_polling_alone_is_enough), that no sleeper is
forgotten in tests/sql/execution/claim_status.sql and the interleaver, what a notification contains
in test_security.py (test_notifications_carry_nothing).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

import awa
from conftest import Database
from engine import WORKER, claim, claim_all, complete, finish, insert, tick, value

QUEUES = [f"q{number}" for number in range(3)]
JOBS = 10_000
SESSIONS = 64
# What PostgreSQL locks while a transaction that has notified commits.
COMMIT_LOCK = "locktype = 'object' AND classid = 'pg_database'::regclass AND objid = 0"


class Ears:
    """Listens to queues whose workers sleep, as producers see it."""

    def __init__(self, listener: psycopg.Connection, client: awa.Client) -> None:
        client.set_setting("idle_poll_ms", "60000")
        self._listener = listener
        self._queues = {}
        for queue in QUEUES:
            client.declare_queue(queue)  # to make a lane is another reason to notify
            channel = client.claim_status(queue, arm=True).channel
            assert channel is not None
            self._queues[channel] = queue
            listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def heard(self, other: psycopg.Connection) -> Counter[str]:
        """Notifications by queue, up to one that is sent now."""
        other.execute("SELECT pg_notify('the_last_one', '')")
        counted: Counter[str] = Counter()
        for note in self._listener.notifies(timeout=20):
            if note.channel == "the_last_one":
                return counted
            counted[self._queues[note.channel]] += 1
        pytest.fail("nothing was heard")


@pytest.fixture
def ears(database: Database, client: awa.Client) -> Iterator[Ears]:
    with database.connect() as listener:
        listener.execute("LISTEN the_last_one")
        yield Ears(listener, client)


def jobs_of(count: int) -> list[dict[str, awa.Json]]:
    return [{"kind": "k", "args": n, "queue": QUEUES[n % 3]} for n in range(count)]


# Broken by a notification for each job whose payload is the job.
@pytest.mark.parametrize("way", ["insert_jobs", "load_jobs", "many calls"])
def test_b02_a_transaction_notifies_each_queue_once(
    database: Database, conn: psycopg.Connection, ears: Ears, way: str
) -> None:
    with database.connect(autocommit=False) as producer:
        client = awa.Client(producer)
        jobs = jobs_of(JOBS)
        if way == "many calls":
            for queue in QUEUES:
                for _ in range(100):
                    client.insert_many("k", list(range(JOBS // 300)), queue=queue)
                client.insert_job("k", queue=queue)
        else:
            getattr(client, way)(jobs)
        assert ears.heard(conn) == {}  # not before the commit
        producer.commit()
    assert ears.heard(conn) == dict.fromkeys(QUEUES, 1)
    assert sum(awa.Client(conn).queue_counts(queue).available for queue in QUEUES) >= JOBS - 100


# Broken by a producer that asks nobody whether somebody sleeps, and by one that asks nobody whether
# wake-ups are wanted.
@pytest.mark.parametrize("switch", ["queue", "session", "nobody sleeps"])
def test_b02_with_wake_ups_off_nothing_is_notified(
    database: Database, conn: psycopg.Connection, ears: Ears, switch: str
) -> None:
    client = awa.Client(conn)
    if switch == "queue":
        for queue in QUEUES:
            client.declare_queue(queue, opts={"notify": False})
            assert client.claim_status(queue, arm=True).channel is None
    if switch == "nobody sleeps":
        for number in range(64):
            conn.execute(f"SELECT setval('awa.doorbell_{number}', 1)".encode())
    with database.connect() as producer:
        if switch == "session":
            producer.execute("SET awa.notify = off")
        mine = awa.Client(producer)
        for queue in QUEUES:
            for _ in range(20):
                mine.insert_job("k", queue=queue)
        mine.insert_jobs(jobs_of(30))
        mine.load_jobs(jobs_of(30))
    assert ears.heard(conn) == {}
    if switch == "session":
        insert(conn, "q0")  # another session's wake-ups are as they were
        assert ears.heard(conn) == {"q0": 1}


# Broken by a wake-up at completion. Where a job is there again, workers are woken.
def test_b02_completions_and_heartbeats_notify_nobody(conn: psycopg.Connection, ears: Ears) -> None:
    client = awa.Client(conn)
    for queue in QUEUES:
        client.insert_many("k", [{}] * 20, queue=queue)
        attempts = claim(conn, queue)
        ears.heard(conn)
        client.claim_status(queue, arm=True)
        assert set(complete(conn, attempts[:10])) == {"done"}
        conn.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempts[10].token)
        conn.execute("SELECT awa.set_progress(%s, %s, %s, %s, %s, '1')", attempts[11].token)
        items = [
            attempt.item(outcome, delay_seconds=60)
            for attempt, outcome in zip(
                attempts[11:17],
                ("completed", "retry", "snooze", "fail", "cancel", "completed"),
                strict=True,
            )
        ]
        assert set(finish(conn, items)) == {"done"}
        for _ in range(5):
            client.heartbeat(WORKER)
        tick(conn)
        assert ears.heard(conn) == {}
        assert finish(conn, [attempts[17].item("released")]) == ["done"]
        assert ears.heard(conn) == {queue: 1}
        client.cancel_job(attempts[18].job_id)
        assert ears.heard(conn) == {queue: 1}


# Broken by a NOTIFY that the switch does not reach. Nothing takes an idle queue's wake-up away.
@pytest.mark.parametrize("switch", ["queue", "session"])
def test_b02_a_job_can_be_part_of_a_two_phase_commit(
    database: Database, conn: psycopg.Connection, ears: Ears, switch: str
) -> None:
    name = f"awa {database.name}"
    insert(conn, "q0")
    claim_all(conn, "q0")
    with database.connect(autocommit=False) as producer:
        insert(producer, "q0")
        with pytest.raises(psycopg.errors.FeatureNotSupported):  # somebody sleeps
            producer.execute(sql.SQL("PREPARE TRANSACTION {}").format(name))
        producer.rollback()
        if switch == "queue":
            awa.Client(conn).declare_queue("q0", opts={"notify": False})
        else:
            producer.execute("SET awa.notify = off")
            producer.commit()
        prepared = insert(producer, "q0")
        producer.execute(sql.SQL("PREPARE TRANSACTION {}").format(name))
    # It is as any open transaction: claims go on, and do not forget it.
    later = insert(conn, "q0")
    assert [a.job_id for a in claim_all(conn, "q0")] == [later]
    ears.heard(conn)
    conn.execute(sql.SQL("COMMIT PREPARED {}").format(name))
    assert ears.heard(conn) == {}
    assert [a.job_id for a in claim_all(conn, "q0")] == [prepared]


@contextmanager
def idle_listener(database: Database, channel: str) -> Iterator[None]:
    """Somebody who listens, and sits in a transaction: the queue of notifications is kept."""
    with database.connect() as listener:
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        listener.execute("BEGIN")
        listener.execute("SELECT 1")
        yield


# Broken by a listener that is not in autocommit.
def test_b02_the_workers_own_listener_keeps_no_notification(
    database: Database, conn: psycopg.Connection, client: awa.Client
) -> None:
    done = 0

    async def handler() -> None:
        nonlocal done
        done += 1

    async def fill(worker: awa.Worker) -> None:
        """Wake an idle worker, and send more than a page of notifications besides."""
        [dispatcher] = worker.dispatchers
        async with asyncio.timeout(20):
            while worker.listener is None or not worker.listener.hears(dispatcher.channel or ""):
                await asyncio.sleep(0.01)
            before = done
            client.insert_job("k")
            while done == before:
                await asyncio.sleep(0.005)
        for n in range(30):
            text = str(n) * 2000
            conn.execute("SELECT pg_notify(%s, left(%s, 3000))", [dispatcher.channel, text])

    async def usage(at_least: bool) -> None:
        async with asyncio.timeout(10):
            while bool(value(conn, "SELECT pg_notification_queue_usage()")) != at_least:
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"k": handler}) as worker:
            await fill(worker)
            await usage(False)
            with idle_listener(database, "anything"):
                await fill(worker)
                await usage(True)  # which is how an operator sees it
                await fill(worker)  # and nobody is held up
            await usage(False)
            states = conn.execute(
                "SELECT DISTINCT state, xact_start IS NULL FROM pg_stat_activity"
                " WHERE application_name = 'awa listener' AND datname = current_database()"
            ).fetchall()
            assert states == [("idle", True)]

    asyncio.run(scenario())


def commit_for(database: Database, seconds: float, sessions: int, notify: str) -> tuple[int, int]:
    """Let sessions commit single inserts; how many, and how often one waited for another."""
    end = time.monotonic() + seconds

    def produce(number: int) -> int:
        count = 0
        with database.connect() as mine:
            mine.execute(sql.SQL("SET awa.notify = {}").format(notify))
            mine.execute("SET synchronous_commit = on")
            while time.monotonic() < end:
                insert(mine, QUEUES[number % 3])
                count += 1
        return count

    with ThreadPoolExecutor(sessions) as pool, database.connect() as watcher:
        running = [pool.submit(produce, number) for number in range(sessions)]
        waits = 0
        while time.monotonic() < end:
            waiting = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND {COMMIT_LOCK}"
            waits += value(watcher, waiting)
            time.sleep(0.002)
        return sum(future.result() for future in running), waits


@pytest.mark.parametrize(
    ("sessions", "seconds"),
    [(8, 0.5), pytest.param(SESSIONS, 60, marks=pytest.mark.long)],
)
def test_b02_with_wake_ups_off_no_commit_waits_for_another(
    database: Database, conn: psycopg.Connection, ears: Ears, sessions: int, seconds: float
) -> None:
    with_wake_ups, waits = commit_for(database, seconds, sessions, "on")
    without, none = commit_for(database, seconds, sessions, "off")
    print(f"{sessions} sessions, {seconds} s: {with_wake_ups} commits with wake-ups and a sleeper,")
    print(f"{waits} waits seen; {without} without, {none} waits")
    assert none == 0
    if seconds > 10:
        assert waits > 0
    ends = with_wake_ups + without
    assert sum(awa.Client(conn).queue_counts(queue).available for queue in QUEUES) == ends
