"""Where the hot SQL calls spend their time, on one connection; for maintainers."""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Callable
from statistics import median
from typing import Any, LiteralString

from bench.cluster import Connection, connect, server
from bench.jobs import KIND, QUEUE, args_text
from bench.report import Report, say

INSERT_JOB = "SELECT job_id FROM awa.insert_job(kind => %s, args => %s::jsonb)"
INSERT_MANY = "SELECT count(*) FROM awa.insert_many(kind => %s, args => %s::jsonb[])"
CLAIM = """
    SELECT claim_slot, batch_id, position
    FROM awa.claim_ready_runtime(queue => %s, max_batch => %s, instance_id => %s)
"""
COMPLETE = """
    SELECT count(*) FILTER (WHERE result = 'done')
    FROM awa.complete_jobs(instance_id => %s, claim_slot => %s, batch_id => %s, positions => %s)
"""
EMPTY_CLAIM_QUEUE = "empty"
CLAIM_STATUS = "SELECT reason FROM awa.claim_status(queue => %s, arm => true)"
TRIVIAL = "SELECT 1"
FUNCTION_TIMES = """
    SELECT funcname, calls, self_time, total_time
    FROM pg_stat_user_functions WHERE schemaname = 'awa' ORDER BY self_time DESC LIMIT %s
"""
WARM_UP = 20


class Calls:
    """The hot calls on one connection; claimed jobs wait here for their completion."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._instance = uuid.uuid4()
        self._number = 0
        self._claimed: list[tuple[int, int, list[int]]] = []

    def insert_job(self) -> None:
        self._number += 1
        self._fetch(INSERT_JOB, KIND, args_text(self._number))

    def insert_many(self, jobs: int) -> None:
        self._number += jobs
        args = [args_text(i) for i in range(self._number, self._number + jobs)]
        self._fetch(INSERT_MANY, KIND, args)

    def claim(self, most: int) -> None:
        rows = self._fetch(CLAIM, QUEUE, most, self._instance)
        if len(rows) != most:
            raise RuntimeError(f"{len(rows)} jobs claimed instead of {most}")
        slot, batch, _ = rows[0]
        self._claimed.append((slot, batch, [position for _, _, position in rows]))

    def complete(self) -> None:
        slot, batch, positions = self._claimed.pop()
        ((done,),) = self._fetch(COMPLETE, self._instance, slot, batch, positions)
        if done != len(positions):
            raise RuntimeError(f"{done} of {len(positions)} jobs completed")

    def claim_nothing(self) -> None:
        self._fetch(CLAIM, EMPTY_CLAIM_QUEUE, 100, self._instance)

    def claim_status(self) -> None:
        self._fetch(CLAIM_STATUS, EMPTY_CLAIM_QUEUE)

    def trivial(self) -> None:
        self._fetch(TRIVIAL)

    def _fetch(self, statement: LiteralString, *params: object) -> list[Any]:
        return self._conn.execute(statement, params).fetchall()


def microseconds(call: Callable[[], None], times: int) -> float:
    """Median time of a call, in a transaction of its own."""
    taken = []
    for number in range(WARM_UP + times):
        start = time.perf_counter_ns()
        call()
        if number >= WARM_UP:
            taken.append((time.perf_counter_ns() - start) / 1_000)
    return median(taken)


def functions(conn: Connection, name: str, call: Callable[[], None], times: int, top: int) -> None:
    """Print the functions that a call spends its time in; counting them costs time as well."""
    conn.execute("SET track_functions = 'all'")
    conn.execute("SELECT pg_stat_reset()")
    for _ in range(times):
        call()
    conn.execute("SET track_functions = 'none'")
    conn.execute("SELECT pg_stat_force_next_flush()")
    rows: list[Any] = conn.execute(FUNCTION_TIMES, [top]).fetchall()
    say(f"\n{name}, a call: microseconds self and total, calls, function")
    for function, calls, self_ms, total_ms in rows:
        each = (self_ms * 1_000 / times, total_ms * 1_000 / times, calls / times)
        say("  {:8.1f} {:8.1f} {:7.1f}  {}".format(*each, function))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.profile_sql", description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="measured calls of each kind")
    parser.add_argument("--top", type=int, default=15, help="functions to list for each call")
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at each commit")
    options = parser.parse_args()
    report = Report("profile_sql")
    settings = {} if options.fsync else {"synchronous_commit": "off"}
    with server({**settings, "autovacuum": "off"}) as running, running.awa_database() as dsn:
        with connect(dsn) as conn:
            calls = Calls(conn)
            # Each claim finds what an insert before it left, each completion what a claim left.
            plan: dict[str, Callable[[], None]] = {
                "SELECT 1": calls.trivial,
                "insert_job": calls.insert_job,
                "insert_many(100)": lambda: calls.insert_many(100),
                "insert_many(500)": lambda: calls.insert_many(500),
                "claim(1)": lambda: calls.claim(1),
                "complete_jobs(1)": calls.complete,
                "claim(100)": lambda: calls.claim(100),
                "complete_jobs(100)": calls.complete,
                "claim(500)": lambda: calls.claim(500),
                "complete_jobs(500)": calls.complete,
                "claim(nothing)": calls.claim_nothing,
                "claim_status": calls.claim_status,
            }
            for name, call in plan.items():
                report.figure("awa", "call_us", microseconds(call, options.times), "us", call=name)
            for name, call in plan.items():
                functions(conn, name, call, options.times, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
