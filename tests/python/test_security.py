"""What docs/security.md says about the contents of jobs, and about those who have no rights."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

import awa
from conftest import Database, DatabaseServer
from engine import claim, insert, value

SECRET = "marker-7f3a"  # pragma: allowlist secret


@pytest.fixture
def stranger(server: DatabaseServer, database: Database) -> Iterator[psycopg.Connection]:
    """Somebody who may connect, and was granted nothing."""
    role = f"{database.name}_stranger"
    server.admin.execute(f"CREATE ROLE {role} LOGIN")
    with psycopg.connect(make_conninfo(database.dsn, user=role), autocommit=True) as conn:
        yield conn
    with database.connect() as conn:
        conn.execute(f"DROP OWNED BY {role}")
    server.admin.execute(f"DROP ROLE {role}")


def test_a_worker_logs_no_contents(
    database: Database, client: awa.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ended = []

    async def good(job: awa.Job, text: str) -> str:
        await job.set_progress(text)
        ended.append(job.id)
        return text

    async def bad(job: awa.Job, text: str) -> None:
        ended.append(job.id)
        raise RuntimeError("no values")

    async def work() -> None:
        async with awa.Worker(database.dsn, {"good": good, "bad": bad}):
            async with asyncio.timeout(30):
                while len(ended) < 2 or client.queue_counts("default").running:
                    await asyncio.sleep(0.01)

    for kind in ("good", "bad"):
        client.insert_job(kind, {"text": SECRET}, opts={"metadata": {"text": SECRET}})
    asyncio.run(work())
    assert "no values" in caplog.text
    assert SECRET not in caplog.text
    [info] = [job for job in map(client.job, ended) if job and job.errors]
    assert "no values" in str(info.errors)
    assert SECRET not in str(info.errors)


@pytest.mark.parametrize(
    "fault",
    [
        {"priority": 99},
        {"max_attempts": 0},
        {"queue": ""},
        {"kind": "x" * 201},
        {"args": Jsonb({"text": SECRET, "filler": "x" * 1_048_576})},
        {"args": Jsonb(json.loads("[" * 300 + json.dumps(SECRET) + "]" * 300))},
        {"opts": Jsonb({"unknown": 1})},
    ],
)
def test_a_refusal_says_nothing_of_the_args(
    conn: psycopg.Connection, fault: dict[str, object]
) -> None:
    job = {"kind": "k", "args": Jsonb({"text": SECRET}), **fault}
    names = ", ".join(f"{name} => %({name})s" for name in job)
    with pytest.raises(psycopg.Error) as refusal:
        conn.execute(f"SELECT awa.insert_job({names})", job)
    diag = refusal.value.diag
    said = [getattr(diag, name) for name in dir(diag) if name[0] != "_"]
    assert diag.message_hint in said
    assert SECRET not in str(said)


def test_statements_of_the_client_hold_no_values(
    database: Database, conn: psycopg.Connection
) -> None:
    with database.connect() as other:
        client = awa.Client(other)
        calls = (
            lambda: client.insert_job("k", {"text": SECRET}),
            lambda: client.insert_jobs([{"kind": "k", "args": {"text": SECRET}}]),
            lambda: client.insert_many("k", [{"text": SECRET}]),
        )
        for call in calls:
            call()
            query = "SELECT query FROM pg_stat_activity WHERE pid = %s"
            text = value(conn, query, other.info.backend_pid)
            assert "awa" in text
            assert SECRET not in text


def test_notifications_carry_nothing(
    conn: psycopg.Connection, stranger: psycopg.Connection
) -> None:
    channel = value(conn, "SELECT (awa.claim_status('default', arm => true)).channel")
    stranger.execute(f"LISTEN {channel}")
    job = insert(conn, args=Jsonb({"text": SECRET}))
    assert [attempt.job_id for attempt in claim(conn)] == [job]
    conn.execute("SELECT awa.cancel_job(%s)", [job])
    heard = list(stranger.notifies(timeout=20, stop_after=2))
    assert [notify.payload for notify in heard] == ["", "cancel"]
    assert "default" not in channel


def test_a_stranger_can_hold_up_and_break_nothing(
    conn: psycopg.Connection, stranger: psycopg.Connection
) -> None:
    job = insert(conn)
    key = value(conn, "SELECT awa._lock_key('lane', lane_id) FROM awa.queue_lanes")
    stranger.execute("SELECT pg_advisory_lock(%s)", [key])
    assert claim(conn) == []
    stranger.execute("SELECT pg_advisory_unlock(%s)", [key])
    assert [attempt.job_id for attempt in claim(conn)] == [job]
    for statement in ("SELECT awa.version()", "TABLE awa.jobs", "SELECT 'running'::awa.job_state"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute(statement)


def test_a_producer_learns_of_a_job_only_by_its_key(
    conn: psycopg.Connection, stranger: psycopg.Connection
) -> None:
    conn.execute(f"SELECT awa.grant_producer('{stranger.info.user}')")
    opts = Jsonb({"unique": {"by": ["args"]}})
    holder = insert(conn, args=Jsonb({"text": SECRET}), opts=opts)
    insert_job = "SELECT job_id, state::text, duplicate FROM awa.insert_job('k', %s, opts => %s)"
    args = Jsonb({"text": SECRET})
    answer = stranger.execute(insert_job, [args, opts]).fetchall()
    assert answer == [(holder, "available", True)]
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        stranger.execute("SELECT awa.job(%s)", [holder])


def test_a_worker_can_end_the_attempt_of_another_by_its_numbers(
    conn: psycopg.Connection, stranger: psycopg.Connection
) -> None:
    conn.execute(f"SELECT awa.grant_worker('{stranger.info.user}')")
    insert(conn)
    [attempt] = claim(conn)
    complete = "SELECT (awa.complete_job(%s, %s, %s, %s, %s)).outcome"
    assert value(stranger, complete, *attempt.token) == "completed"
