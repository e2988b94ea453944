"""Latency: from before the enqueue call to the first line of the handler, in another process.

Under steady load beside other systems; and idle, one job at a time, beside a
bare INSERT with NOTIFY, answered by a fetch and its commit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import LiteralString

from bench.adapters import SYSTEMS, Installed, Process, System, add_systems_option
from bench.calls import INSERT_JOB
from bench.child import Child
from bench.cluster import Connection, Server, connect, server
from bench.jobs import KIND, args_text
from bench.report import Params, Report, percentile, say, table

CONCURRENCY = 50
WARM_UP = 20
# Between two idle jobs: long enough for the worker to fall asleep again.
PAUSE_SECONDS = (0.02, 0.04)
ANSWER_SECONDS = 30
SETTLE_SECONDS = 2
MOST_TIMES_SLOWER = 10
PERCENTS = (50, 95, 99)
LEAST_SHARE = 0.99  # of the rate asked for

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


# ---- the bare answer


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


# ---- the loads


class Steady:
    """What came of a steady load."""

    def __init__(self, began: list[tuple[int, int]], sent: dict[str, int]) -> None:
        first, last, jobs = sent["first"], sent["last"], sent["jobs"]
        taken = [(start, at) for start, at in began if start >= first]
        self.milliseconds = [(at - start) / 1e6 for start, at in taken]
        self.backlog = jobs - sum(at <= last for _, at in taken)
        self.lost = jobs - len(taken)
        self.rate = jobs / ((last - first) / 1e9)


def steady(installed: Installed, system: System, rate: int, seconds: int) -> Steady:
    """A producer at a constant rate and a worker, each a process of its own."""
    with (
        installed.database(system) as dsn,
        Process(system) as worker,
        Process(system) as producer,
    ):
        producer.ask("connect", dsn=dsn)
        concurrency = CONCURRENCY if system.name == "awa" else 0
        worker.ask("record", dsn=dsn, concurrency=concurrency)
        producer.ask("warm_up", rate=rate)
        most = seconds * MOST_TIMES_SLOWER + ANSWER_SECONDS
        sent = producer.ask("steady", jobs=rate * seconds, rate=rate, within=most)
        time.sleep(SETTLE_SECONDS)
        outcome = Steady(worker.ask("all_began"), sent)
        worker.ask("stop")
    return outcome


class Bare:
    """The bare answer in a process, asked as a system's process is."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def tell(self, what: str) -> None:
        """It says by itself when it began."""

    def answer(self, within: float) -> tuple[int, int]:
        """When the job's enqueueing and its fetch ended."""
        start, at = self._child.receive(within)
        return start, at


def idle(workers: dict[str, tuple[Bare | Process, Enqueue]], jobs: int) -> dict[str, list[float]]:
    """One job at a time, the systems in turn; milliseconds of each job."""
    milliseconds: dict[str, list[float]] = {system: [] for system in workers}
    for i in range(WARM_UP + jobs):
        for system, (worker, enqueue) in workers.items():
            worker.tell("next_began")
            time.sleep(random.uniform(*PAUSE_SECONDS))
            enqueue(i)
            start, at = worker.answer(ANSWER_SECONDS)
            if i >= WARM_UP:
                milliseconds[system].append((at - start) / 1e6)
    return milliseconds


def plain_producer(conn: Connection, statement: LiteralString, *first: str) -> Enqueue:
    """Enqueue jobs that say when their enqueueing began."""
    return lambda i: conn.execute(statement, [*first, args_text(i, start=now())])


def measure_idle(report: Report, running: Server, installed: Installed, jobs: int) -> None:
    """Report awa and bare, one job at a time."""
    system = SYSTEMS["awa"]
    with ExitStack() as stack:
        awa_dsn = stack.enter_context(installed.database(system))
        bare_dsn = stack.enter_context(running.database(BARE_DDL))
        bare = Bare(stack.enter_context(Child(bare_worker, bare_dsn)))
        ours = stack.enter_context(Process(system))
        ours.ask("record", dsn=awa_dsn, concurrency=CONCURRENCY)
        bare_conn = stack.enter_context(connect(bare_dsn))
        awa_conn = stack.enter_context(connect(awa_dsn))
        workers: dict[str, tuple[Bare | Process, Enqueue]] = {
            "bare": (bare, plain_producer(bare_conn, BARE_INSERT)),
            "awa": (ours, plain_producer(awa_conn, INSERT_JOB, KIND)),
        }
        milliseconds = idle(workers, jobs)
        ours.ask("stop")
    params: Params = {"load": "idle", "jobs": jobs}
    medians = {}
    for name, values in milliseconds.items():
        medians[name] = percentile(values, 50)
        report.figure(name, "p50_ms", medians[name], "ms", **params)
        report.figure(name, "p99_ms", percentile(values, 99), "ms", **params)
    ratio = medians["awa"] / medians["bare"]
    report.limit("idle p50, times bare", ratio, f"<= {IDLE_TIMES_BARE}", ratio <= IDLE_TIMES_BARE)


