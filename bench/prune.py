"""Prune: what slots that are emptied under full load cost the claims and inserts of that moment.

Two processes enqueue, claim and complete as fast as they can, one runs maintenance with rings that
turn within seconds, and one now and then reads the oldest slot in a long transaction.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any

from psycopg import sql

from bench.adapters import SYSTEMS, Installed
from bench.calls import CLAIM, COMPLETE, INSERT_MANY
from bench.child import Child, wait_for_end
from bench.cluster import change_settings, connect, server
from bench.jobs import KIND, QUEUE, args_text
from bench.report import Params, Report, percentile, say, table

AWA = SYSTEMS["awa"]
LOADS = 2
ENQUEUE, CLAIM_MOST = 50, 100
TICK_PAUSE_SECONDS = 0.02
READER_PAUSE_SECONDS, READER_SECONDS = 3.0, 1.0
ANSWER_SECONDS = 120
SETTINGS = {
    "queue_rotate_seconds": 0.2,
    "claim_rotate_seconds": 0.2,
    "terminal_retention_seconds": 0,
    "attempt_evidence_seconds": 0,
    "dump_lock_seconds": 0.1,
}
STEPS = (
    "publish_queue",
    "publish_claim",
    "plan_queue",
    "plan_claim",
    "evacuate",
    "prune_claim",
    "prune_queue",
)
PRUNES = ("prune_claim", "prune_queue")
# An attempt that gave up had a lock as well, if only for a moment.
LOCKING = ("pruned", "released", "locked", "in_use", "skipped_pruned")
OLDEST = """
    SELECT slot FROM awa.ring_status()
    WHERE ring = 'queue' AND NOT is_current AND row_count > 0 ORDER BY age DESC LIMIT 1
"""
P99_MORE_MS, MOST_MS = 20.0, 100.0

Span = tuple[str, int, int]  # what, from, until
Tried = tuple[str, str, int, int]  # step, outcome, from, until
now = time.monotonic_ns


def load(pipe: Pipe, dsn: str) -> None:
    """Enqueue, claim and complete until told to stop; send when each call began and ended."""
    spans: list[Span] = []
    instance = uuid.uuid4()
    args = [args_text(i) for i in range(ENQUEUE)]
    with connect(dsn) as conn:

        def timed(what: str, statement: Any, *params: object) -> list[Any]:
            start = now()
            rows: list[Any] = conn.execute(statement, params).fetchall()
            spans.append((what, start, now()))
            return rows

        pipe.send("ready")
        while not pipe.poll():
            timed("insert", INSERT_MANY, KIND, args)
            rows = timed("claim", CLAIM, QUEUE, CLAIM_MOST, instance)
            for batch, group in itertools.groupby(rows, key=lambda row: row[:2]):
                timed("complete", COMPLETE, instance, *batch, [row[2] for row in group])
    pipe.recv()
    pipe.send(spans)
    wait_for_end(pipe)


def tick(pipe: Pipe, dsn: str) -> None:
    """Run maintenance until told to stop; tell of each prune at once."""
    with connect(dsn) as conn:
        pipe.send("ready")
        while not pipe.poll():
            for step in STEPS:
                start = now()
                reports: list[Any] = conn.execute(
                    "SELECT outcome FROM awa.tick(jsonb_build_object('steps', array[%s]))", [step]
                ).fetchall()
                if step in PRUNES:
                    pipe.send((step, reports[0][0], start, now()))
            time.sleep(TICK_PAUSE_SECONDS)
    pipe.recv()
    pipe.send(None)
    wait_for_end(pipe)


def read(pipe: Pipe, dsn: str) -> None:
    """Now and then read the oldest slot of the queue ring and stay in the transaction."""
    with connect(dsn) as conn:
        pipe.send("ready")
        while not pipe.poll(READER_PAUSE_SECONDS):
            slots: list[Any] = conn.execute(OLDEST).fetchall()
            for (slot,) in slots:
                leaf = sql.Identifier("awa", f"ready_entries_{slot}")
                with conn.transaction():
                    conn.execute(sql.SQL("SELECT count(*) FROM {}").format(leaf))
                    conn.execute("SELECT pg_sleep(%s)", [READER_SECONDS])
    wait_for_end(pipe)


def overlapping(spans: Iterable[Span], prunes: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each span, whether a prune ran at the same time; prunes in order of time, one by one."""
    starts = [start for start, _ in prunes]

    def overlaps(first: int, last: int) -> bool:
        place = bisect.bisect_right(starts, last)
        return place > 0 and prunes[place - 1][1] >= first

    return [overlaps(first, last) for _, first, last in spans]


