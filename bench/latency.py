"""Latency: from before the enqueue call to the first line of the handler, in another process.

Under steady load beside the naive queue with a short poll; and idle, one job at a time, beside a
bare INSERT with NOTIFY, answered by a fetch and its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any, LiteralString

import awa
from bench import naive
from bench.calls import INSERT_JOB
from bench.child import Child, wait_for_end
from bench.cluster import Connection, Server, connect, server
from bench.jobs import KIND, QUEUE, args_text
from bench.report import Report, percentile, say

POLL_SECONDS = 0.01
CONCURRENCY = 50
WARM_UP = 20
# Between two idle jobs: long enough for the worker to fall asleep again.
PAUSE_SECONDS = (0.02, 0.04)
ANSWER_SECONDS = 30
SETTLE_SECONDS = 2

BARE_DDL = "CREATE TABLE bare (args jsonb NOT NULL)"
BARE_INSERT = """
    WITH added AS (INSERT INTO bare (args) VALUES (%s::jsonb) RETURNING 1)
    SELECT pg_notify('bare', '') FROM added
"""
BARE_FETCH = "DELETE FROM bare RETURNING args"

IDLE_TIMES_BARE = 3.0
# What may be on its way when the load ends: jobs of a tenth of a second.
BACKLOG_SECONDS = 0.1

now = time.monotonic_ns  # one clock for all processes of the machine
Enqueue = Callable[[int], object]
Params = dict[str, str | int | float]


# ---- the worker processes: each sends the start time of a job and when its handler began


class Recorder:
    """Remembers when handlers began; tells at once, or everything at the end."""

    def __init__(self, pipe: Pipe, at_once: bool) -> None:
        self._pipe = pipe
        self._at_once = at_once
        self._began: list[tuple[int, int]] = []

    def began(self, args: Any, at: int) -> None:
        """A handler began."""
        if self._at_once:
            self._pipe.send((args["start"], at))
        else:
            self._began.append((args["start"], at))

    async def until_told(self) -> None:
        """Serve until the parent asks for the times."""
        self._pipe.send("ready")
        await asyncio.to_thread(self._pipe.recv)
        self._pipe.send(self._began)


def awa_worker(pipe: Pipe, dsn: str, at_once: bool) -> None:
    """Run a worker of this package."""
    recorder = Recorder(pipe, at_once)

    async def handler(job: awa.Job) -> None:
        at = now()
        recorder.began(job.args, at)

    async def serve() -> None:
        async with awa.Worker(dsn, {KIND: handler}, queues={QUEUE: CONCURRENCY}):
            await recorder.until_told()

    asyncio.run(serve())
    wait_for_end(pipe)


def naive_worker(pipe: Pipe, dsn: str, at_once: bool) -> None:
    """Run the naive worker."""
    recorder = Recorder(pipe, at_once)

    async def handler(job: naive.Row) -> None:
        at = now()
        recorder.began(json.loads(job[1][1:]), at)

    async def serve() -> None:
        worker = naive.NaiveWorker(dsn, handler, poll_seconds=POLL_SECONDS)
        running = asyncio.create_task(worker.run())
        await recorder.until_told()
        worker.stopping = True
        await running

    asyncio.run(serve())
    wait_for_end(pipe)


def bare_worker(pipe: Pipe, dsn: str) -> None:
    """Wait for a notification, fetch, commit; until the parent hangs up."""
    with connect(dsn) as conn:
        conn.execute("LISTEN bare")
        pipe.send("ready")
        while not pipe.poll():
            if list(conn.notifies(timeout=1, stop_after=1)):
                fetched = conn.execute(BARE_FETCH)
                at = now()
                ((args,),) = fetched.fetchall()
                pipe.send((args["start"], at))  # type: ignore[index]


# ---- the producer


def awa_producer(conn: Connection) -> Enqueue:
    """Enqueue jobs that say when their enqueueing began."""
    return lambda i: conn.execute(INSERT_JOB, [KIND, args_text(i, start=now())])


def plain_producer(conn: Connection, statement: LiteralString) -> Enqueue:
    """The same by a statement that takes the arguments."""
    return lambda i: conn.execute(statement, [args_text(i, start=now())])


class Steady:
    """What came of a steady load."""

    def __init__(self, began: list[tuple[int, int]], first: int, last: int, jobs: int) -> None:
        taken = [(start, at) for start, at in began if start >= first]
        self.milliseconds = [(at - start) / 1e6 for start, at in taken]
        self.backlog = jobs - sum(at <= last for _, at in taken)
        self.lost = jobs - len(taken)
        self.rate = jobs / ((last - first) / 1e9)


def steady(child: Child, enqueue: Enqueue, rate: int, seconds: int) -> Steady:
    """Enqueue at a constant rate; a producer that falls behind catches up."""
    for i in range(WARM_UP):
        enqueue(i)
        time.sleep(1 / rate)
    jobs = rate * seconds
    first = now()
    for i in range(jobs):
        wait = first / 1e9 + i / rate - now() / 1e9
        if wait > 0:
            time.sleep(wait)
        enqueue(i)
    last = now()
    time.sleep(SETTLE_SECONDS)
    child.pipe.send("stop")
    return Steady(child.receive(ANSWER_SECONDS), first, last, jobs)


def idle(children: dict[str, tuple[Child, Enqueue]], jobs: int) -> dict[str, list[float]]:
    """One job at a time, the systems in turn; milliseconds of each job."""
    milliseconds: dict[str, list[float]] = {system: [] for system in children}
    for i in range(WARM_UP + jobs):
        for system, (child, enqueue) in children.items():
            time.sleep(random.uniform(*PAUSE_SECONDS))
            enqueue(i)
            start, at = child.receive(ANSWER_SECONDS)
            if i >= WARM_UP:
                milliseconds[system].append((at - start) / 1e6)
    return milliseconds


# ---- the loads


def measure_idle(report: Report, running: Server, jobs: int) -> None:
    """Report awa and bare, one job at a time."""
    with ExitStack() as stack:
        awa_dsn = stack.enter_context(running.awa_database())
        bare_dsn = stack.enter_context(running.database(BARE_DDL))
        children = {
            "bare": (
                stack.enter_context(Child(bare_worker, bare_dsn)),
                plain_producer(stack.enter_context(connect(bare_dsn)), BARE_INSERT),
            ),
            "awa": (
                stack.enter_context(Child(awa_worker, awa_dsn, True)),
                awa_producer(stack.enter_context(connect(awa_dsn))),
            ),
        }
        milliseconds = idle(children, jobs)
        ours, _ = children["awa"]
        ours.pipe.send("stop")
        ours.receive(ANSWER_SECONDS)
    params: Params = {"load": "idle", "jobs": jobs}
    medians = {}
    for system, values in milliseconds.items():
        medians[system] = report_percentiles(report, system, values, params)[0]
    ratio = medians["awa"] / medians["bare"]
    report.limit("idle p50, times bare", ratio, f"<= {IDLE_TIMES_BARE}", ratio <= IDLE_TIMES_BARE)


def measure_steady(report: Report, running: Server, rate: int, seconds: int) -> None:
    """Report awa and naive under a steady load."""
    params: Params = {"load": "steady", "rate": rate, "seconds": seconds}
    with (
        running.awa_database() as dsn,
        connect(dsn) as conn,
        Child(awa_worker, dsn, False) as child,
    ):
        ours = steady(child, awa_producer(conn), rate, seconds)
    with (
        running.database(naive.DDL) as dsn,
        connect(dsn) as conn,
        Child(naive_worker, dsn, False) as child,
    ):
        theirs = steady(child, plain_producer(conn, naive.INSERT), rate, seconds)
    p99 = {}
    for system, outcome in {"awa": ours, "naive": theirs}.items():
        say(f"{system}: {outcome.rate:.1f} jobs/s enqueued, {outcome.lost} jobs never begun")
        own = params | ({"poll_ms": POLL_SECONDS * 1_000} if system == "naive" else {})
        p99[system] = report_percentiles(report, system, outcome.milliseconds, own)[1]
        report.figure(system, "backlog_jobs", outcome.backlog, "jobs", **own)
    most = rate * BACKLOG_SECONDS
    report.limit("steady p99 ms", p99["awa"], f"< {p99['naive']:.2f}", p99["awa"] < p99["naive"])
    report.limit(
        "steady backlog at the end",
        ours.backlog,
        f"<= {most:g}, none lost",
        ours.backlog <= most and not ours.lost,
    )
    report.limit("steady jobs/s enqueued", ours.rate, f">= {0.99 * rate}", ours.rate >= 0.99 * rate)


def report_percentiles(
    report: Report, system: str, milliseconds: list[float], params: Params
) -> tuple[float, float]:
    """Print the median and the 99th percentile."""
    p50, p99 = percentile(milliseconds, 50), percentile(milliseconds, 99)
    report.figure(system, "p50_ms", p50, "ms", **params)
    report.figure(system, "p99_ms", p99, "ms", **params)
    return p50, p99


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.latency", description=__doc__)
    parser.add_argument("--jobs", type=int, default=300, help="idle jobs")
    parser.add_argument("--rate", type=int, default=500, help="steady jobs a second")
    parser.add_argument("--seconds", type=int, default=30, help="of the steady load")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("latency")
    with server() as running:
        measure_idle(report, running, options.jobs)
        measure_steady(report, running, options.rate, options.seconds)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
