"""awa-pg: COPY for batches, one asyncio worker on its Rust runtime."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from bench.systems.protocol import Adapter, Args, Handler, serve, wait_until_empty

# Imported by name: in this environment `awa` is another package than the one of this project.
awa: Any = importlib.import_module("awa")

QUEUE = "default"
HELD_QUEUE = "held"
CONCURRENCY = 512
CLAIMERS = 2
CLAIM_BATCH = 512
POLL_MS = 50
DEADLINE_MS = 6 * 3600 * 1000
OPEN_STATES = ("available", "running", "scheduled", "retryable")


@dataclasses.dataclass
class Noop:
    """The arguments of a job."""

    i: int
    pad: str
    start: int = 0
    fail: int = 0
    hold: int = 0


class AwaPg(Adapter):
    name = "awa-pg"

    def __init__(self) -> None:
        self._producer: Any = None
        self._worker: Any = None

    def settings(self) -> dict[str, str | int | float]:
        return {
            "version": importlib.metadata.version("awa-pg"),
            "max_workers": CONCURRENCY,
            "claimers": CLAIMERS,
            "claim_batch_size": CLAIM_BATCH,
            "poll_interval_ms": POLL_MS,
        }

    async def install(self, dsn: str) -> None:
        client = awa.AsyncClient(dsn, max_connections=2)
        await client.migrate()
        await client.install_queue_storage()
        await client.close()

    async def connect(self, dsn: str) -> None:
        self._producer = awa.Client(dsn, max_connections=1)

    async def insert(self, jobs: Sequence[Args]) -> None:
        if len(jobs) == 1:
            self._producer.insert(Noop(**jobs[0]), queue=QUEUE)
        else:
            self._producer.enqueue_many_copy([Noop(**args) for args in jobs], queue=QUEUE)

    async def backlog(self, jobs: Sequence[Args]) -> None:
        self._producer.enqueue_many_copy([Noop(**args) for args in jobs], queue=HELD_QUEUE)
        self._producer.pause_queue(HELD_QUEUE)

    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        self._worker = awa.AsyncClient(dsn, max_connections=10)
        self._worker.task(Noop, queue=QUEUE)(handler)
        most = concurrency or CONCURRENCY
        queue = {
            "name": QUEUE,
            "max_workers": most,
            "claimers": CLAIMERS,
            "claim_batch_size": min(most, CLAIM_BATCH),
            "deadline_duration_ms": DEADLINE_MS,
        }
        await self._worker.start([queue], poll_interval_ms=POLL_MS)

    async def settle(self) -> None:
        async def is_busy() -> bool:
            stats = await self._worker.queue_stats()
            return any(s.queue == QUEUE and s.total_queued + s.running for s in stats)

        await wait_until_empty(is_busy)

    async def stop(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.shutdown()
            await worker.close()

    def args(self, job: Any) -> Args:
        return {name: value for name, value in vars(job.args).items() if value}

    def attempt(self, job: Any) -> int:
        return int(job.attempt)


if __name__ == "__main__":
    serve(AwaPg())
