"""The queue that everybody writes first: one table, SELECT ... FOR UPDATE SKIP LOCKED, DELETE."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from psycopg.types.string import ByteaBinaryLoader

DDL = """
    CREATE TABLE naive_jobs (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        args jsonb NOT NULL
    )
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

    Nothing is wasted: statements are prepared, rows come in binary, and as in our own worker
    arguments are left undecoded until the handler wants them.
    """

    def __init__(self, dsn: str, handler: Handler, *, poll_seconds: float) -> None:
        self._dsn = dsn
        self._handler = handler
        self._poll_seconds = poll_seconds
        self.stopping = False

    async def run(self) -> None:
        """Work until `stopping`; the batch at hand is finished then."""
        async with await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, prepare_threshold=0
        ) as conn:
            conn.adapters.register_loader("jsonb", ByteaBinaryLoader)
            while not self.stopping:
                if not await self._run_batch(conn):
                    await asyncio.sleep(self._poll_seconds)

    async def _run_batch(self, conn: psycopg.AsyncConnection[Any]) -> int:
        """Take one batch, run and delete it; its size."""
        async with conn.transaction(), conn.cursor(binary=True) as cursor:
            await cursor.execute(TAKE, [BATCH])
            rows: list[Row] = await cursor.fetchall()
            for row in rows:
                await self._handler(row)
            if rows:
                await cursor.execute(DELETE, [[row[0] for row in rows]])
            return len(rows)
