"""Def handlers in threads and processes: what crosses the border, and pools that break."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa import _dispatcher
from conftest import Database

SPAWN = multiprocessing.get_context("spawn")  # the worker has threads, which a fork would not


def processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=SPAWN)


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"still not so after {seconds} s")
        await asyncio.sleep(0.01)


def work(
    database: Database,
    handlers: awa.Handlers | dict[str, Any],
    scenario: Callable[[awa.Worker], Awaitable[None]],
    **options: Any,
) -> awa.Worker:
    async def run() -> awa.Worker:
        async with awa.Worker(database.dsn, handlers, **options) as worker:
            await scenario(worker)
        return worker

    return asyncio.run(run())


class Unreadable(Exception):
    """Cannot be made from its message, so a pool that gets it back breaks."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")


class Unloadable:
    """Can be written, and not read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


# Handlers that another process imports


def where(job: awa.Job) -> dict[str, object]:
    facts = {"pid": os.getpid(), "args": job.args, "attempt": job.attempt, "queue": job.queue}
    try:
        job.set_progress(1)
    except RuntimeError as error:
        facts["progress"] = str(error)
    return facts


def how(job: awa.Job, way: str, dsn: str) -> Any:
    if way == "snooze":
        return awa.Snooze(600)
    if way == "cancel":
        raise awa.Cancel("enough")
    if way == "retry":
        raise awa.RetryAfter(600, "busy")
    if way == "unreadable":
        raise Unreadable(7, "boom")
    if way == "unloadable":
        return Unloadable()
    with psycopg.connect(dsn) as conn:
        conn.execute("INSERT INTO effects VALUES (%s)", [job.id])
        job.complete(conn)
    return None


def die_once(job: awa.Job) -> None:
    if job.attempt == 1:
        os._exit(1)


def quick(job: awa.Job) -> None:
    pass


def sleep(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


# Broken by a slot that is kept, by a pool that makes no other thread, and by one that always does.
def test_a_thread_that_outlives_its_deadline_gives_its_slot_back(
    database: Database,
    client: awa.Client,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_dispatcher, "OVERDUE_SECONDS", 0.05)
    handlers = awa.Handlers()
    go_on = threading.Event()
    hanging: list[int] = []

    @handlers.task(deadline=0.1, max_attempts=1)
    def hang(job: awa.Job) -> str:
        hanging.append(job.id)
        go_on.wait(60)
        return "too late"

    handlers.task(kind="quick")(quick)

    async def is_overdue(worker: awa.Worker, job_id: int) -> None:
        await until(lambda: job_id in hanging)
        while client.job(job_id).state != "failed":
            client.tick(budget={"steps": ["rescue"]})
            await asyncio.sleep(0.02)
        worker.heartbeat.now()
        await until(lambda: str(job_id) in caplog.text and "outlives" in caplog.text)

    async def scenario(worker: awa.Worker) -> None:
        first = hang.insert(client).job_id
        await is_overdue(worker, first)
        job_id = client.insert_job("quick").job_id
        await until(lambda: client.job(job_id).state == "completed")
        # One thread is lost, as many as there are slots: the next one that hangs keeps its slot.
        caplog.clear()
        second = hang.insert(client).job_id
        await is_overdue(worker, second)
        job_id = client.insert_job("quick").job_id
        await until(lambda: "keeps its slot" in caplog.text)
        assert worker.running == 1
        go_on.set()
        await until(lambda: client.job(job_id).state == "completed")
        await until(lambda: not worker._executors.lost)
        assert {client.job(job_id).reason for job_id in (first, second)} == {"rescued_out"}
        assert not worker.holds.batches

    worker = work(database, handlers, scenario, queues=1, grace=1)
    assert worker._is_clean


def test_each_kind_has_its_executor(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()
    handlers.task(kind="elsewhere", executor=processes, keep_result=True)(where)
    handlers.task(kind="here", keep_result=True)(lambda job: os.getpid())
    jobs = {
        kind: client.insert_job(kind, {"n": 1}, opts={"keep_result": True}).job_id
        for kind in ("elsewhere", "here")
    }

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.queue_counts("default").completed == 2)

    with ThreadPoolExecutor(1) as threads:
        work(database, handlers, scenario, executor=threads)
        assert threads.submit(int).result() == 0  # it is the caller's, and still there
    facts = client.job(jobs["elsewhere"]).result
    assert facts.pop("pid") != os.getpid() == client.job(jobs["here"]).result
    assert "worker's own process" in facts.pop("progress")
    assert facts == {"args": {"n": 1}, "attempt": 1, "queue": "default"}


def test_outcomes_errors_and_completions_come_back_from_a_process(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE effects (job_id bigint)")
    handlers = awa.Handlers()
    handlers.task(completes_itself=True, executor=processes, retry=[600])(how)
    ways = ("snooze", "cancel", "retry", "unreadable", "unloadable", "complete")
    jobs = {way: client.insert_job("how", {"way": way, "dsn": database.dsn}).job_id for way in ways}

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.job(jobs["complete"]).state == "completed")
        await until(worker.holds.is_empty)

    work(database, handlers, scenario)
    states = {way: client.job(job_id).state for way, job_id in jobs.items()}
    assert states == {
        "snooze": "scheduled",
        "cancel": "cancelled",
        "retry": "retryable",
        "unreadable": "retryable",
        "unloadable": "retryable",
        "complete": "completed",
    }
    assert client.job(jobs["cancel"]).reason == "enough"
    assert client.job(jobs["retry"]).errors[0]["error"] == "busy"
    assert client.job(jobs["unreadable"]).errors[0]["error"] == "RuntimeError: Unreadable: 7 boom"
    assert "ValueError: invalid literal" in client.job(jobs["unloadable"]).errors[0]["error"]
    assert conn.execute("SELECT job_id FROM effects").fetchall() == [(jobs["complete"],)]


def test_a_pool_that_breaks_is_made_anew(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()
    handlers.task(executor=processes, retry=[0])(die_once)
    job_id = client.insert_job("die_once").job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.job(job_id).state == "completed")

    work(database, handlers, scenario)
    info = client.job(job_id)
    assert info.attempt == 2
    assert "BrokenProcessPool" in info.errors[0]["error"]


def test_with_a_pool_that_cannot_be_made_anew_the_worker_ends(
    database: Database, client: awa.Client
) -> None:
    """Red when a job is charged for a pool that others broke: all would fail, one after another."""
    broken = client.insert_job("die_once", max_attempts=1).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.job(broken).state == "failed")
        later = client.insert_many("quick", [{}] * 3)
        await worker.stopping.wait()
        jobs.extend(later)

    jobs: list[int] = []
    with processes() as executor:
        handlers = {"die_once": die_once, "quick": quick}
        worker = work(database, handlers, scenario, executor=executor)
    assert not worker._is_clean
    assert {(client.job(j).state, client.job(j).attempt) for j in jobs} == {("available", 0)}


def test_a_process_is_killed_when_the_grace_period_is_over(
    database: Database, client: awa.Client, tmp_path: Path
) -> None:
    handlers = awa.Handlers()
    handlers.task(executor=processes)(sleep)
    path = tmp_path / "pid"
    job_id = client.insert_job("sleep", {"path": str(path)}).job_id
    waiting = client.insert_job("sleep", {"path": str(path)}).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: path.exists() and path.read_text())

    work(database, handlers, scenario, grace=0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
    info = client.job(job_id)
    assert (info.state, info.attempt) == ("retryable", 1)
    assert info.errors[0]["error"] == "worker shut down"
    assert client.job(waiting).state in ("available", "retryable")


def test_a_handler_that_cannot_be_sent_is_refused_at_the_start(database: Database) -> None:
    async def scenario(worker: awa.Worker) -> None:
        pytest.fail("started")

    with pytest.raises(TypeError, match='"k": the handler cannot be sent to another process'):
        work(database, {"k": lambda job: None}, scenario, executor=processes)
    with pytest.raises(TypeError, match=r"executor takes a concurrent\.futures\.Executor or a fun"):
        work(database, {"k": quick}, scenario, executor=lambda: 5)
    with pytest.raises(TypeError, match='"later": an async handler runs in the event loop'):

        @awa.Handlers().task(executor=processes)
        async def later() -> None: ...
