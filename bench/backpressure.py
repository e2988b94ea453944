"""Backpressure: what a signal costs, and the depth of a queue whose producer offers too much.

A worker takes jobs at a fixed rate, and a producer offers twice as many for a minute: one that
paces itself by a target, and one that does not.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any, LiteralString

import awa
from bench.calls import Calls
from bench.cluster import Connection, connect, server
from bench.jobs import KIND, QUEUE, args_text
from bench.report import Report, say

PLAIN: LiteralString = "SELECT job_id, pressure FROM awa.insert_job(kind => %s, args => %s::jsonb)"
SIGNALLED: LiteralString = """
    SELECT job_id, pressure FROM awa.insert_job(
        kind => %s, args => %s::jsonb, opts => '{"backpressure": "signal"}')
"""
ROUNDS = 101
CALLS = 100
SIGNAL_PERCENT = 2.0

CAPACITY = 1_000  # jobs a second
TARGET = 500
STEP = 0.02  # seconds between two claims, or two inserts of the producer that does not pace itself
SECONDS = 60
DEPTH = "SELECT coalesce(sum(depth), 0)::integer FROM awa.queue_depths()"


def call_microseconds(conn: Connection) -> tuple[float, float]:
    """The mean times of an insert without and with a signal, in turns.

    Mostly with: the depth is measured some times a second, which few calls would have to pay for.
    """
    seconds: dict[LiteralString, list[float]] = {PLAIN: [], SIGNALLED: []}
    for number in range(CALLS):
        for statement in (PLAIN, SIGNALLED, SIGNALLED, SIGNALLED):
            began = time.perf_counter()
            conn.execute(statement, [KIND, args_text(number)]).fetchall()
            seconds[statement].append(time.perf_counter() - began)
    return fmean(seconds[PLAIN]) * 1e6, fmean(seconds[SIGNALLED]) * 1e6


def measure_signal(report: Report, conn: Connection, synchronous_commit: str) -> None:
    """Compare inserts with and without; a median of many rounds leaves out the disk's hiccups."""
    conn.execute("SELECT set_config('synchronous_commit', %s, false)", [synchronous_commit])
    rounds = [call_microseconds(conn) for _ in range(ROUNDS)]
    percent = (median(signalled / plain for plain, signalled in rounds) - 1) * 100
    params: dict[str, str | int | float] = {"synchronous_commit": synchronous_commit}
    insert = median(plain for plain, _ in rounds)
    report.figure("awa", "insert_job", insert, "microseconds", **params)
    report.figure("awa", "signal_cost", percent, "percent of insert_job", **params)
    if synchronous_commit == "on":
        what = "signal, percent of insert_job"
        report.limit(what, percent, f"< {SIGNAL_PERCENT}", percent < SIGNAL_PERCENT)


@contextmanager
def worker(dsn: str) -> Iterator[None]:
    """Take and complete jobs at the rate of CAPACITY, or slower when there are none."""
    stopping = threading.Event()

    def work() -> None:
        with connect(dsn) as conn:
            calls = Calls(conn)
            due = time.monotonic()
            while not stopping.is_set():
                calls.run_some(int(CAPACITY * STEP))
                due += STEP
                time.sleep(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def produce(dsn: str, seconds: float, is_paced: bool) -> None:
    """Offer twice what the worker can do."""
    with awa.Client(dsn) as client:
        paced = awa.PacedProducer(client, target=TARGET, queue=QUEUE)
        insert = paced.insert_many if is_paced else client.insert_many
        args = [{"n": n} for n in range(int(2 * CAPACITY * STEP))]
        due = time.monotonic()
        end = due + seconds
        while time.monotonic() < end:
            insert(KIND, args)
            due += STEP
            time.sleep(max(0.0, due - time.monotonic()))


def measure_depth(report: Report, dsn: str, seconds: float, is_paced: bool) -> int:
    """The deepest that the queue got."""
    producer = threading.Thread(target=produce, args=(dsn, seconds, is_paced))
    depths = []
    with connect(dsn) as conn, worker(dsn):
        producer.start()
        while producer.is_alive():
            row: Any = conn.execute(DEPTH).fetchone()
            depths.append(row[0])
            time.sleep(STEP)
    params = {"capacity": CAPACITY, "offered": 2 * CAPACITY, "seconds": seconds, "target": TARGET}
    system = "paced" if is_paced else "unpaced"
    report.figure(system, "depth_most", max(depths), "jobs", **params)
    report.figure(system, "depth_median", median(depths), "jobs", **params)
    return int(max(depths))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.backpressure", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of each load")
    options = parser.parse_args()
    report = Report("backpressure")
    with server() as running:
        with running.awa_database() as dsn, connect(dsn) as conn:
            for synchronous_commit in ("on", "off"):
                measure_signal(report, conn, synchronous_commit)
        for is_paced in (True, False):
            with running.awa_database() as dsn:
                deepest = measure_depth(report, dsn, options.seconds, is_paced)
            say(f"{'paced' if is_paced else 'unpaced'}: at most {deepest} jobs waited")
            if is_paced:
                bound = 2 * TARGET
                report.limit("paced depth", deepest, f"< {bound}", deepest < bound)
            else:
                # Else the load was not what it is meant to be, and the paced depth says nothing.
                bound = int(CAPACITY * options.seconds / 2)
                report.limit("unpaced depth", deepest, f"> {bound}", deepest > bound)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