def measure_steady(report: Report, installed: Installed, options: argparse.Namespace) -> None:
    """Report all systems under a steady load."""
    rounds: dict[str, list[Steady]] = defaultdict(list)
    for _ in range(options.rounds):
        for system in options.systems:
            outcome = steady(installed, system, options.rate, options.seconds)
            rounds[system.name].append(outcome)
            say(
                f"{system.name}: {outcome.rate:.1f} jobs/s enqueued, "
                f"{outcome.lost} jobs never begun"
            )
    rows: dict[str, dict[str, float]] = {}
    for name, outcomes in rounds.items():
        params: Params = {"load": "steady", "rate": options.rate, "seconds": options.seconds}
        params |= installed.settings[name] | ({"concurrency": CONCURRENCY} if name == "awa" else {})
        rows[name] = {}
        for percent in PERCENTS:
            values = [percentile(outcome.milliseconds, percent) for outcome in outcomes]
            figure = f"p{percent}_ms"
            rows[name][figure] = report.series(name, figure, values, "ms", **params)
        for figure, unit, counts in (
            ("backlog_jobs", "jobs", [outcome.backlog for outcome in outcomes]),
            ("enqueued_per_s", "jobs/s", [outcome.rate for outcome in outcomes]),
            ("lost_jobs", "jobs", [outcome.lost for outcome in outcomes]),
        ):
            rows[name][figure] = report.series(name, figure, counts, unit, **params)
    head = list(next(iter(rows.values())))
    table(
        f"enqueue to handler at {options.rate} jobs/s (medians of rounds)",
        ["system", *head],
        [[name, *row.values()] for name, row in rows.items()],
    )
    if "awa" in rows:
        check_steady(report, rows, options.rate)


def check_steady(report: Report, rows: dict[str, dict[str, float]], rate: int) -> None:
    """Compare with the others that kept up, and say whether we did."""
    ours = rows["awa"]

    def keeps_up(row: dict[str, float]) -> bool:
        return row["enqueued_per_s"] >= LEAST_SHARE * rate and not row["lost_jobs"]

    others = {name: row for name, row in rows.items() if name != "awa" and keeps_up(row)}
    for percent in (50, 99):
        figure = f"p{percent}_ms"
        peers = [row[figure] for name, row in others.items() if SYSTEMS[name].is_peer]
        if peers:
            best = min(peers)
            is_kept = ours[figure] <= best
            report.limit(f"steady p{percent} ms", ours[figure], f"<= {best:.2f} of peers", is_kept)
    if "naive" in others:
        theirs = others["naive"]["p99_ms"]
        report.limit("steady p99 ms", ours["p99_ms"], f"< {theirs:.2f}", ours["p99_ms"] < theirs)
    most = rate * BACKLOG_SECONDS
    report.limit(
        "steady backlog at the end",
        ours["backlog_jobs"],
        f"<= {most:g}, none lost",
        ours["backlog_jobs"] <= most and not ours["lost_jobs"],
    )
    least = LEAST_SHARE * rate
    rated = ours["enqueued_per_s"]
    report.limit("steady jobs/s enqueued", rated, f">= {least:g}", rated >= least)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.latency", description=__doc__)
    parser.add_argument("--jobs", type=int, default=300, help="idle jobs")
    parser.add_argument("--rate", type=int, default=500, help="steady jobs a second")
    parser.add_argument("--seconds", type=int, default=30, help="of the steady load")
    parser.add_argument("--rounds", type=int, default=1, help="of the steady load")
    add_systems_option(parser, "awa,naive")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("latency")
    with server() as running, Installed(running, options.systems) as installed:
        if SYSTEMS["awa"] in options.systems:
            measure_idle(report, running, installed, options.jobs)
        measure_steady(report, installed, options)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
