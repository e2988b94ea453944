"""The naive queue of bench/naive.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import psycopg

from bench import naive
from bench.cluster import connect
from bench.systems.protocol import Adapter, Args, Handler, serve

POLL_SECONDS = 0.01


class Naive(Adapter):
    name = "naive"

    def __init__(self) -> None:
        self._conn: psycopg.Connection[Any] | None = None
        self._worker: naive.NaiveWorker | None = None
        self._running: asyncio.Task[None] | None = None

    def settings(self) -> dict[str, str | int | float]:
        return {"batch": naive.BATCH, "poll_ms": POLL_SECONDS * 1_000}

    async def install(self, dsn: str) -> None:
        with connect(dsn) as conn:
            conn.execute(naive.DDL)

    async def connect(self, dsn: str) -> None:
        self._conn = connect(dsn)

    async def insert(self, jobs: Sequence[Args]) -> None:
        assert self._conn is not None
        if len(jobs) == 1:
            self._conn.execute(naive.INSERT, [json.dumps(jobs[0])])
        else:
            self._conn.execute(naive.INSERT_MANY, [[json.dumps(args) for args in jobs]])

    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        self._worker = naive.NaiveWorker(dsn, handler, poll_seconds=POLL_SECONDS)
        self._running = asyncio.create_task(self._worker.run())

    async def stop(self) -> None:
        if self._worker is not None and self._running is not None:
            self._worker.stopping = True
            running, self._running = self._running, None
            await running

    def args(self, job: Any) -> Args:
        args: Args = json.loads(job[1][1:])  # jsonb in binary: a version, then text
        return args


if __name__ == "__main__":
    serve(Naive())
