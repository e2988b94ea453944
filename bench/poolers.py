"""Poolers: from before the enqueue call to the handler, by the way that a worker's DSN leads.

One job at a time, enqueued over a direct connection: soon after the one before, and when the
worker has been idle for more than a second.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe

import awa
from bench.calls import INSERT_JOB
from bench.child import Child, wait_for_end
from bench.cluster import Server, connect, server
from bench.jobs import args_text
from bench.report import Report, percentile, table
from tools.pgbouncer import PgBouncer

MODES = ("session", "transaction")
LOADS = {"trickle": (0.02, 0.04), "idle": (1.1, 1.6)}
WARM_UP = 5
ANSWER_SECONDS = 30

now = time.monotonic_ns  # one clock for all processes of the machine


def worker(pipe: Pipe, dsn: str) -> None:
    """Work, and say when each job was enqueued and when its handler began."""
    logging.disable()

    async def handler(start: int, i: int, pad: str) -> None:
        pipe.send((start, now()))

    async def work() -> None:
        async with awa.Worker(dsn, {"noop": handler}, queues=["default"]):
            pipe.send("ready")
            await asyncio.to_thread(wait_for_end, pipe)

    asyncio.run(work())


def measure(report: Report, running: Server, jobs: dict[str, int]) -> None:
    """Report each way under each load."""
    rows = []
    with ExitStack() as stack:
        workers = {}
        for way in ("direct", *MODES):
            dsn = stack.enter_context(running.awa_database())
            through = dsn
            if way != "direct":
                options = {"default_pool_size": "10"}
                through = stack.enter_context(PgBouncer(running.dsn, way, options)).dsn(dsn)
            conn = stack.enter_context(connect(dsn))
            workers[way] = (conn, stack.enter_context(Child(worker, through)))
        for load, pause in LOADS.items():
            milliseconds: dict[str, list[float]] = {way: [] for way in workers}
            for i in range(WARM_UP + jobs[load]):
                time.sleep(random.uniform(*pause))
                for way, (conn, child) in workers.items():
                    conn.execute(INSERT_JOB, ["noop", args_text(i, start=now())])
                    start, at = child.receive(ANSWER_SECONDS)
                    if i >= WARM_UP:
                        milliseconds[way].append((at - start) / 1e6)
            for way, values in milliseconds.items():
                figures = [percentile(values, 50), percentile(values, 95), max(values)]
                for figure, value in zip(("p50_ms", "p95_ms", "max_ms"), figures, strict=True):
                    report.figure(way, figure, value, "ms", load=load, jobs=jobs[load])
                rows.append([f"{way}, {load}", *figures])
    table("enqueue to handler", ["way, load", "p50 ms", "p95 ms", "max ms"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.poolers", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100, help="of the trickle")
    parser.add_argument("--idle-jobs", type=int, default=12)
    options = parser.parse_args()
    report = Report("poolers")
    with server() as running:
        measure(report, running, {"trickle": options.jobs, "idle": options.idle_jobs})
    return 0


if __name__ == "__main__":
    sys.exit(main())
