"""The queue that everybody writes first: one table, SELECT ... FOR UPDATE SKIP LOCKED, DELETE."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from psycopg.types.string import ByteaBinaryLoader

DDL = """
    CREATE TABLE naive_jobs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, args jsonb NOT NULL)
"""
INSERT = "INSERT INTO naive_jobs (args) VALUES (%s::jsonb)"
INSERT_MANY = "INSERT INTO naive_jobs (args) SELECT unnest(%s::jsonb[])"
TAKE = "SELECT id, args FROM naive_jobs ORDER BY id FOR UPDATE SKIP LOCKED LIMIT %s"
DELETE = "DELETE FROM naive_jobs WHERE id = ANY (%s)"
BATCH = 100

Row = tuple[int, bytes]
Handler = Callable[[Row], Awaitable[None]]


class NaiveWorker:
    """Takes jobs in batches and calls the handler once a job, all in the batch's transaction.

    As fast as it gets in psycopg: prepared statements, binary rows, arguments left undecoded, and
    the end of one transaction in the same round trip as the beginning of the next.
    """

    def __init__(self, dsn: str, handler: Handler, *, poll_seconds: float) -> None:
        self._dsn = dsn
        self._handler = handler
        self._poll_seconds = poll_seconds
        self.stopping = False

    async def run(self) -> None:
        """Work until `stopping`, and the batch at hand is done."""
        async with await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, prepare_threshold=0
        ) as conn:
            conn.adapters.register_loader("jsonb", ByteaBinaryLoader)
            done: list[int] = []
            while not self.stopping or done:
                rows = await self._next_batch(conn, done)
                for row in rows:
                    await self._handler(row)
                done = [row[0] for row in rows]
                if not done and not self.stopping:
                    await asyncio.sleep(self._poll_seconds)

    async def _next_batch(self, conn: psycopg.AsyncConnection[Any], done: list[int]) -> list[Row]:
        """End the transaction of the batch that is done, begin the next one."""
        async with conn.pipeline(), conn.cursor(binary=True) as cursor:
            if done:
                await conn.execute(DELETE, [done])
                await conn.execute("COMMIT")
            if self.stopping:
                return []
            await conn.execute("BEGIN")
            await cursor.execute(TAKE, [BATCH])
            rows: list[Row] = await cursor.fetchall()
            if not rows:
                await conn.execute("COMMIT")
            return rows
