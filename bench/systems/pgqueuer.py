"""pgqueuer: lists to enqueue(), an asyncpg pool and large batches for the worker."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import logging
from collections.abc import Sequence
from typing import Any

from bench.systems.protocol import Adapter, Args, Handler, serve, wait_until_empty

asyncpg: Any = importlib.import_module("asyncpg")
pgqueuer: Any = importlib.import_module("pgqueuer")

KIND = "noop"
BATCH = 500
IS_BUSY = "SELECT EXISTS (SELECT FROM pgqueuer WHERE status IN ('queued', 'picked'))"


class PgQueuer(Adapter):
    name = "pgqueuer"

    def __init__(self) -> None:
        self._queries: Any = None
        self._pool: Any = None
        self._worker: Any = None
        self._running: asyncio.Task[None] | None = None

    def settings(self) -> dict[str, str | int | float]:
        return {
            "version": importlib.metadata.version("pgqueuer"),
            "driver": "asyncpg",
            "batch_size": BATCH,
        }

    async def install(self, dsn: str) -> None:
        conn = await asyncpg.connect(dsn)
        await pgqueuer.Queries(pgqueuer.AsyncpgDriver(conn)).install()
        await conn.close()

    async def connect(self, dsn: str) -> None:
        conn = await asyncpg.connect(dsn)
        self._queries = pgqueuer.Queries(pgqueuer.AsyncpgDriver(conn))

    async def insert(self, jobs: Sequence[Args]) -> None:
        if len(jobs) == 1:
            await self._queries.enqueue(KIND, json.dumps(jobs[0]).encode())
        else:
            payloads = [json.dumps(args).encode() for args in jobs]
            await self._queries.enqueue([KIND] * len(jobs), payloads, [0] * len(jobs))

    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        logging.getLogger("pgqueuer").setLevel(logging.CRITICAL)
        self._pool = await asyncpg.create_pool(dsn, min_size=4, max_size=4)
        self._worker = pgqueuer.PgQueuer.from_asyncpg_pool(self._pool)
        register = self._worker.entrypoint(
            KIND, accepts_context=False, concurrency_limit=concurrency
        )
        register(handler)
        self._running = asyncio.create_task(self._worker.qm.run(batch_size=concurrency or BATCH))

    async def settle(self) -> None:
        async def is_busy() -> bool:
            return bool(await self._pool.fetchval(IS_BUSY))

        await wait_until_empty(is_busy)

    async def stop(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            self._worker.shutdown.set()
            await running
            await self._pool.close()

    def args(self, job: Any) -> Args:
        args: Args = json.loads(job.payload)
        return args


if __name__ == "__main__":
    serve(PgQueuer())
