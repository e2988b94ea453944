"""The jobs of the soak: what options they have, what handlers do, how each must end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psycopg

import awa
from bench.child import wait_for_end
from bench.cluster import Connection, connect

QUEUES = {
    "soak": {"enqueue_shards": 2},
    "soak_fifo": {"strict_fifo": True},
    "soak_dead": {"dlq": True},
    "soak_plain": {},
}
HELD_QUEUE = "soak_held"
HOLD = "hold"
# By kind: how often, and how the job must end.
ENDS = {
    "succeed": (30, "completed"),
    "result": (8, "completed"),
    "retry": (12, "completed"),
    "later": (10, "completed"),
    "snooze": (5, "completed"),
    "progress": (5, "completed"),
    "own": (8, "completed"),
    "overdue": (1, "completed"),
    "fail": (6, "failed"),
    "exhaust": (5, "failed"),
    "cancel": (5, "cancelled"),
    "revoke": (5, "cancelled"),
}
DEAD = "dead_lettered"
ROLLBACK_SHARE = 0.2
MOST_JOBS = 10  # of one transaction
CONCURRENCY = 20

INSERT_JOBS = "SELECT job_id FROM awa.insert_jobs(%s::jsonb)"
INSERT_JOB = """
    SELECT job_id FROM awa.insert_job(
        kind => %s, args => %s::jsonb, queue => %s, priority => %s, max_attempts => %s, opts => %s)
