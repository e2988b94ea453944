"""This project: its worker, and its producer functions called by SQL."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import psycopg

import awa
from bench.calls import INSERT_JOB, INSERT_MANY
from bench.cluster import TEMPLATE_SCRIPT, connect
from bench.jobs import KIND, QUEUE
from bench.systems.protocol import Adapter, Args, Handler, serve

CONCURRENCY = 1_000
HELD_QUEUE = "held"
INSERT_INTO = INSERT_MANY.replace("kind => %s", f"queue => '{HELD_QUEUE}', kind => %s")


class TimedWorker(awa.Worker):
    """Remembers how long the claims took that found jobs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.claim_times: list[float] = []

    async def claim(self, queue: str, most: int, wake_others: bool) -> list[Any]:
        start = time.perf_counter()
        rows = await super().claim(queue, most, wake_others)
        if rows:
            self.claim_times.append((time.perf_counter() - start) * 1e3)
        return rows


class Awa(Adapter):
    name = "awa"

    def __init__(self) -> None:
        self._conn: psycopg.Connection[Any] | None = None
        self._worker: TimedWorker | None = None

    def settings(self) -> dict[str, str | int | float]:
        return {
            "version": awa.__version__,
            "concurrency": CONCURRENCY,
            "batch": min(CONCURRENCY, awa.worker.BATCH),
        }

    async def install(self, dsn: str) -> None:
        with connect(dsn) as conn:
            conn.execute(TEMPLATE_SCRIPT.read_bytes(), prepare=False)

    async def connect(self, dsn: str) -> None:
        self._conn = connect(dsn)

    async def insert(self, jobs: Sequence[Args]) -> None:
        assert self._conn is not None
        if len(jobs) == 1:
            self._conn.execute(INSERT_JOB, [KIND, json.dumps(jobs[0])])
        else:
            self._conn.execute(INSERT_MANY, [KIND, [json.dumps(args) for args in jobs]])

    async def backlog(self, jobs: Sequence[Args]) -> None:
        assert self._conn is not None
        self._conn.execute("SELECT awa.pause_queue(%s)", [HELD_QUEUE])
        self._conn.execute(INSERT_INTO, [KIND, [json.dumps(args) for args in jobs]])

    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        async def run(job: awa.Job) -> None:  # the annotation asks for the job, not its arguments
            await handler(job)

        queues = {QUEUE: concurrency or CONCURRENCY}
        self._worker = await TimedWorker(dsn, {KIND: run}, queues=queues).__aenter__()

    async def stop(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.__aexit__(None, None, None)

    def claim_times(self) -> list[float]:
        if self._worker is None:
            return []
        times, self._worker.claim_times = self._worker.claim_times, []
        return times

    def args(self, job: Any) -> Args:
        args: Args = job.args
        return args

    def attempt(self, job: Any) -> int:
        return int(job.attempt)


if __name__ == "__main__":
    serve(Awa())
