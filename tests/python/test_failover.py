"""Streaming replication: reading the standby, and losing the primary under load."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import awa
from conftest import Database
from engine import WORKER, value
from replicas import (
    VIEWS,
    WAIT_SECONDS,
    catch_up,
    jobs_in_every_state,
    primary_and_standby,
    reads,
)
from tools.servers import Cluster, Standby

READ_ONLY = "25006"
# A sequence is replicated as what it will be after so many more values.
SEQUENCE_AHEAD = 32


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def pair() -> Iterator[tuple[Cluster, Standby]]:
    with primary_and_standby() as pair:
        yield pair


# Reading


def same(value: Any) -> Any:
    """An answer without what differs from moment to moment."""
    if isinstance(value, list):
        return [same(item) for item in value]
    if isinstance(value, awa.RingSlotStatus):
        # Who holds a slot, and files that only one of them has.
        return dataclasses.replace(value, age=None, blocked_by=None, detail=None, bytes=0)
    return value


# With arguments that are good, so that it is the server which refuses.
WRITES = {
    "cancel_by_unique_key": "'\\x{key}'",
    "cancel_job": "1",
    "claim_ready_runtime": "'default', 1, '{instance}'",
    "claim_status": "'default', true",
    "complete_job": "{token}",
    "complete_jobs": "'{instance}', {slot}, {batch}, ARRAY[{position}]",
    "declare_queue": "'new'",
    "drain_queue": "'default'",
    "finish_jobs": "'{instance}', '[{item}]'",
    "grant_operator": "'pg_monitor'",
    "grant_producer": "'pg_monitor'",
    "grant_reader": "'pg_monitor'",
    "grant_worker": "'pg_monitor'",
    "heartbeat": "'{instance}'",
    "insert_job": "'k'",
    "insert_jobs": '\'[{{"kind": "k"}}]\'',
    "insert_many": "'k', ARRAY['{{}}'::jsonb]",
    "pause_queue": "'default'",
    "purge_dlq": "{letter}",
    "register_instance": "'{other}'",
    "register_sql_handler": "'k', '-'",
    "resume_queue": "'paused'",
    "retry_dlq": "{letter}",
    "retry_job": "{letter}",
    "set_owner": "'pg_monitor'",
    "set_progress": "{token}, '1'",
    "set_setting": "'idle_poll_ms', '999'",
    "tick": "",
    "update_job": "1, '{{\"priority\": 1}}'",
    "verify": "",
    "work": "'default'",
}


def test_a_standby_answers_all_that_reads_and_refuses_all_that_writes(
    pair: tuple[Cluster, Standby],
) -> None:
    primary, standby = pair
    with (
        psycopg.connect(primary.dsn, autocommit=True) as conn,
        psycopg.connect(standby.dsn, autocommit=True) as replica,
    ):
        attempts = jobs_in_every_state(conn)
        awa.Client(conn).pause_queue("paused")
        calls = reads(conn, attempts)
        names = {f.name for f in awa.Client(conn).api()}
        assert names == calls.keys() | WRITES.keys()
        catch_up(conn, replica)
        here, there = awa.Client(conn), awa.Client(replica)
        wrong = {
            name: call
            for name, every in calls.items()
            for call in every
            if same(call(here)) != same(call(there))
        }
        assert wrong == {}
        for exact, depth in zip(here.queue_depths(), there.queue_depths(), strict=True):
            assert 0 <= depth.depth - exact.depth <= SEQUENCE_AHEAD
        for view in VIEWS:
            query = f"SELECT to_jsonb(v) FROM awa.{view} v ORDER BY 1".encode()
            assert replica.execute(query).fetchall() == conn.execute(query).fetchall()

        running = attempts[3]
        assert here.job(running.job_id).state == "running"
        values = {
            "instance": WORKER,
            "other": uuid.uuid4(),
            "token": ", ".join(map(str, running.token)),
            "slot": running.claim_slot,
            "batch": running.batch_id,
            "position": running.position,
            "item": json.dumps(running.item("completed")),
            "letter": attempts[4].job_id,
            "key": value(conn, "SELECT encode(key, 'hex') FROM awa.job_unique_claims"),
        }
        answers = {}
        for name, arguments in WRITES.items():
            query = f"SELECT awa.{name}({arguments.format(**values)})".encode()
            try:
                answers[name] = str(replica.execute(query).fetchall())
            except psycopg.Error as error:
                if error.sqlstate != READ_ONLY:
                    answers[name] = str(error)
        assert answers == {}


# Failing over


def both(primary: Cluster, standby: Cluster) -> str:
    """A connection string that finds whichever server takes writes."""
    ports = f"{primary.port},{standby.port}"
    return make_conninfo(
        primary.dsn, host="127.0.0.1,127.0.0.1", port=ports, target_session_attrs="read-write"
    )


class Producer(threading.Thread):
    """Enqueues until it is stopped, whatever happens to the server."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._stopped = threading.Event()
        self.committed: list[int] = []
        self.errors = 0

    def run(self) -> None:
        with awa.Client(self._dsn) as client:
            while not self._stopped.is_set():
                try:
                    self.committed.append(client.insert_job("k").job_id)
                    self.committed += client.insert_many("k", [{}, {}])
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    self.errors += 1
                    self._stopped.wait(0.02)

    def stop(self) -> None:
        self._stopped.set()
        self.join(WAIT_SECONDS)


