"""Deadline: drains in pairs, with a hard deadline on every claim and without."""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from bench.adapters import SYSTEMS, Installed, Process, settle
from bench.cluster import Connection, connect, server
from bench.jobs import QUEUE
from bench.report import Report, say, table

AWA = SYSTEMS["awa"]
MOST_SECONDS = 600
DEADLINE_SECONDS = 3_600
LEAST_RATE_RATIO = 0.95
MOST_WAL_CHANGE = 0.05
# WAL without what a checkpoint happens to add.
SETTINGS = {"full_page_writes": "off", "autovacuum": "off"}
DECLARE = "SELECT awa.declare_queue(%s, jsonb_build_object('deadline_seconds', %s::integer))"
PLAIN, WITH = "without a deadline", "with a deadline"


def position(conn: Connection) -> int:
    """Bytes of WAL written so far."""
    row: Any = conn.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    return int(row[0])


def drain(installed: Installed, jobs: int, has_deadline: bool) -> tuple[float, float]:
    """Jobs a second, and bytes of WAL a job over its whole life."""
    with installed.database(AWA) as dsn, connect(dsn) as conn, Process(AWA) as process:
        if has_deadline:
            conn.execute(DECLARE, [QUEUE, DEADLINE_SECONDS])
        process.ask("connect", dsn=dsn)
        start = position(conn)
        process.ask("load", jobs=jobs, batch=1_000, within=MOST_SECONDS)
        loaded = position(conn) - start
        settle(dsn)
        start = position(conn)
        done = process.ask("drain", dsn=dsn, jobs=jobs, within=MOST_SECONDS)
        wal = loaded + position(conn) - start
    return jobs / ((done["last"] - done["first"]) / 1e9), wal / jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.deadline", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("deadline")
    rates: dict[str, list[float]] = {PLAIN: [], WITH: []}
    wal: dict[str, list[float]] = {PLAIN: [], WITH: []}
    with server(SETTINGS) as running, Installed(running, [AWA]) as installed:
        for number in range(1, options.pairs + 1):
            # The one that goes first changes, so that neither gains by its place.
            for case in (PLAIN, WITH) if number % 2 else (WITH, PLAIN):
                rate, size = drain(installed, options.jobs, case == WITH)
                rates[case].append(rate)
                wal[case].append(size)
            say(f"pair {number}: {rates[PLAIN][-1]:,.0f} and {rates[WITH][-1]:,.0f} jobs/s")
        params = {"jobs": options.jobs, **installed.settings["awa"]}
    ratios = [ours / plain for ours, plain in zip(rates[WITH], rates[PLAIN], strict=True)]
    for case in rates:
        report.series("awa", "jobs_per_s", rates[case], "jobs/s", case=case, **params)
        report.series("awa", "wal_bytes_per_job", wal[case], "bytes", case=case, **params)
    ratio = report.series("awa", "rate_ratio", ratios, "times", **params)
    change = median(wal[WITH]) / median(wal[PLAIN]) - 1
    report.figure("awa", "wal_change", change, "share", **params)
    table(
        "a hard deadline on every claim (medians)",
        ["case", "jobs/s", "min", "max", "WAL bytes a job"],
        [[c, median(rates[c]), min(rates[c]), max(rates[c]), median(wal[c])] for c in rates],
    )
    report.limit(
        "median ratio of the pairs", ratio, f">= {LEAST_RATE_RATIO}", ratio >= LEAST_RATE_RATIO
    )
    is_kept = abs(change) <= MOST_WAL_CHANGE
    report.limit("change of WAL a job", change, f"within {MOST_WAL_CHANGE}", is_kept)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
