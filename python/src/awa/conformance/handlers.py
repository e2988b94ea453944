"""Handlers of the kinds that the conformance run enqueues, for awa's own worker.

awa conformance --worker 'awa worker awa.conformance.handlers:handlers -q conformance'
"""

from __future__ import annotations

import asyncio
import os

import psycopg

from .. import Cancel, Fail, Handlers, Job, Json, RetryAfter, Snooze

handlers = Handlers()


@handlers.task()
async def conformance_succeed(job: Job) -> None:
    """End at once."""


@handlers.task()
async def conformance_echo(job: Job) -> Json:
    """Return the args."""
    return job.args


@handlers.task()
def conformance_raise(job: Job) -> None:
    """Break."""
    raise RuntimeError("no luck")


@handlers.task()
async def conformance_retry(job: Job) -> RetryAfter:
    """Ask for another attempt at once."""
    return RetryAfter(0, "not yet")


@handlers.task()
async def conformance_snooze(job: Job) -> Snooze:
    """Put off by ten minutes."""
    return Snooze(600)


@handlers.task()
async def conformance_cancel(job: Job) -> Cancel:
    """End as cancelled."""
    return Cancel("not needed")


@handlers.task()
async def conformance_fail(job: Job) -> Fail:
    """End as failed, whatever attempts are left."""
    return Fail("hopeless")


@handlers.task()
async def conformance_sleep(seconds: float) -> None:
    """Take some time."""
    await asyncio.sleep(seconds)


@handlers.task(retry=[0])
async def conformance_progress(job: Job) -> Json:
    """Break once after setting progress, then return what is left of it."""
    if job.attempt == 1:
        await job.set_progress({"step": 1})
        raise RuntimeError("half way")
    return job.progress


@handlers.task(completes_itself=True)
async def conformance_transaction(job: Job, seconds: float) -> None:
    """Write a row and complete in one transaction, some time later."""
    async with await psycopg.AsyncConnection.connect(os.environ["AWA_DSN"]) as conn:
        await conn.execute("INSERT INTO awa_conformance (job_id) VALUES (%s)", [job.id])
        await asyncio.sleep(seconds)
        await job.complete(conn)
