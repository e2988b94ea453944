"""The worker against a real database: handlers, outcomes, cancellation, context, wake-ups."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import awa
from awa._decode import Mismatch
from awa._dispatcher import Dispatcher
from awa._maintenance import STEPS, Maintenance
from awa._session import Outage, SessionSettings
from awa.outcomes import Outcome
from conftest import Database
from engine import value

Scenario = Callable[[], Awaitable[None]]


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"still not so after {seconds} s")
        await asyncio.sleep(0.01)


def work(
    database: Database, handlers: awa.Handlers | dict[str, Any], scenario: Any, **options: Any
) -> awa.Worker:
    """Run a worker while the scenario lasts; the scenario may take the worker."""

    async def run() -> awa.Worker:
        async with awa.Worker(database.dsn, handlers, **options) as worker:
            await scenario(worker)
        return worker

    return asyncio.run(run())


def ended(client: awa.Client, *job_ids: int) -> Callable[[], bool]:
    states = {"completed", "failed", "cancelled"}
    return lambda: all(client.job(job_id).state in states for job_id in job_ids)


def idle(client: awa.Client) -> Callable[[], bool]:
    def condition() -> bool:
        counts = client.queue_counts("default")
        return counts.available == counts.running == 0

    return condition


def has_more(things: list[float], count: int) -> bool:
    return len(things) > count


@dataclass
class Parcel:
    weight: float
    labels: list[str]


# Handlers


def test_async_and_def_handlers_run_with_validated_arguments(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    seen: dict[str, Any] = {}

    @handlers.task()
    async def whole(job: awa.Job) -> None:
        seen["whole"] = job.args

    @handlers.task()
    async def named(parcel: Parcel, note: str = "none") -> None:
        seen["named"] = (parcel, note)

    @handlers.task()
    def blocking(job: awa.Job, n: int) -> None:
        seen["blocking"] = (job.id, n, threading.current_thread().name)

    jobs = [
        client.insert_job("whole", {"any": ["thing"]}).job_id,
        named.insert(client, Parcel(1.5, ["a"])).job_id,
        blocking.insert(client, 7).job_id,
    ]

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs))

    worker = work(database, handlers, scenario)
    assert seen == {
        "whole": {"any": ["thing"]},
        "named": (Parcel(1.5, ["a"]), "none"),
        "blocking": (jobs[2], 7, "awa handler 1"),
    }
    assert [client.job(job_id).state for job_id in jobs] == ["completed"] * 3
    assert [client.job(job_id).attempt for job_id in jobs] == [1] * 3
    assert not worker.holds.batches


def test_a_dict_of_functions_is_enough(database: Database, client: awa.Client) -> None:
    seen: list[str] = []

    async def send_email(to: str, subject: str) -> None:
        seen.append(f"{to}: {subject}")

    job_id = client.insert_job("send_email", {"to": "me", "subject": "hi"}, queue="mail").job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, {"send_email": send_email}, scenario, queues={"mail": 5})
    assert seen == ["me: hi"]


def test_the_job_tells_what_was_enqueued(database: Database, client: awa.Client) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    jobs: list[awa.Job] = []
    job_id = client.insert_job(
        "k",
        [1],
        priority=1,
        max_attempts=7,
        opts={
            "tags": ["a", "b"],
            "metadata": {"m": 1},
            "trace": trace,
            "deadline_seconds": 60,
        },
    ).job_id
    plain_id = client.insert_job("k").job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id, plain_id))

    work(database, {"k": lambda job: jobs.append(job)}, scenario)
    by_id = {job.id: job for job in jobs}
    job, plain = by_id[job_id], by_id[plain_id]
    assert (job.args, job.kind, job.queue, job.priority) == ([1], "k", "default", 1)
    assert (job.attempt, job.max_attempts, job.run_lease) == (1, 7, 1)
    assert (job.tags, job.metadata, job.trace) == (("a", "b"), {"m": 1}, trace)
    info = client.job(job_id)
    assert (job.run_at, job.created_at) == (info.run_at, info.created_at)
    assert job.deadline_at is not None
    assert timedelta(seconds=58) < job.deadline_at - datetime.now(UTC) < timedelta(seconds=61)
    assert (plain.args, plain.tags, plain.metadata, plain.trace) == ({}, (), {}, None)
    assert (plain.deadline_at, plain.progress) == (None, None)


def test_middleware_wraps_both_kinds_of_handlers(database: Database, client: awa.Client) -> None:
    order: list[str] = []

    def around(name: str) -> awa.Middleware:
        async def middleware(job: awa.Job, call_next: awa.CallNext) -> Any:
            order.append(f"{name} {job.kind}")
            try:
                return await call_next(job)
            finally:
                order.append(f"/{name}")

        return middleware

    handlers = awa.Handlers(middleware=[around("inner")])

    @handlers.task()
    def blocking() -> None:
        order.append("handler")

    job_id = blocking.insert(client).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, handlers, scenario, middleware=[around("outer")])
    assert order == ["outer blocking", "inner blocking", "handler", "/inner", "/outer"]


request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


def test_middleware_gives_context_and_sees_what_the_handler_raises_and_returns(
    database: Database, client: awa.Client
) -> None:
    seen: list[tuple[str, object]] = []

    async def context(job: awa.Job, call_next: awa.CallNext) -> Any:
        token = request.set(f"job {job.id}")
        try:
            result = await call_next(job)
        except BaseException as error:
            seen.append((job.kind, type(error)))
            raise
        else:
            seen.append((job.kind, result))
            return result
        finally:
            request.reset(token)

    async def refuse(job: awa.Job, call_next: awa.CallNext) -> Any:
        if job.kind == "refused":
            raise awa.Cancel("not today")
        return "replaced" if job.kind == "replaced" else await call_next(job)

    handlers = awa.Handlers(middleware=[refuse])

    @handlers.task(keep_result=True)
    async def asynchronous() -> str:
        await asyncio.sleep(0)
        return request.get()

    @handlers.task(keep_result=True)
    def blocking() -> str:
        return request.get()

    @handlers.task(max_attempts=1)
    async def raises() -> None:
        raise LookupError

    @handlers.task(max_attempts=1)
    def raises_in_a_thread() -> None:
        raise KeyError

    @handlers.task()
    async def mismatched(n: int) -> None: ...

    @handlers.task()
    async def refused() -> None:
        pytest.fail("called")

    @handlers.task(keep_result=True)
    async def replaced() -> None:
        pytest.fail("called")

    jobs = {task.kind: client.insert_job(task.kind, max_attempts=1).job_id for task in handlers}
    kept = {
        kind: client.insert_job(kind, opts={"keep_result": True}).job_id
        for kind in ("asynchronous", "blocking", "replaced")
    }

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs.values(), *kept.values()))

    work(database, handlers, scenario, middleware=[context], queues={"default": 1})
    for kind in ("asynchronous", "blocking"):
        assert client.job(kept[kind]).result == f"job {kept[kind]}"
    assert client.job(kept["replaced"]).result == "replaced"
    assert {(kind, what) for kind, what in seen if isinstance(what, type)} == {
        ("raises", LookupError),
        ("raises_in_a_thread", KeyError),
        ("mismatched", Mismatch),
        ("refused", awa.Cancel),
    }
    assert client.job(jobs["raises"]).state == client.job(jobs["mismatched"]).state == "failed"
    assert client.job(jobs["refused"]).reason == "not today"


def square(n: int) -> int:
    return n * n


def test_def_handlers_run_in_any_executor(database: Database, client: awa.Client) -> None:
    job_id = client.insert_job("square", {"n": 12}, opts={"keep_result": True}).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    with ProcessPoolExecutor(1) as executor:
        work(database, {"square": square}, scenario, executor=executor)
    assert client.job(job_id).result == 144


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")


def test_one_job_does_not_see_the_context_of_another(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    seen: list[str] = []

    @handlers.task()
    async def dirty(wait: bool) -> None:
        seen.append(variable.get())
        variable.set("dirty")
        if wait:
            await asyncio.sleep(0)
        seen.append(variable.get())

    @handlers.task()
    def blocking() -> None:
        seen.append(variable.get())
        variable.set("dirty")

    jobs = client.insert_many("dirty", [{"wait": bool(i % 2)} for i in range(20)])
    jobs += client.insert_many("blocking", [{}] * 5)

    async def scenario(worker: awa.Worker) -> None:
        variable.set("the application's")
        await until(ended(client, *jobs))

    work(database, handlers, scenario, queues={"default": 1})
    assert sorted(seen) == ["clean"] * 25 + ["dirty"] * 20


def test_timeouts_and_cancellation_work_inside_a_handler(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    seen: list[object] = []

    @handlers.task()
    async def careful() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.cancelling())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.001))
        seen.append(await asyncio.wait_for(asyncio.sleep(0, "done"), 1))

    @handlers.task(retry=[60])
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    jobs = [cancels_itself.insert(client).job_id]
    jobs += client.insert_many("careful", [{}] * 10)

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs[1:]))
        await until(lambda: client.job(jobs[0]).state == "retryable")

    work(database, handlers, scenario, queues={"default": 2})
    assert seen == [0, "done"] * 10 or sorted(map(str, seen)) == ["0"] * 10 + ["done"] * 10
    assert "CancelledError" in client.job(jobs[0]).errors[0]["error"]


# Outcomes


def test_each_outcome_reaches_its_state(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()

    @handlers.task()
    async def outcome(job: awa.Job, name: str, by: str) -> Any:
        value = {
            "retry": awa.RetryAfter(3600, "later"),
            "snooze": awa.Snooze(timedelta(hours=1)),
            "cancel": awa.Cancel("not needed"),
            "fail": awa.Fail("hopeless"),
        }[name]
        if by == "raise":
            raise value
        return value

    ids = {
        (name, by): outcome.insert(client, name, by).job_id
        for name in ("retry", "snooze", "cancel", "fail")
        for by in ("return", "raise")
    }

    async def scenario(worker: awa.Worker) -> None:
        await until(idle(client))

    work(database, handlers, scenario)
    for (name, _), job_id in ids.items():
        info = client.job(job_id)
        expected = {
            "retry": ("retryable", 1),
            "snooze": ("scheduled", 0),
            "cancel": ("cancelled", 1),
            "fail": ("failed", 1),
        }[name]
        assert (info.state, info.attempt) == expected
        if name in ("retry", "snooze"):
            assert info.run_at is not None
            assert info.run_at > datetime.now(UTC) + timedelta(minutes=55)
    assert client.job(ids["fail", "raise"]).errors[-1]["error"] == "hopeless"


def test_an_exception_is_retried_until_the_attempts_are_used_up(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    attempts: list[int] = []

    @handlers.task(max_attempts=3, retry=[0])
    async def hopeless(job: awa.Job) -> None:
        attempts.append(job.attempt)
        raise ValueError(f"attempt {job.attempt} \0")

    @handlers.task(never_retry=[KeyError])
    def once() -> None:
        raise KeyError("gone")

    jobs = [hopeless.insert(client).job_id, once.insert(client).job_id]

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs))

    work(database, handlers, scenario)
    assert attempts == [1, 2, 3]
    info = client.job(jobs[0])
    assert (info.state, info.attempt) == ("failed", 3)
    assert [e["error"] for e in info.errors] == [f"ValueError: attempt {n} " for n in (1, 2, 3)]
    assert "raise ValueError" in info.errors[0]["traceback"]
    info = client.job(jobs[1])
    assert (info.state, info.attempt) == ("failed", 1)


def test_arguments_that_do_not_fit_fail_the_job_at_once(
    database: Database, client: awa.Client
) -> None:
    called: list[object] = []

    def handler(n: int, name: str = "x") -> None:
        called.append(n)

    cases = {
        client.insert_job("k", args).job_id: message
        for args, message in [
            ({"n": "one"}, "n: expected an integer, got 'one'"),
            ({}, "n: missing field"),
            ({"n": 1, "nmae": "y"}, "nmae: unexpected field"),
            ([1], "args: expected an object with the handler's parameters"),
        ]
    }

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *cases))

    work(database, {"k": handler}, scenario)
    assert called == []
    for job_id, message in cases.items():
        info = client.job(job_id)
        assert (info.state, info.attempt) == ("failed", 1)
        assert info.errors[-1]["error"] == f"arguments do not fit: {message}"


# Broken by json.loads for the args.
def test_args_with_a_number_that_python_does_not_read_are_its_text(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    handlers = awa.Handlers()
    seen: dict[str, object] = {}

    @handlers.task()
    def whole(job: awa.Job) -> None:
        seen["whole"] = job.args

    @handlers.task()
    def exact(n: Decimal) -> None:
        seen["exact"] = n

    @handlers.task()
    def typed(n: int) -> None:
        seen["typed"] = n

    insert = "SELECT (awa.insert_job(%s, '{\"n\": 1e5000}')).job_id"
    jobs = {kind: value(conn, insert, kind) for kind in ("whole", "exact", "typed")}

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs.values()))

    work(database, handlers, scenario)
    assert seen == {"whole": {"n": "1" + 5000 * "0"}, "exact": Decimal("1e5000")}
    info = client.job(jobs["typed"])
    assert (info.state, info.attempt) == ("failed", 1)
    assert info.errors[-1]["error"].startswith("arguments do not fit: n: expected an integer")


def test_a_timeout_is_a_failure_that_is_retried(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()
    attempts: list[int] = []

    @handlers.task(timeout=0.05, retry=[0])
    async def slow(job: awa.Job) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            await asyncio.sleep(10)

    job_id = slow.insert(client).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, handlers, scenario)
    assert attempts == [1, 2]
    error = client.job(job_id).errors[0]["error"]
    assert error == "TimeoutError: the handler took longer than 0.05 s"


def test_results_are_kept_when_asked(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()

    @handlers.task(keep_result=True)
    async def asked() -> dict[str, int]:
        return {"n": 1}

    @handlers.task(keep_result=True)
    def not_json() -> object:
        return object()

    @handlers.task()
    async def maybe() -> str:
        return "kept"

    @handlers.task()
    async def maybe_not_json() -> object:
        return object()

    jobs = [
        asked.insert(client).job_id,
        not_json.insert(client).job_id,
        maybe.insert(client).job_id,
        maybe.options(keep_result=True).insert(client).job_id,
        maybe_not_json.insert(client).job_id,
    ]

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs))

    work(database, handlers, scenario)
    infos = [client.job(job_id) for job_id in jobs]
    assert [info.state for info in infos] == [
        "completed",
        "failed",
        "completed",
        "completed",
        "completed",
    ]
    assert [info.result for info in infos] == [{"n": 1}, None, None, "kept", None]
    assert "object has no JSON form" in infos[1].errors[-1]["error"]


def test_progress_survives_a_retry(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()
    seen: list[Any] = []

    @handlers.task(retry=[0])
    async def steps(job: awa.Job) -> None:
        seen.append(job.progress)
        assert await job.set_progress({"step": job.attempt})
        assert job.progress == {"step": job.attempt}
        if job.attempt < 3:
            raise ValueError("again")

    @handlers.task(retry=[0])
    def blocking(job: awa.Job) -> None:
        seen.append(job.progress)
        assert job.set_progress([job.attempt])
        if job.attempt < 2:
            raise ValueError("again")

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, steps.insert(client).job_id))
        await until(ended(client, blocking.insert(client).job_id))

    work(database, handlers, scenario)
    assert seen == [None, {"step": 1}, {"step": 2}, None, [1]]


# Completion in the handler's own transaction


def test_a_handler_completes_its_job_in_its_own_transaction(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE business (kind text, attempt integer, note text)")
    handlers = awa.Handlers()

    @handlers.task(completes_itself=True, retry=[0])
    async def asynchronous(job: awa.Job, how: str) -> None:
        async with await psycopg.AsyncConnection.connect(database.dsn) as mine:
            await mine.execute(
                "INSERT INTO business VALUES (%s, %s, %s)", ["async", job.attempt, how]
            )
            if how != "forgets" or job.attempt > 1:
                receipt = await job.complete(mine)
                assert receipt.outcome == "completed"
            if job.attempt == 1 and how == "raises":
                raise ValueError("rolled back")
            if job.attempt == 1 and how in ("rolls back", "forgets"):
                await mine.rollback()

    @handlers.task(completes_itself=True, retry=[0])
    def blocking(job: awa.Job) -> None:
        with database.connect(autocommit=False) as mine:
            mine.execute("INSERT INTO business VALUES ('sync', %s)", [job.attempt])
            job.complete(mine)
        # What happens after the commit does not bring the job back.
        raise ValueError("too late")

    jobs = {
        how: asynchronous.options(max_attempts=2).insert(client, how).job_id
        for how in ("commits", "rolls back", "raises", "forgets")
    }
    jobs["sync"] = blocking.insert(client).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *jobs.values()))
        await until(lambda: not worker.holds.batches)

    work(database, handlers, scenario)
    assert {client.job(job_id).state for job_id in jobs.values()} == {"completed"}
    rows = conn.execute("SELECT kind, note, attempt FROM business ORDER BY 1, 2").fetchall()
    assert rows == [
        ("async", "commits", 1),
        ("async", "forgets", 2),
        ("async", "raises", 2),
        ("async", "rolls back", 2),
        ("sync", None, 1),
    ]


def test_complete_needs_a_task_that_says_so(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()
    messages: list[str] = []

    @handlers.task()
    def undeclared(job: awa.Job) -> None:
        with database.connect() as mine:
            try:
                job.complete(mine)
            except RuntimeError as error:
                messages.append(str(error))

    job_id = undeclared.insert(client).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, handlers, scenario)
    assert "completes_itself=True" in messages[0]


# Cancellation and lost leases


def test_a_running_handler_learns_of_its_cancellation(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    seen: dict[str, float] = {}
    started: dict[str, awa.Job] = {}

    @handlers.task()
    async def polite(job: awa.Job) -> None:
        started["polite"] = job
        while not job.is_cancelled():
            await asyncio.sleep(0.01)
        seen["polite"] = time.monotonic()

    @handlers.task()
    def blocking(job: awa.Job) -> None:
        started["blocking"] = job
        while not job.is_cancelled():
            time.sleep(0.01)
        seen["blocking"] = time.monotonic()

    @handlers.task(interrupt_on_cancel=True)
    async def interrupted(job: awa.Job) -> None:
        started["interrupted"] = job
        try:
            await asyncio.sleep(30)
        finally:
            seen["interrupted"] = time.monotonic()

    jobs = [task.insert(client).job_id for task in handlers]

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: len(started) == 3)
        start = time.monotonic()
        assert [client.cancel_job(job_id) for job_id in jobs] == ["cancelled_running"] * 3
        await until(lambda: len(seen) == 3)
        assert max(seen.values()) - start < 2
        await until(lambda: not worker.holds.batches)

    work(database, handlers, scenario)
    assert {client.job(job_id).state for job_id in jobs} == {"cancelled"}
    assert not any(job.lease_lost for job in started.values())


def test_a_rescued_attempt_learns_that_its_lease_is_lost(
    database: Database, client: awa.Client, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = awa.Handlers()
    lost: list[int] = []

    @handlers.task(deadline=0.5)
    async def overdue(job: awa.Job) -> None:
        if job.attempt == 1:
            while not job.lease_lost:
                await asyncio.sleep(0.01)
            lost.append(job.attempt)

    job_id = overdue.insert(client).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id), 20)
        await until(lambda: not worker.holds.batches)

    work(database, handlers, scenario)
    assert lost == [1]
    info = client.job(job_id)
    assert (info.state, info.attempt, info.run_lease) == ("completed", 2, 2)


# Claiming


# Broken by a dispatcher that claims on, and by a drain that never ends.
def test_a_queue_is_left_alone_while_somebody_drains_it(
    database: Database, client: awa.Client
) -> None:
    async def noop(job: awa.Job) -> None:
        pass

    async def scenario(worker: awa.Worker) -> None:
        client.insert_many("k", [{}] * 3, run_at=datetime.now(UTC) + timedelta(days=1))
        assert client.drain_queue("default", opts={"limit": 1}) == 1
        await until(lambda: worker.dispatchers[0]._is_drained)
        waiting = client.insert_job("k").job_id
        await until(ended(client, client.insert_job("k", queue="other").job_id))
        assert client.job(waiting).state == "available"
        assert client.drain_queue("default") == 3
        assert client.drain_queue("default") == 0
        await until(ended(client, client.insert_job("k").job_id))
        assert client.job(waiting).state == "cancelled"

    work(database, {"k": noop}, scenario, queues={"default": 1, "other": 1})


def test_no_more_jobs_run_at_once_than_there_are_slots(
    database: Database, client: awa.Client
) -> None:
    running = peak = 0

    async def handler() -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.005)
        running -= 1

    client.insert_many("k", [{}] * 300)

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.queue_counts("default").completed == 300)

    work(database, {"k": handler}, scenario, queues={"default": 7})
    assert peak == 7


def test_nothing_is_claimed_that_cannot_start_soon(database: Database, client: awa.Client) -> None:
    release = asyncio.Event()
    client.insert_many("k", [{}] * 30)

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: worker.running == 4)
        await asyncio.sleep(0.3)
        assert client.queue_counts("default").running == 4
        release.set()
        await until(lambda: client.queue_counts("default").completed == 30)

    async def handler() -> None:
        await release.wait()

    work(database, {"k": handler}, scenario, queues={"default": 4})


def test_jobs_claimed_ahead_go_back_when_their_wait_gets_long(
    database: Database, client: awa.Client
) -> None:
    release = asyncio.Event()
    client.insert_many("k", [{}] * 10)

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: client.queue_counts("default").running == 6)
        await until(lambda: client.queue_counts("default").running == 2)
        release.set()
        await until(lambda: client.queue_counts("default").completed == 10)

    async def handler(job: awa.Job) -> None:
        assert job.attempt == 1
        await release.wait()

    work(database, {"k": handler}, scenario, queues={"default": 2}, prefetch=4)


def test_two_workers_share_a_queue_without_repeating_a_job(
    database: Database, client: awa.Client
) -> None:
    seen: list[int] = []

    async def handler(i: int) -> None:
        await asyncio.sleep(0.001)
        seen.append(i)

    client.insert_many("k", [{"i": i} for i in range(2000)])

    async def scenario(worker: awa.Worker) -> None:
        async with awa.Worker(database.dsn, {"k": handler}, queues={"default": 20}):
            await until(lambda: client.queue_counts("default").completed == 2000, 30)

    work(database, {"k": handler}, scenario, queues={"default": 20})
    assert sorted(seen) == list(range(2000))


def test_an_idle_worker_is_woken_by_an_insert(database: Database, client: awa.Client) -> None:
    started: list[float] = []
    client.set_setting("idle_poll_ms", "5000")

    async def handler() -> None:
        started.append(time.monotonic())

    async def scenario(worker: awa.Worker) -> None:
        await asyncio.sleep(0.5)
        waits = []
        for _ in range(20):
            await asyncio.sleep(0.05)
            before = time.monotonic()
            count = len(started)
            client.insert_job("k")
            await until(partial(has_more, started, count))
            waits.append(started[-1] - before)
        assert sorted(waits)[10] < 0.1

    work(database, {"k": handler}, scenario)


def test_an_idle_worker_sleeps_no_longer_than_it_is_told(
    database: Database, client: awa.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set_setting("idle_poll_ms", "200")
    waits: list[float] = []
    wait_for_bell = Dispatcher._wait_for_bell

    async def record(self: Dispatcher, seconds: float) -> None:
        waits.append(seconds)
        await wait_for_bell(self, seconds)

    monkeypatch.setattr(Dispatcher, "_wait_for_bell", record)
    monkeypatch.setattr("awa._dispatcher.random.random", lambda: 0.999)

    async def scenario(worker: awa.Worker) -> None:
        await until(lambda: any(seconds > 0.1 for seconds in waits))

    work(database, awa.Handlers(), scenario)
    # After that the flag that makes producers ring may have gone out: a job would wait for nothing.
    assert max(waits) <= 0.2


def test_polling_alone_is_enough(database: Database, client: awa.Client) -> None:
    handlers = awa.Handlers()

    @handlers.task(retry=[0])
    async def twice(job: awa.Job) -> None:
        if job.attempt == 1:
            raise ValueError("again")

    async def scenario(worker: awa.Worker) -> None:
        await asyncio.sleep(0.3)
        jobs = [twice.insert(client).job_id for _ in range(5)]
        await until(ended(client, *jobs))

    work(database, handlers, scenario, poll_interval=0.1, listen=False)


def test_a_scheduled_job_runs_when_it_is_due(database: Database, client: awa.Client) -> None:
    started: list[datetime] = []
    due = datetime.now(UTC) + timedelta(seconds=1)
    job_id = client.insert_job("k", run_at=due).job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, {"k": lambda: started.append(datetime.now(UTC))}, scenario)
    assert timedelta(0) <= started[0] - due < timedelta(seconds=2)


# Start


def test_a_worker_needs_the_schema_it_was_made_for(
    database: Database, empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(worker: awa.Worker) -> None:
        pytest.fail("started")

    with pytest.raises(awa.VersionMismatch, match='no awa in schema "awa"'):
        work(empty_database, {"k": print_nothing}, nothing)
    monkeypatch.setattr("awa._version.SCHEMA_VERSION", 1_000_000)
    with pytest.raises(awa.VersionMismatch, match="this client needs 1000000"):
        work(database, {"k": print_nothing}, nothing)


def print_nothing() -> None:
    """Do nothing."""


def test_queues_are_given_in_three_ways() -> None:
    handlers = awa.Handlers()
    handlers.task(queue="a")(print_nothing)
    assert awa.Worker("", handlers).queues == {"a": 50}
    assert awa.Worker("", handlers, queues=3).queues == {"a": 3}
    assert awa.Worker("", handlers, queues=["x", "y"]).queues == {"x": 50, "y": 50}
    assert awa.Worker("", handlers, queues={"x": 1}).queues == {"x": 1}
    with pytest.raises(ValueError, match='queue "x" needs at least one slot'):
        awa.Worker("", handlers, queues={"x": 0})
    with pytest.raises(TypeError, match="not the string"):
        awa.Worker("", handlers, queues="default")


def test_the_database_knows_the_worker(
    database: Database, client: awa.Client, conn: psycopg.Connection
) -> None:
    async def scenario(worker: awa.Worker) -> None:
        row = conn.execute(
            "SELECT count(*) FROM awa.instances AS i WHERE to_jsonb(i) @> %s",
            [Jsonb({"instance_id": str(worker.instance_id)})],
        ).fetchone()
        assert row == (1,)
        await until(lambda: worker.is_ready)

    worker = work(database, {"k": print_nothing}, scenario)
    assert not worker.is_ready


def test_a_worker_that_can_store_no_results_stops(
    database: Database, client: awa.Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.insert_job("print_nothing")

    async def scenario() -> int:
        worker = awa.Worker(database.dsn, {"print_nothing": print_nothing})
        worker.finisher._flush_completions = None  # type: ignore[assignment, method-assign]
        return await asyncio.wait_for(worker.run(), 20)

    assert asyncio.run(scenario()) == 1
    assert "the worker is broken and stops" in caplog.text


def test_whatever_a_handler_raises_or_returns_its_job_ends_and_its_slot_is_free(
    database: Database, client: awa.Client
) -> None:
    class NoMessage(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no message")

    class NoDump:
        def model_dump(self, mode: str) -> object:
            raise KeyError(mode)

    async def later() -> None:
        await asyncio.sleep(0)

    raised: dict[str, Callable[[], BaseException]] = {
        "no message": NoMessage,
        "outcome": Outcome,
        "generator exit": GeneratorExit,
        "base": BaseException,
        "exit": SystemExit,
        "cancelled": asyncio.CancelledError,
        "stop": StopIteration,
    }
    returned: dict[str, Callable[[], object]] = {
        "no dump": NoDump,
        "base outcome": Outcome,
        "outcome class": lambda: awa.Snooze,
        "coroutine": later,
        "nan": lambda: float("nan"),
        "too long": lambda: "x" * 2_000_000,
        "far too long": lambda: "x" * 80_000_000,
    }
    handlers = awa.Handlers()

    def act(name: str) -> object:
        if name in raised:
            raise raised[name]()
        return returned[name]()

    @handlers.task(keep_result=True)
    def in_thread(name: str) -> object:
        return act(name)

    @handlers.task(keep_result=True)
    async def at_once(name: str) -> object:
        return act(name)

    @handlers.task(keep_result=True)
    async def after_a_wait(name: str) -> object:
        await asyncio.sleep(0.001)
        return act(name)

    ids = {
        (task.kind, name): task.options(max_attempts=1).insert(client, name).job_id
        for task in (in_thread, at_once, after_a_wait)
        for name in (*raised, *returned)
    }

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, *ids.values()))
        await until(lambda: not worker.running and not len(worker.holds))

    # Fewer slots than jobs: none may be lost.
    work(database, handlers, scenario, queues=2)
    infos = {key: client.job(job_id) for key, job_id in ids.items()}
    assert {info.state for info in infos.values()} == {"failed"}
    assert "NoMessage" in infos["at_once", "no message"].errors[0]["error"]
    assert "coroutine" in infos["in_thread", "coroutine"].errors[0]["error"]


def test_a_job_does_not_fail_for_a_result_that_nobody_asked_for(
    database: Database, client: awa.Client
) -> None:
    async def long_result() -> str:
        return "x" * 2_000_000

    job_id = client.insert_job("long_result").job_id

    async def scenario(worker: awa.Worker) -> None:
        await until(ended(client, job_id))

    work(database, {"long_result": long_result}, scenario)
    assert client.job(job_id).state == "completed"


def test_a_thread_that_ends_after_its_worker_reports_its_outcome(
    database: Database, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    release = threading.Event()
    running = threading.Semaphore(0)

    def wait() -> None:
        running.release()
        release.wait(20)

    @handlers.task()
    def snoozes() -> awa.Snooze:
        wait()
        return awa.Snooze(3600)

    @handlers.task()
    def fails() -> None:
        wait()
        raise awa.Fail("hopeless")

    @handlers.task(completes_itself=True)
    def forgets() -> None:
        wait()

    ids = [task.insert(client).job_id for task in (snoozes, fails, forgets)]

    async def scenario(worker: awa.Worker) -> None:
        for _ in ids:
            await asyncio.to_thread(running.acquire)

    worker = work(database, handlers, scenario, grace=0.1)
    release.set()
    asyncio.run(worker.heartbeat.ended(10))
    assert [client.job(job_id).state for job_id in ids] == ["scheduled", "failed", "retryable"]


def test_a_host_that_is_cancelled_twice_leaves_nothing_behind(
    database: Database, client: awa.Client
) -> None:
    async def forever() -> None:
        await asyncio.sleep(3600)

    job_id = client.insert_job("forever").job_id

    async def host() -> None:
        async with awa.Worker(database.dsn, {"forever": forever}):
            await asyncio.sleep(3600)

    async def run() -> None:
        hosting = asyncio.create_task(host())
        await until(lambda: client.job(job_id).state == "running")
        hosting.cancel()
        await asyncio.sleep(0.1)
        hosting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(hosting, 10)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("awa")]

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name == "awa heartbeat"]
    assert client.job(job_id).state == "retryable"


def test_maintenance_makes_every_step_in_its_order(conn: psycopg.Connection) -> None:
    [[steps]] = conn.execute("SELECT awa._tick_steps()").fetchall()
    assert list(STEPS) == [step for step in steps if step != "promote"]


def test_maintenance_that_gets_no_answer_does_not_keep_the_worker() -> None:
    async def run() -> None:
        settings = SessionSettings("", "awa")
        maintenance = Maintenance(settings, "awa", Outage())

        async def no_answer(step: str) -> int:
            await asyncio.sleep(3600)
            return 0

        maintenance._step = no_answer  # type: ignore[method-assign]
        maintenance.start()
        await asyncio.sleep(0)
        await asyncio.wait_for(maintenance.close(), 10)

    asyncio.run(run())


def test_a_handler_that_refuses_to_stop_does_not_keep_the_worker(
    database: Database, client: awa.Client
) -> None:
    started = asyncio.Event()
    release = asyncio.Event()

    async def stubborn() -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    client.insert_job("stubborn")

    async def run() -> None:
        start = time.monotonic()
        async with awa.Worker(database.dsn, {"stubborn": stubborn}) as worker:
            await started.wait()
            worker.stop(grace=0)
        assert time.monotonic() - start < 10
        release.set()

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1])
def test_times_that_cannot_be_waited_for_are_refused(seconds: float) -> None:
    handlers = awa.Handlers()
    for option in ("grace", "poll_interval"):
        with pytest.raises(ValueError, match=f"{option} takes a finite number"):
            awa.Worker("", handlers, **{option: seconds})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grace takes a finite number"):
        awa.Worker("", handlers).stop(grace=seconds)


@pytest.mark.parametrize("queue", ["", "a\nb", "\x9b", "x" * 201])
def test_a_queue_that_cannot_be_is_refused(queue: str) -> None:
    with pytest.raises(awa.InvalidArgument, match="is not a name"):
        awa.Worker("", awa.Handlers(), queues={"default": 1, queue: 1})
