"""User code that mypy checks: what is written here must be accepted, and typed as it says."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_type

import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import awa

handlers = awa.Handlers()


@dataclass
class Address:
    street: str
    zip_code: str


@handlers.task(queue="mail", max_attempts=5, retry=awa.Exponential(cap_seconds=600))
async def send_email(job: awa.Job, to: str, subject: str = "hello") -> None:
    await job.set_progress({"sent": 1})


@handlers.task(retry=[1, 5, 30], never_retry=[ValueError], unique={"by": ["args.items"]})
def ship(address: Address, items: list[int]) -> awa.Snooze | None:
    return awa.Snooze(10) if not items else None


@handlers.task(completes_itself=True)
async def charge(job: awa.Job, amount: int) -> None:
    async with await psycopg.AsyncConnection.connect("") as conn:
        receipt = await job.complete(conn)
        assert_type(receipt, awa.FinalizationReceipt)


@handlers.task(kind="anything")
async def takes_the_job(job: awa.Job) -> None:
    print(job.args)


async def log_context(job: awa.Job, call_next: awa.CallNext) -> Any:
    return await call_next(job)


def enqueue(conn: psycopg.Connection) -> None:
    result = send_email.insert(conn, "someone@example.org", subject="hi")
    assert_type(result, awa.InsertResult)
    ship.options(priority=1, run_at=datetime.now(UTC)).insert(
        awa.Client(conn), Address("Road 1", "1000"), items=[1, 2]
    )
    takes_the_job.insert(conn, anything="goes")
    awa.Client(conn).insert_jobs([ship.item(Address("Road 2", "2000"), [3]), charge.item(5)])
    # Wrong calls must be found by the type checker: an unused ignore is an error.
    send_email.insert(conn, 5)  # type: ignore[call-overload]
    send_email.insert(conn, "someone@example.org", subjekt="hi")  # type: ignore[call-overload]


async def enqueue_async(conn: psycopg.AsyncConnection) -> None:
    pending = assert_type(
        send_email.insert(conn, to="someone@example.org"), Coroutine[Any, Any, awa.InsertResult]
    )
    assert_type(await pending, awa.InsertResult)
    client = awa.AsyncClient(conn)
    assert_type(await client.insert_many("ship", [{}]), list[int])
    assert_type((await client.wait(1, timeout=5)).state, str)


def enqueue_with_sqlalchemy(session: Session, conn: sqlalchemy.Connection) -> None:
    assert_type(awa.Client(session).insert_job("k"), awa.InsertResult)
    assert_type(send_email.insert(conn, "someone@example.org"), awa.InsertResult)


async def complete_with_sqlalchemy(job: awa.Job, session: AsyncSession) -> None:
    client = awa.AsyncClient(session)
    assert_type(await client.insert_job("k"), awa.InsertResult)
    assert_type(await job.complete(session), awa.FinalizationReceipt)
    # A connection of the other kind is found by the type checker as well.
    awa.Client(session)  # type: ignore[arg-type]


async def embedded() -> None:
    more = awa.Handlers({"plain": print})
    async with awa.Worker("", handlers | more, queues=["mail"], middleware=[log_context]) as worker:
        assert_type(worker.is_ready, bool)


def main() -> int:
    return awa.run(handlers, dsn="postgresql:///app", queues={"mail": 5}, grace=10)
