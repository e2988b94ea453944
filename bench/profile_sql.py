"""Where the hot SQL calls spend their time, on one connection; for maintainers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from psycopg import sql

from bench.calls import Calls, Receipt
from bench.cluster import Connection, connect, server
from bench.report import Report, say

EMPTY_QUEUE = "empty"
TRACKING = ("track_functions", "pg_stat_statements.track")
STATEMENT_WIDTH = 100
FUNCTIONS = """
    SELECT funcname, calls, self_time, total_time
    FROM pg_stat_user_functions WHERE schemaname = 'awa' AND calls > 0
    ORDER BY self_time DESC LIMIT %s
"""
STATEMENTS = """
    SELECT left(regexp_replace(query, '\\s+', ' ', 'g'), %s),
           calls, total_plan_time, total_exec_time
    FROM pg_stat_statements WHERE query NOT LIKE 'SET %%'
    ORDER BY total_plan_time + total_exec_time DESC LIMIT %s
"""
SETTINGS = {
    "autovacuum": "off",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",
    "pg_stat_statements.track_planning": "on",
}
WARM_UP = 20
BATCHES = (1, 100, 500)

Call = Callable[[], object]


def microseconds(call: Call, times: int) -> float:
    """Median time of a call, in a transaction of its own."""
    taken = []
    for number in range(WARM_UP + times):
        start = time.perf_counter_ns()
        call()
        if number >= WARM_UP:
            taken.append((time.perf_counter_ns() - start) / 1_000)
    return median(taken)


def show_details(conn: Connection, name: str, call: Call, times: int, top: int) -> None:
    """Print the functions and statements that a call spends its time in.

    To take these times costs time as well, so they are not those of the figures. A function's
    self time includes its statements.
    """
    for setting in TRACKING:
        conn.execute(sql.SQL("SET {} = 'all'").format(sql.SQL(setting)))
    conn.execute("SELECT pg_stat_reset(), pg_stat_statements_reset()")
    for _ in range(times):
        call()
    for setting in TRACKING:
        conn.execute(sql.SQL("SET {} = 'none'").format(sql.SQL(setting)))
    conn.execute("SELECT pg_stat_force_next_flush()")
    say(f"\n{name}, microseconds a call\n    self   total   calls  function")
    functions: list[Any] = conn.execute(FUNCTIONS, [top]).fetchall()
    for text, calls, self_ms, total_ms in functions:
        each = (self_ms * 1_000 / times, total_ms * 1_000 / times, calls / times)
        say("{:8.1f}{:8.1f}{:8.1f}  {}".format(*each, text))
    say("    plan execute   calls  statement")
    statements: list[Any] = conn.execute(STATEMENTS, [STATEMENT_WIDTH, top]).fetchall()
    for text, calls, plan_ms, run_ms in statements:
        each = (plan_ms * 1_000 / times, run_ms * 1_000 / times, calls / times)
        say("{:8.1f}{:8.1f}{:8.1f}  {}".format(*each, text))


def hot_calls(conn: Connection) -> dict[str, Call]:
    """The calls to measure, in an order in which each finds the jobs that it needs."""
    calls = Calls(conn)
    receipts: list[Receipt] = []

    def claim(jobs: int) -> Call:
        return lambda: receipts.append(calls.claim(jobs))

    def complete() -> None:
        calls.complete(receipts.pop())

    plan: dict[str, Call] = {"SELECT 1": lambda: conn.execute("SELECT 1")}
    for jobs in BATCHES:
        plan[f"enqueue({jobs})"] = partial(calls.enqueue, jobs)
    for jobs in BATCHES:
        plan[f"claim({jobs})"] = claim(jobs)
        plan[f"complete({jobs})"] = complete
    plan["claim(nothing)"] = partial(calls.claim_nothing, EMPTY_QUEUE)
    plan["claim_status"] = partial(calls.claim_status, EMPTY_QUEUE)
    return plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.profile_sql", description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="measured calls of each kind")
    parser.add_argument("--top", type=int, default=15, help="functions to list for each call")
    parser.add_argument("--fsync", action="store_true", help="wait for the disk at each commit")
    options = parser.parse_args()
    report = Report("profile_sql")
    settings = SETTINGS | {"synchronous_commit": "on" if options.fsync else "off"}
    with (
        server(settings) as running,
        running.awa_database() as dsn,
        connect(dsn) as conn,
    ):
        conn.execute("CREATE EXTENSION pg_stat_statements")
        plan = hot_calls(conn)
        for name, call in plan.items():
            report.figure("awa", "call_us", microseconds(call, options.times), "us", call=name)
        for name, call in plan.items():
            show_details(conn, name, call, options.times, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