def run(dsn: str, prunes: int, seconds: int) -> tuple[list[Span], list[Tried]]:
    """The calls of the loads, and the prunes tried until so many emptied a queue slot."""
    tried: list[Tried] = []
    with ExitStack() as stack:
        loads = [stack.enter_context(Child(load, dsn)) for _ in range(LOADS)]
        ticker = stack.enter_context(Child(tick, dsn))
        reader = stack.enter_context(Child(read, dsn))
        emptied, end = 0, time.monotonic() + seconds
        while emptied < prunes and time.monotonic() < end:
            entry = ticker.receive(ANSWER_SECONDS)
            tried.append(entry)
            emptied += entry[:2] == ("prune_queue", "pruned")
        reader.pipe.send("stop")
        ticker.pipe.send("stop")
        while (entry := ticker.receive(ANSWER_SECONDS)) is not None:
            tried.append(entry)
        for child in loads:
            child.pipe.send("stop")
        spans = [span for child in loads for span in child.receive(ANSWER_SECONDS)]
    return spans, tried


def print_figures(report: Report, spans: list[Span], tried: list[Tried], params: Params) -> None:
    """Print the latencies of the calls that met a prune and of the others."""
    windows = sorted((first, last) for _, outcome, first, last in tried if outcome in LOCKING)
    rows: list[list[object]] = []
    for what in ("insert", "claim"):
        calls = [span for span in spans if span[0] == what]
        milliseconds: dict[bool, list[float]] = {True: [], False: []}
        for (_, first, last), meets in zip(calls, overlapping(calls, windows), strict=True):
            milliseconds[meets].append((last - first) / 1e6)
        p99 = {}
        for meets, name in ((True, "during a prune"), (False, "otherwise")):
            values = milliseconds[meets] or [0.0]
            p50, p99[meets] = percentile(values, 50), percentile(values, 99)
            rows.append([f"{what} {name}", len(milliseconds[meets]), p50, p99[meets], max(values)])
            for figure, value in (("p50_ms", p50), ("p99_ms", p99[meets]), ("max_ms", max(values))):
                report.figure("awa", figure, value, "ms", call=what, when=name, **params)
        more = p99[True] - p99[False]
        report.limit(
            f"p99 of {what}s, more ms by a prune", more, f"<= {P99_MORE_MS}", more <= P99_MORE_MS
        )
        most = max(milliseconds[True], default=0.0)
        report.limit(f"longest {what} by a prune, ms", most, f"<= {MOST_MS}", most <= MOST_MS)
    table("calls under full load, ms", ["call", "calls", "p50", "p99", "max"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.prune", description=__doc__)
    parser.add_argument("--prunes", type=int, default=50, help="of queue slots, at least")
    parser.add_argument("--seconds", type=int, default=600, help="at most")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("prune")
    with (
        server() as running,
        Installed(running, [AWA]) as installed,
        installed.database(AWA) as dsn,
    ):
        with connect(dsn) as conn:
            change_settings(conn, SETTINGS)
        spans, tried = run(dsn, options.prunes, options.seconds)
    outcomes = Counter((step, outcome) for step, outcome, _, _ in tried)
    say("prunes tried: " + ", ".join(f"{s} {o} {n}" for (s, o), n in sorted(outcomes.items())))
    inserted = ENQUEUE * sum(span[0] == "insert" for span in spans)
    first, last = min(span[1] for span in spans), max(span[2] for span in spans)
    emptied = outcomes["prune_queue", "pruned"]
    params: Params = {"prunes": emptied, "loads": LOADS}
    report.figure("awa", "jobs_per_s", inserted / ((last - first) / 1e9), "jobs/s", **params)
    print_figures(report, spans, tried, params)
    report.limit("prunes", emptied, f">= {options.prunes}", emptied >= options.prunes)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
