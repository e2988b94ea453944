"""A worker in a process of its own, for tests that send signals: DSN, grace and options as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import sys
import threading
import time
from pathlib import Path

import psycopg
from psycopg_pool import ConnectionPool

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
def take_the_pool(job: awa.Job, seconds: float) -> None:
    """Keep every connection of the application's pool."""
    with ConnectionPool(DSN, min_size=4, max_size=4) as pool, contextlib.ExitStack() as taken:
        for _ in range(4):
            taken.enter_context(pool.connection())
        record(job, "start")
        time.sleep(seconds)
        record(job, "end")


@handlers.task()
def hold_the_gil(job: awa.Job, until: str) -> None:
    """Call C code that lets no other thread run until a file exists, and look at the lease."""
    record(job, "start")
    if job.attempt == 1:
        command = f"until test -e {until}; do sleep 0.05; done"
        ctypes.PyDLL(None).system(command.encode())
        look_at_the_lease(job)
    record(job, "end")


@handlers.task()
def wait_for_file(job: awa.Job, until: str) -> None:
    """Wait for a file, and look at the lease."""
    record(job, "start")
    if job.attempt == 1:
        while not Path(until).exists():
            time.sleep(0.01)
        look_at_the_lease(job)
    record(job, "end")


def look_at_the_lease(job: awa.Job) -> None:
    """Ask the database by a call, and then the flag."""
    if not job.set_progress({"late": True}):
        record(job, "not current")
    if job.lease_lost:
        record(job, "lease lost")


@handlers.task()
async def quick(job: awa.Job) -> None:
    """Mark and end."""
    await asyncio.sleep(0.001)
    await asyncio.to_thread(record, job, "end")


@handlers.task()
async def fail_once(job: awa.Job) -> None:
    """Need a second attempt."""
    await asyncio.to_thread(record, job, "start")
    if job.attempt == 1:
        raise ValueError("once")


@handlers.task()
async def tell_the_time(job: awa.Job) -> None:
    """Say what this process takes for the time."""
    await asyncio.to_thread(record, job, f"time {time.time()}")


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
