"""Case b03: names of queues, each with wake-ups of its own, or refused at the first call.

Enqueue, claim, counts, pause, dead letters and the refusals of every call are in
tests/sql/api/names.sql, over the same names; schemas with such names in test_install.py
(test_any_schema_name_works_or_is_refused_at_once).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import awa
from conftest import Database
from engine import claim_all, complete, value

WORKER = uuid.UUID(int=1, version=4)
LONG = "n" * 63
ACCEPTED = [
    *("a-b", "A", "a", "a.b", "a b", "a'b", 'a"b', "a;--", "a%I", "a%s", "%(queue)s", "a\\b", "$1"),
    *("NULL", " ", "a{b,c}", "select"),
    *("n" * 57, LONG, "n" * 64, LONG + "x" * 137, LONG + "y" * 137),
    *("\U0001f680" * 200, "\u00e9", "e\u0301", "\u0645\u0631"),
]
REFUSED = ["", "a\n", "\na", "a\tb", "\x7f", "a\0", "\ud800", "n" * 201]


def test_b03_each_name_has_wake_ups_of_its_own(
    database: Database, conn: psycopg.Connection
) -> None:
    client = awa.Client(conn)
    client.set_setting("idle_poll_ms", "60000")
    channels = {}
    with database.connect() as listener:
        for name in ACCEPTED:
            status = client.claim_status(name, arm=True)
            assert status.channel is not None
            channels[status.channel] = name
            listener.execute(f"LISTEN {status.channel}")
        assert len(channels) == len(ACCEPTED)
        for name in ACCEPTED:
            client.insert_job("k", name, queue=name)
            heard = [channels[n.channel] for n in listener.notifies(timeout=10, stop_after=1)]
            assert heard == [name]
        assert list(listener.notifies(timeout=0)) == []
    for name in ACCEPTED:
        attempts = claim_all(conn, name)
        assert [client.job(a.job_id).args for a in attempts] == [name]
        assert complete(conn, attempts) == ["done"]
        assert client.queue_counts(name).completed == 1


def test_b03_one_worker_serves_them_all(database: Database, client: awa.Client) -> None:
    seen: Counter[str] = Counter()

    async def handler(job: awa.Job, name: str) -> None:
        assert job.queue == name
        seen[name] += 1

    async def run() -> None:
        queues = dict.fromkeys(ACCEPTED, 1)
        async with awa.Worker(database.dsn, {"k": handler}, queues=queues):
            async with asyncio.timeout(20):
                while not all(client.claim_status(n).reason == "idle" for n in ACCEPTED):
                    await asyncio.sleep(0.01)
                for name in ACCEPTED:
                    client.insert_job("k", {"name": name}, queue=name)
                while seen.total() < len(ACCEPTED):
                    await asyncio.sleep(0.01)

    asyncio.run(run())
    assert seen == Counter(ACCEPTED)


Call = Callable[[awa.Client, str], Any]
CALLS: dict[str, Call] = {
    "insert_job": lambda c, name: c.insert_job("k", queue=name),
    "insert_many": lambda c, name: c.insert_many("k", [{}], queue=name),
    "insert_jobs": lambda c, name: c.insert_jobs([{"kind": "k", "queue": name}]),
    "load_jobs": lambda c, name: c.load_jobs([{"kind": "k", "queue": name}]),
    "claim_ready_runtime": lambda c, name: c.claim_ready_runtime(name, 1, WORKER),
    "claim_status": lambda c, name: c.claim_status(name, arm=True),
    "declare_queue": lambda c, name: c.declare_queue(name),
    "pause_queue": lambda c, name: c.pause_queue(name),
    "resume_queue": lambda c, name: c.resume_queue(name),
    "drain_queue": lambda c, name: c.drain_queue(name),
    "queue_counts": lambda c, name: c.queue_counts(name),
    "work": lambda c, name: c.work(name),
    "kind": lambda c, name: c.insert_job(name),
    "kind of many": lambda c, name: c.insert_many(name, [{}]),
    "kind in a list": lambda c, name: c.insert_jobs([{"kind": name}]),
    "kind in a load": lambda c, name: c.load_jobs([{"kind": name}]),
    "kind in the database": lambda c, name: c.register_sql_handler(name, None),
}


# Broken by text that goes to the driver as it is: NUL and surrogates raise the driver's own errors.
def test_b03_a_name_that_cannot_be_is_refused_by_the_first_call(
    conn: psycopg.Connection, client: awa.Client
) -> None:
    for title, call in CALLS.items():
        for name in REFUSED:
            with pytest.raises((awa.InvalidArgument, awa.LimitExceeded)) as error:
                call(client, name)
            # In a list of jobs the item is named where the text cannot even be sent.
            known = any(field in str(error.value) for field in ("queue", "kind", "jobs[0]"))
            assert known, (title, name)
            assert error.value.hint
    assert value(conn, "SELECT count(*) FROM awa.queues") == 0
    assert value(conn, "SELECT count(*) FROM awa.jobs") == 0
