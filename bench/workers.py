"""Workers: several worker processes on one queue, with handlers that do nothing and that wait.

With handlers that do nothing, on one lane, for which claims take turns, and on several
(`enqueue_shards`), as the manual advises for more than one process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from statistics import median

from bench.adapters import SYSTEMS, Installed, processes
from bench.cluster import Connection, server
from bench.jobs import QUEUE
from bench.report import Param, Params, Report, say, table

PROCESSES = (1, 2, 4)
NOOP_CONCURRENCY = 200
POLL_SECONDS = 0.1  # each look takes some of the workers' time
MOST_SECONDS = 600
WAIT_MS, WAIT_CONCURRENCY = 5, 8
LANES = 4
NOOP, NOOP_LANES, WAIT = "no-op", f"no-op, {LANES} lanes", f"wait {WAIT_MS} ms"
LEAST_NOOP = {2: 0.9, 4: 0.9}
LEAST_RATIOS = {NOOP: LEAST_NOOP, NOOP_LANES: LEAST_NOOP, WAIT: {2: 1.8, 4: 3.0}}
DECLARE = "SELECT awa.declare_queue(%s, jsonb_build_object('enqueue_shards', %s::integer))"

AWA = SYSTEMS["awa"]


def jobs_per_second(
    installed: Installed, count: int, jobs: int, lanes: Param, **work: Param
) -> float:
    """From the moment when the last worker has started until all jobs were run."""

    def declare(conn: Connection) -> None:
        conn.execute(DECLARE, [QUEUE, lanes])

    with (
        installed.database(AWA, jobs, prepare=declare) as dsn,
        processes(AWA, count) as workers,
    ):

        def handled() -> int:
            return sum(worker.ask("handled")["jobs"] for worker in workers)

        for worker in workers:
            worker.ask("settings")  # the interpreter has started
        for worker in workers:
            worker.tell("work", dsn=dsn, **work)
        for worker in workers:
            worker.answer()
        before, start = handled(), time.perf_counter()
        while handled() < jobs:
            if time.perf_counter() > start + MOST_SECONDS:
                raise TimeoutError(f"{jobs} jobs were not run within {MOST_SECONDS} s")
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - start
        for worker in workers:
            worker.ask("stop")
    if before == jobs:
        raise RuntimeError(f"{jobs} jobs are too few: they were run before all workers had started")
    return (jobs - before) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.workers", description=__doc__)
    parser.add_argument("--jobs", type=int, default=400_000, help="of the no-op handlers")
    parser.add_argument(
        "--concurrency", type=int, default=NOOP_CONCURRENCY, help="of the no-op handlers"
    )
    parser.add_argument("--wait-jobs", type=int, default=20_000, help="of the waiting handlers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("workers")
    work: dict[str, Params] = {
        NOOP: {"lanes": 1, "concurrency": options.concurrency},
        NOOP_LANES: {"lanes": LANES, "concurrency": options.concurrency},
        WAIT: {"lanes": 1, "wait_ms": WAIT_MS, "concurrency": WAIT_CONCURRENCY},
    }
    jobs = {NOOP: options.jobs, NOOP_LANES: options.jobs, WAIT: options.wait_jobs}
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with server() as running, Installed(running, [AWA]) as installed:
        for number in range(1, options.rounds + 1):
            for count in PROCESSES:
                for handler, how in work.items():
                    rate = jobs_per_second(installed, count, jobs[handler], **how)
                    rates[handler, count].append(rate)
                    say(f"round {number}, {handler}, {count} processes: {rate:,.0f} jobs/s")
        settings = installed.settings["awa"]
    rows: list[list[object]] = []
    for (handler, count), values in rates.items():
        params = {**settings, **work[handler]}
        report.series(
            "awa", "jobs_per_s", values, "jobs/s", handler=handler, processes=count, **params
        )
        ratio = median(values) / median(rates[handler, 1])
        rows.append([f"{handler}, {count}", median(values), min(values), max(values), ratio])
        least = LEAST_RATIOS[handler].get(count)
        if least is not None:
            what = f"{count} processes, {handler}, times one process"
            report.limit(what, ratio, f">= {least}", ratio >= least)
    head = ["handler, processes", "median", "min", "max", "times one"]
    table("jobs run by several worker processes, jobs/s", head, rows)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
