"""procrastinate: batch_defer for batches, an asyncio worker that deletes finished jobs."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import logging
from collections.abc import Sequence
from typing import Any

from bench.systems.protocol import Adapter, Args, Handler, serve, wait_until_empty

procrastinate: Any = importlib.import_module("procrastinate")

CONCURRENCY = 20
POOL_SIZE = 12
IS_BUSY = """
    SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing')) AS busy
"""


class Procrastinate(Adapter):
    name = "procrastinate"

    def __init__(self) -> None:
        self._task: Any = None
        self._app: Any = None
        self._running: asyncio.Task[None] | None = None

    def settings(self) -> dict[str, str | int | float]:
        return {
            "version": importlib.metadata.version("procrastinate"),
            "concurrency": CONCURRENCY,
            "pool_size": POOL_SIZE,
            "delete_jobs": "always",
        }

    async def install(self, dsn: str) -> None:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def connect(self, dsn: str) -> None:
        connector = procrastinate.SyncPsycopgConnector(conninfo=dsn, min_size=1, max_size=1)
        app = procrastinate.App(connector=connector)
        app.open()
        self._task = app.task(name="noop", pass_context=True)(lambda context, **args: None)

    async def insert(self, jobs: Sequence[Args]) -> None:
        if len(jobs) == 1:
            self._task.defer(**jobs[0])
        else:
            self._task.batch_defer(*jobs)

    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        logging.getLogger("procrastinate").setLevel(logging.ERROR)
        connector = procrastinate.PsycopgConnector(
            conninfo=dsn, min_size=POOL_SIZE, max_size=POOL_SIZE
        )
        self._app = procrastinate.App(connector=connector)

        async def run(context: Any, **args: Any) -> None:
            await handler(context.job)

        self._app.task(name="noop", pass_context=True)(run)
        await self._app.open_async()
        self._running = asyncio.create_task(
            self._app.run_worker_async(
                concurrency=concurrency or CONCURRENCY,
                delete_jobs="always",
                install_signal_handlers=False,
            )
        )

    async def settle(self) -> None:
        async def is_busy() -> bool:
            row = await self._app.connector.execute_query_one_async(IS_BUSY)
            return bool(row["busy"])

        await wait_until_empty(is_busy)

    async def stop(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.cancel()
            await asyncio.wait([running])
            await self._app.close_async()

    def args(self, job: Any) -> Args:
        args: Args = job.task_kwargs
        return args

    def attempt(self, job: Any) -> int:
        return int(job.attempts) + 1


if __name__ == "__main__":
    serve(Procrastinate())
