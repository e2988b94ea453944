"""What applications get for their tests: awa.testing and its pytest plugin."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import awa
import awa.testing
from conftest import Database, DatabaseServer
from engine import claim, finish, insert, tick

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples/testing"


@pytest.fixture
def sandbox(database: Database) -> awa.testing.Database:
    return awa.testing.Database(database.dsn)


def test_the_example_of_the_documents_passes(server: DatabaseServer) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--awa-dsn"]
    done = subprocess.run(
        [*command, server.dsn, "."], cwd=EXAMPLE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 passed", done.stdout, re.MULTILINE)


def test_the_document_shows_the_example_as_it_is() -> None:
    text = (REPO / "docs/testing-your-app.md").read_text()
    shown = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in shown} == {"shop.py", "conftest.py", "test_shop.py"}
    for name, code in shown:
        assert code.strip() in (EXAMPLE / name).read_text()


def test_drain_follows_chains_and_several_queues_and_leaves_what_is_not_due(
    sandbox: awa.testing.Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()

    @handlers.task(queue="first")
    def one(n: int) -> str:
        two.insert(client, n + 1)
        return f"one {n}"

    @handlers.task(queue="second")
    async def two(n: int) -> None:
        if n < 4:
            await asyncio.to_thread(one.insert, client, n + 1)

    one.insert(client, 1)
    two.options(delay=3600).insert(client, 9)
    runs = sandbox.drain(handlers)
    # A job may have run before the one that enqueued it has returned.
    assert sorted((run.kind, str(run.result)) for run in runs) == [
        ("one", "one 1"),
        ("one", "one 3"),
        ("two", "None"),
        ("two", "None"),
    ]
    assert sandbox.drain(handlers) == []
    sandbox.advance(3600)
    assert [run.kind for run in sandbox.drain(handlers, queues=["first"])] == []
    assert [run.kind for run in sandbox.drain(handlers, queues=["second"])] == ["two"]


def test_drain_raises_what_a_handler_raised_but_no_outcome(
    sandbox: awa.testing.Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()

    @handlers.task(retry=[0])
    def flaky(job: awa.Job) -> None:
        if job.attempt < 3:
            raise LookupError(f"attempt {job.attempt}")

    @handlers.task()
    async def later() -> awa.Snooze:
        raise awa.Snooze(60)

    jobs = [flaky.insert(client).job_id, later.insert(client).job_id]
    with pytest.raises(LookupError, match="attempt 1"):
        sandbox.drain(handlers)
    assert [client.job(job_id).state for job_id in jobs] == ["completed", "scheduled"]
    flaky.insert(client)
    runs = asyncio.run(sandbox.drain_async(handlers, raise_errors=False))
    assert [type(run.error) for run in runs] == [LookupError, LookupError, type(None)]


def test_drain_says_what_it_cannot_run(sandbox: awa.testing.Database, client: awa.Client) -> None:
    handlers = awa.Handlers({"known": lambda job: None})
    client.insert_job("unknown")
    with pytest.raises(LookupError, match="jobs without a handler: unknown"):
        sandbox.drain(handlers)
    client.insert_job("known")
    client.pause_queue("default")
    with pytest.raises(TimeoutError, match=r"due after 0.2 s in default: is a queue paused\?"):
        sandbox.drain(handlers, timeout=0.2)


def test_time_passes_for_everything_that_is_stored(
    sandbox: awa.testing.Database, conn: psycopg.Connection, client: awa.Client
) -> None:
    client.set_setting("dlq_default", "1")
    insert(conn, "runs", opts={"deadline_seconds": 50})
    insert(conn, "fails", max_attempts=1)
    due = insert(conn, "waits", opts={"delay_seconds": 100})
    [running] = claim(conn, "runs")
    [failing] = claim(conn, "fails")
    assert finish(conn, [failing.item("fail", reason="x")]) == ["done"]
    sandbox.advance(40)
    assert tick(conn, "refill", "promote", "rescue")
    assert client.job(running.job_id).state == "running"
    assert client.job(due).state == "scheduled"
    sandbox.advance(61)
    tick(conn, "refill", "promote", "rescue")
    assert client.job(running.job_id).state == "retryable"
    assert client.job(due).state == "available"
    assert client.job(failing.job_id).reason == "x"
    sandbox.advance(3_000_000)
    tick(conn, "expire")
    assert client.job(failing.job_id).state == "pruned"
    with pytest.raises(ValueError, match="at least 0"):
        sandbox.advance(-1)


def test_assertions_say_what_is_there(sandbox: awa.testing.Database, client: awa.Client) -> None:
    with pytest.raises(AssertionError, match=r"no job mail; enqueued are:\n  none$"):
        sandbox.assert_enqueued("mail")
    client.insert_job("mail", {"to": "ada", "body": {"a": 1, "b": 2}}, queue="slow")
    [job] = sandbox.assert_enqueued("mail", queue="slow", args={"body": {"b": 2}})
    assert job.args["to"] == "ada"
    sandbox.assert_not_enqueued("mail", args={"to": "bob"})
    sandbox.assert_not_enqueued("mail", queue="default")
    with pytest.raises(AssertionError, match=r"^1 jobs mail, 2 expected") as caught:
        sandbox.assert_enqueued("mail", count=2)
    assert "  mail in queue slow with {'to': 'ada'" in str(caught.value)
    with pytest.raises(AssertionError, match=r"^1 jobs mail, 0 expected"):
        sandbox.assert_not_enqueued("mail")
    client.cancel_job(job.job_id)
    sandbox.assert_not_enqueued("mail")
    assert sandbox.enqueued(states=["cancelled"])[0].job_id == job.job_id
