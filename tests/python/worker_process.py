"""A worker in a process of its own, for tests that send signals: DSN, grace and options as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time

import psycopg

import awa

DSN = sys.argv[1]
OPTIONS = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}

local = threading.local()


def record(job: awa.Job, event: str) -> None:
    """Leave a mark in the application's table."""
    if not hasattr(local, "conn"):
        local.conn = psycopg.connect(DSN, autocommit=True)
    local.conn.execute(
        "INSERT INTO marks (job_id, attempt, event) VALUES (%s, %s, %s)",
        [job.id, job.attempt, event],
    )


handlers = awa.Handlers()


@handlers.task()
async def async_sleep(job: awa.Job, seconds: float) -> None:
    """Sleep in the event loop."""
    await asyncio.to_thread(record, job, "start")
    await asyncio.sleep(seconds)
    await asyncio.to_thread(record, job, "end")


@handlers.task()
def thread_sleep(job: awa.Job, seconds: float) -> None:
    """Sleep in a thread."""
    record(job, "start")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if job.is_cancelled():
            record(job, "cancelled")
            return
        time.sleep(0.01)
    record(job, "end")


@handlers.task()
async def block_the_loop(job: awa.Job, seconds: float) -> None:
    """What no async handler should do."""
    record(job, "start")
    time.sleep(seconds)
    record(job, "end")


@handlers.task()
def compute(job: awa.Job, seconds: float) -> None:
    """Keep the interpreter busy without ever waiting."""
    record(job, "start")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    record(job, "end")


@handlers.task()
async def quick(job: awa.Job) -> None:
    """Mark and end."""
    await asyncio.sleep(0.001)
    await asyncio.to_thread(record, job, "end")


@handlers.task()
async def stubborn(job: awa.Job) -> None:
    """Refuse to be cancelled."""
    await asyncio.to_thread(record, job, "start")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@handlers.task()
async def hang_in_a_thread(job: awa.Job) -> None:
    """Wait for a thread that does not come back."""
    await asyncio.to_thread(record, job, "start")
    await asyncio.to_thread(time.sleep, 600)


@handlers.task(timeout=0.1, max_attempts=1)
async def give_up_a_thread(job: awa.Job) -> None:
    """Time out while the thread goes on."""
    await asyncio.to_thread(time.sleep, 600)


def interrupt() -> None:
    """Raise what Ctrl-C raises, without a Ctrl-C."""
    raise KeyboardInterrupt


@handlers.task()
async def interrupted(by: str) -> None:
    """Raise KeyboardInterrupt in one of the places where a handler runs."""
    if by == "wait":
        await asyncio.sleep(0.001)
    if by == "thread":
        await asyncio.to_thread(interrupt)
    interrupt()


if __name__ == "__main__":
    sys.exit(awa.run(handlers, dsn=DSN, **OPTIONS))