"""
INSERT_MANY = "SELECT i FROM awa.insert_many(kind => %s, args => %s::jsonb[], queue => %s) i"
CANCEL = "SELECT awa.cancel_job(%s, 'revoked')"


@dataclass
class Ledger:
    """What a producer knows: its jobs by number, and those that it took back."""

    expected: dict[int, tuple[int, str]] = field(default_factory=dict)  # number: job id, end
    rolled_back: set[int] = field(default_factory=set)
    revoked: set[int] = field(default_factory=set)


# ---- the producer


def new_job(number: int) -> dict[str, Any]:
    """A job with random options, as insert_jobs takes it."""
    kind = random.choices(list(ENDS), [weight for weight, _ in ENDS.values()])[0]
    opts: dict[str, Any] = {"backoff": {"delays": [0.1, 0.5]}}
    if random.random() < 0.3:
        opts |= {"tags": ["soak", kind], "metadata": {"number": number}, "trace": f"00-{number}"}
    if random.random() < 0.3:
        opts["ordering_key"] = f"key {number % 50}"
    if random.random() < 0.1:
        opts["deadline_seconds"] = 3_600
    own: dict[str, dict[str, Any]] = {
        "result": {"keep_result": True},
        "later": {"delay_seconds": random.uniform(0, 3)},
        "revoke": {"delay_seconds": 3_600},
        "overdue": {"deadline_seconds": 0.5},
    }
    opts |= own.get(kind, {})
    return {
        "kind": kind,
        "args": {"number": number},
        "queue": random.choice(list(QUEUES)),
        "priority": random.randint(1, 4),
        "max_attempts": 2 if kind == "exhaust" else 25,
        "opts": opts,
    }


def end_of(job: dict[str, Any]) -> str:
    """How a job must end."""
    _, end = ENDS[job["kind"]]
    return DEAD if end == "failed" and job["queue"] == "soak_dead" else end


def insert(conn: Connection, jobs: list[dict[str, Any]]) -> list[int]:
    """Enqueue jobs by one of the three functions; their ids."""
    if len(jobs) == 1:
        job = jobs[0]
        values = [json.dumps(job["args"]), job["queue"], job["priority"], job["max_attempts"]]
        rows: list[Any] = conn.execute(
            INSERT_JOB, [job["kind"], *values, json.dumps(job["opts"])]
        ).fetchall()
    elif random.random() < 0.3:
        for job in jobs:
            job |= {"kind": "succeed", "queue": jobs[0]["queue"]}
        args = [json.dumps(job["args"]) for job in jobs]
        rows = conn.execute(INSERT_MANY, ["succeed", args, jobs[0]["queue"]]).fetchall()
    else:
        rows = conn.execute(INSERT_JOBS, [json.dumps(jobs)]).fetchall()
    return [row[0] for row in rows]


def produce(pipe: Pipe, dsn: str, first: int, rate: float) -> None:
    """Enqueue at about a rate until told to stop; send the ledger."""
    ledger = Ledger()
    number, start = first, time.monotonic()
    with connect(dsn) as conn:
        pipe.send("ready")
        while not pipe.poll(max(0.0, start + (number - first) / rate - time.monotonic())):
            count = random.randint(1, MOST_JOBS)
            jobs = [new_job(n) for n in range(number, number + count)]
            number += count
            is_kept = random.random() >= ROLLBACK_SHARE
            with conn.transaction(force_rollback=not is_kept):
                ids = insert(conn, jobs)
            for job, job_id in zip(jobs, ids, strict=True):
                if is_kept:
                    ledger.expected[job["args"]["number"]] = (job_id, end_of(job))
                    if job["kind"] == "revoke":
                        conn.execute(CANCEL, [job_id])
                        ledger.revoked.add(job["args"]["number"])
                else:
                    ledger.rolled_back.add(job["args"]["number"])
    pipe.recv()
    pipe.send(ledger)
    wait_for_end(pipe)


# ---- the worker


def make_handlers(dsn: str, journal: int, released: asyncio.Event) -> awa.Handlers:
    """The handlers; each leaves a line in the journal, which survives a kill."""
    handlers = awa.Handlers()

    def note(job: awa.Job) -> bool:
        """Whether this is the first attempt."""
        os.write(journal, f"{job.args.get('number', 0)} {job.kind}\n".encode())
        return job.attempt == 1

    async def succeed(job: awa.Job) -> None:
        note(job)

    async def result(job: awa.Job) -> dict[str, int]:
        note(job)
        return {"attempt": job.attempt}

    async def retry(job: awa.Job) -> None:
        if note(job):
            raise RuntimeError("the first attempt fails")

    async def snooze(job: awa.Job) -> None:
        note(job)
        if job.run_lease == 1:
            raise awa.Snooze(0.5)

    async def progress(job: awa.Job) -> None:
        if note(job):
            await job.set_progress({"half": True})
            raise awa.RetryAfter(0.2)

    async def own(job: awa.Job) -> None:
        note(job)
        async with await awa_connection(dsn) as conn, conn.transaction():
            await conn.execute("INSERT INTO soak_rows VALUES (%s)", [job.args["number"]])
            await job.complete(conn)

    async def overdue(job: awa.Job) -> None:
        if note(job):
            await asyncio.sleep(4)

    async def fail(job: awa.Job) -> None:
        note(job)
        raise awa.Fail("as planned")

    async def exhaust(job: awa.Job) -> None:
        note(job)
        raise RuntimeError("every attempt fails")

    async def cancel(job: awa.Job) -> None:
        note(job)
        raise awa.Cancel("as planned")

    async def hold(job: awa.Job) -> None:
        note(job)
        await released.wait()

    for handler in (succeed, result, retry, snooze, progress, overdue, fail, exhaust, cancel, hold):
        handlers.add(handler.__name__, handler)
    handlers.add("later", succeed)
    handlers.add("revoke", succeed)
    handlers.task(kind="own", completes_itself=True)(own)
    return handlers


async def awa_connection(dsn: str) -> Any:
    """A connection of the application."""
    return await psycopg.AsyncConnection.connect(dsn, autocommit=True)


def work(pipe: Pipe, dsn: str, journal_path: str) -> None:
    """Run a worker until told to stop."""
    logging.getLogger("awa").setLevel(logging.CRITICAL)  # handlers fail on purpose
    journal = os.open(journal_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def serve() -> None:
        released = asyncio.Event()
        handlers = make_handlers(dsn, journal, released)
        queues = dict.fromkeys(QUEUES, CONCURRENCY)
        async with awa.Worker(dsn, handlers, queues=queues):
            pipe.send("ready")
            await asyncio.to_thread(wait_for_end, pipe)
            released.set()

    asyncio.run(serve())


def tick(pipe: Pipe, dsn: str) -> None:
    """Run maintenance until told to stop."""
    with connect(dsn) as conn:
        pipe.send("ready")
        while not pipe.poll(random.uniform(0.2, 0.6)):
            conn.execute("SELECT * FROM awa.tick()")
    wait_for_end(pipe)