def test_no_committed_job_is_lost_when_the_primary_dies(
    pair: tuple[Cluster, Standby], caplog: pytest.LogCaptureFixture
) -> None:
    primary, standby = pair
    dsn = both(primary, standby)
    with awa.Client(primary.dsn) as client:
        # A claim whose answer was lost with the primary is rescued after that.
        client.set_setting("heartbeat_seconds", "1")
        client.set_setting("staleness_seconds", "3")
    runs: Counter[int] = Counter()

    async def handler(job: awa.Job) -> None:
        await asyncio.sleep(0.01)
        runs[job.id] += 1

    producer = Producer(dsn)

    async def scenario() -> None:
        options: dict[str, Any] = {"queues": {"default": 5}, "grace": 5}
        async with (
            awa.Worker(dsn, {"k": handler}, **options) as worker,
            awa.Worker(dsn, {"k": handler}, **options) as other,
            # Knows the standby alone, and asks to wait for the promotion.
            asyncio.TaskGroup() as group,
        ):
            alone = make_conninfo(standby.dsn, target_session_attrs="read-write")
            waiting = awa.Worker(alone, {"k": handler}, **options)
            entering = group.create_task(waiting.__aenter__())
            producer.start()
            await until(lambda: len(runs) > 300)
            assert not entering.done()
            await asyncio.to_thread(primary.kill)
            killed_at = len(producer.committed)
            await until(lambda: not worker.is_ready)
            await asyncio.to_thread(promote, standby)
            await until(lambda: len(producer.committed) > killed_at + 100)
            await until(lambda: worker.is_ready and other.is_ready and waiting.is_ready)
            await asyncio.to_thread(producer.stop)
            with awa.Client(dsn) as client:
                await until(lambda: all_ended(client.queue_counts("default")))
            await waiting.__aexit__(None, None, None)

    asyncio.run(scenario())
    assert producer.errors > 0
    with psycopg.connect(standby.dsn) as conn:
        states: dict[int, str] = dict(conn.execute("SELECT job_id, state FROM awa.jobs"))
    others = {i: states.get(i, "lost") for i in producer.committed if states.get(i) != "completed"}
    assert others == {}
    assert set(producer.committed) - runs.keys() == set()
    assert len(set(producer.committed)) == len(producer.committed)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) < 60
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == []


def all_ended(counts: awa.QueueCount) -> bool:
    # An attempt whose claim was not answered is rescued, and waits for its retry.
    return counts.scheduled + counts.available + counts.running + counts.retryable == 0


def promote(standby: Standby) -> None:
    with psycopg.connect(standby.dsn, autocommit=True) as conn:
        assert value(conn, "SELECT pg_promote(true, %s)", WAIT_SECONDS)


def test_a_server_that_turns_read_only_is_waited_for(
    database: Database,
    conn: psycopg.Connection,
    client: awa.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran: list[int] = []

    def switch(setting: str) -> None:
        conn.execute(
            f"ALTER DATABASE {database.name} SET default_transaction_read_only = {setting}"
        )

    def end_sessions() -> None:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    async def scenario() -> None:
        async with awa.Worker(database.dsn, {"k": lambda: ran.append(1)}, grace=1) as worker:
            client.insert_job("k")
            await until(lambda: len(ran) == 1)
            switch("on")
            end_sessions()
            client.insert_job("k")
            await until(lambda: any("read-only" in record.message for record in caplog.records))
            # Long enough for a loop without pauses to fill the log.
            await asyncio.sleep(2)
            assert len(ran) == 1
            # For new sessions: as when the old one leads to what was the primary.
            switch("off")
            await until(lambda: len(ran) == 2 and worker.is_ready)

    asyncio.run(scenario())
    assert 0 < len(caplog.records) < 15
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == []
