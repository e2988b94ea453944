"""Inserts: insert_job and insert_many beside bare INSERTs of the same arguments into two columns.

One connection, statements prepared, each a transaction of its own that does not wait for the disk.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

from bench import naive
from bench.calls import INSERT_JOB, INSERT_MANY
from bench.cluster import Connection, connect, server
from bench.jobs import KIND, args_text
from bench.report import Report

BATCH = 1_000
WARM_UP_SECONDS = 0.3
LEAST_RATIOS = {1: 0.5, BATCH: 0.6}
LOAD = "COPY awa.job_inbox (kind, args) FROM STDIN"

Call = Callable[[], object]


def calls(conn: Connection, batch: int) -> dict[str, Call]:
    """The calls that insert so many jobs or rows, by system and the way they do it."""
    args = [args_text(number) for number in range(batch)]
    if batch == 1:
        return {
            "bare insert": lambda: conn.execute(naive.INSERT, args),
            "awa insert_job": lambda: conn.execute(INSERT_JOB, [KIND, args[0]]).fetchone(),
        }

    def load() -> None:
        with conn.cursor().copy(LOAD) as copy:
            for text in args:
                copy.write_row((KIND, text))

    jobs = "[" + ",".join(f'{{"kind": "{KIND}", "args": {text}}}' for text in args) + "]"
    insert_jobs = "SELECT count(*) FROM awa.insert_jobs(jobs => %s::jsonb)"
    return {
        "bare insert": lambda: conn.execute(naive.INSERT_MANY, [args]),
        "awa insert_many": lambda: conn.execute(INSERT_MANY, [KIND, args]).fetchone(),
        "awa insert_jobs": lambda: conn.execute(insert_jobs, [jobs]).fetchone(),
        "awa job_inbox": load,
    }


def rate(call: Call, seconds: float) -> float:
    """Calls a second."""
    done, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        call()
        done += 1
    return done / taken


def measure(conn: Connection, batch: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Rates of some rounds, the calls in turn: jobs a second."""
    plan = calls(conn, batch)
    for call in plan.values():
        rate(call, WARM_UP_SECONDS)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, call in plan.items():
            rates[name].append(rate(call, seconds) * batch)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.insert", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("insert")
    with (
        server({"synchronous_commit": "off"}) as running,
        running.awa_database() as dsn,
        connect(dsn) as conn,
    ):
        conn.execute(naive.DDL)
        for batch, least in LEAST_RATIOS.items():
            rates = measure(conn, batch, options.rounds, options.seconds)
            for name, values in rates.items():
                system, call = name.split()
                report.series(system, "inserted_per_s", values, "jobs/s", batch=batch, call=call)
            bare, ours, *others = rates
            for number, name in enumerate([ours, *others]):
                ratios = [a / b for a, b in zip(rates[name], rates[bare], strict=True)]
                call = name.split()[1]
                report.series("awa", "ratio_to_bare", ratios, "times", batch=batch, call=call)
                if not number:
                    ratio = median(ratios)
                    what = f"{call} of {batch}, times bare inserts"
                    report.limit(what, ratio, f">= {least}", ratio >= least)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
