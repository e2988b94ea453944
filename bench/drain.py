"""Drain: no-op jobs preloaded, one worker process, jobs a second from its start to its end."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import awa
from bench import naive
from bench.calls import INSERT_MANY
from bench.child import Child, wait_for_end
from bench.cluster import Server, connect, server
from bench.jobs import KIND, QUEUE, args_text
from bench.report import Report, say

LOAD_BATCH = 1_000
MOST_SECONDS = 600
LEAST_RATIO = 1.0


class NoOp:
    """The handler of both systems: does nothing but count, to tell when all jobs were run."""

    def __init__(self, jobs: int) -> None:
        self._left = jobs
        self.all_done = asyncio.Event()

    async def run(self, job: object) -> None:
        self._left -= 1
        if not self._left:
            self.all_done.set()


# ---- the worker processes


def awa_worker(pipe: Pipe, dsn: str, jobs: int, concurrency: int) -> None:
    """Drain with this package's worker."""

    async def drain() -> None:
        handler = NoOp(jobs)

        async def noop(job: awa.Job) -> None:
            await handler.run(job)

        async with awa.Worker(dsn, {KIND: noop}, queues={QUEUE: concurrency}):
            await handler.all_done.wait()

    send_seconds(pipe, drain)


def naive_worker(pipe: Pipe, dsn: str, jobs: int) -> None:
    """Drain the naive queue."""

    async def drain() -> None:
        handler = NoOp(jobs)
        worker = naive.NaiveWorker(dsn, handler.run, poll_seconds=0.01)
        running = asyncio.create_task(worker.run())
        await handler.all_done.wait()
        worker.stopping = True
        await running

    send_seconds(pipe, drain)


def send_seconds(pipe: Pipe, drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Time a drain: from before the worker connects until every result is committed."""
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    asyncio.run(drain())
    pipe.send(time.perf_counter() - start)
    wait_for_end(pipe)


# ---- the rounds


def batches(jobs: int) -> Iterator[list[str]]:
    """The arguments of all jobs, in lists for one insert each."""
    for first in range(0, jobs, LOAD_BATCH):
        yield [args_text(i) for i in range(first, min(first + LOAD_BATCH, jobs))]


@contextmanager
def loaded_awa(server: Server, jobs: int) -> Iterator[str]:
    """A database whose queue holds the jobs."""
    with server.awa_database() as dsn:
        with connect(dsn) as conn:
            for args in batches(jobs):
                conn.execute(INSERT_MANY, [KIND, args])
            settle(conn)
        yield dsn


@contextmanager
def loaded_naive(server: Server, jobs: int) -> Iterator[str]:
    """A database whose naive table holds the jobs."""
    with server.database(naive.DDL) as dsn:
        with connect(dsn) as conn:
            for args in batches(jobs):
                conn.execute(naive.INSERT_MANY, [args])
            settle(conn)
        yield dsn


def settle(conn: Any) -> None:
    """Leave no work of the load to the drain; both systems start with statistics."""
    conn.execute("VACUUM ANALYZE")
    conn.execute("CHECKPOINT")


def jobs_per_second(worker: Callable[..., None], dsn: str, jobs: int, *options: int) -> float:
    """One drain by one worker process."""
    with Child(worker, dsn, jobs, *options) as child:
        child.pipe.send("go")
        seconds: float = child.receive(MOST_SECONDS)
    return jobs / seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.drain", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=1000, help="of the awa worker")
    parser.add_argument("--check", action="store_true", help="fail when slower than naive")
    options = parser.parse_args()
    report = Report("drain")
    rates: dict[str, list[float]] = {"awa": [], "naive": []}
    with server() as running:
        for number in range(1, options.rounds + 1):
            with loaded_awa(running, options.jobs) as dsn:
                rates["awa"].append(
                    jobs_per_second(awa_worker, dsn, options.jobs, options.concurrency)
                )
            with loaded_naive(running, options.jobs) as dsn:
                rates["naive"].append(jobs_per_second(naive_worker, dsn, options.jobs))
            say(
                ", ".join(f"{name} {r[-1]:,.0f} jobs/s" for name, r in rates.items())
                + f" (round {number})"
            )
    params = {"jobs": options.jobs, "rounds": options.rounds}
    ours, theirs = median(rates["awa"]), median(rates["naive"])
    report.figure(
        "awa",
        "jobs_per_s",
        ours,
        "jobs/s",
        **params,
        concurrency=options.concurrency,
        batch=min(options.concurrency, awa.worker.BATCH),
    )
    report.figure(
        "naive", "jobs_per_s", theirs, "jobs/s", **params, concurrency=1, batch=naive.BATCH
    )
    report.limit(
        "drain, times naive", ours / theirs, f">= {LEAST_RATIO}", ours >= LEAST_RATIO * theirs
    )
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
