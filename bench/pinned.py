"""Pinned: a steady load for minutes under a snapshot that no vacuum may pass.

A REPEATABLE READ transaction is open all along. One job in ten fails at its first attempt, a second
queue is paused with a backlog, and one attempt runs from the first minute to the last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench import bloat
from bench.adapters import Installed, Process, System, add_systems_option
from bench.cluster import Connection, change_settings, connect, server
from bench.report import Report, percentile, say, table

BATCH = 8  # jobs of one enqueue call
FAIL_EVERY = 10
BACKLOG = 10_000
SAMPLES_AT_LEAST = 6
SHORT = 5  # samples at the beginning and at the end that are compared
CLAIM_LIKE = {"awa": "%claim_ready_runtime%"}
ROTATE_SECONDS = 30
SETTINGS = {
    "terminal_retention_seconds": 30,
    "attempt_evidence_seconds": 30,
    "queue_rotate_seconds": ROTATE_SECONDS,
    "claim_rotate_seconds": ROTATE_SECONDS,
}
# After the snapshot is gone: turn the rings quickly, as two wraps are waited for.
AFTERWARDS = {
    "terminal_retention_seconds": 1,
    "attempt_evidence_seconds": 1,
    "dump_lock_seconds": 1,
    "queue_rotate_seconds": 0.5,
    "claim_rotate_seconds": 0.5,
}
WRAPS = 2
WRAP_SECONDS = 600
CATCH_UP_SECONDS = 30
ANSWER_SECONDS = 120

PG_CLASS_DEAD = 2_000
BUFFERS_TIMES, P99_TIMES, SIZE_TIMES, DEAD_TIMES = 1.1, 1.5, 1.5, 1.2
BUCKET = "deferred_jobs"
LEAST_SHARE = 0.99

Rows = dict[str, list[float]]


class Watch:
    """Samples one system once an interval and prints the figures."""

    def __init__(
        self, report: Report, system: System, conn: Connection, worker: Process, minutes: float
    ) -> None:
        self._report = report
        self._system = system
        self._conn = conn
        self._worker = worker
        self._minutes = minutes
        self._claim_like = CLAIM_LIKE.get(system.name, "-")
        self.first = self.last = self._sample()
        self.rows: Rows = defaultdict(list)
        self.samples: list[bloat.Sample] = []
        self.begun = 0

    def look(self, minute: float) -> None:
        """Take a sample."""
        before, self.last = self.last, self._sample()
        self.samples.append(self.last)
        began = self._worker.ask("all_began", within=ANSWER_SECONDS)
        claims = self._worker.ask("claim_times")
        self.begun += len(began)
        milliseconds = [(at - start) / 1e6 for start, at in began] or [0.0]
        claimed = self.last.claims - before.claims
        figures = {
            "p50_ms": (percentile(milliseconds, 50), "ms"),
            "p99_ms": (percentile(milliseconds, 99), "ms"),
            "jobs": (len(began), "jobs"),
            "buffers_per_job": (
                (self.last.buffers - before.buffers) / max(1, len(began)),
                "buffers",
            ),
            "dead_tuples": (self.last.dead, "rows"),
            "catalog_dead_tuples": (self.last.catalog_dead, "rows"),
            "pg_class_dead_tuples": (self.last.tables["pg_class"].dead, "rows"),
            "table_bytes": (self.last.size, "bytes"),
        }
        if claims:
            figures |= {
                "claim_p50_ms": (percentile(claims, 50), "ms"),
                "claim_p99_ms": (percentile(claims, 99), "ms"),
                "buffers_per_claim": (
                    (self.last.claim_buffers - before.claim_buffers) / max(1, claimed),
                    "buffers",
                ),
            }
        for name, (value, unit) in figures.items():
            self.rows[name].append(value)
            self._report.figure(
                self._system.name, name, value, unit, minute=minute, minutes=self._minutes
            )

    def count_rest(self) -> None:
        """Count what began after the last sample."""
        self.begun += len(self._worker.ask("all_began", within=ANSWER_SECONDS))

    def _sample(self) -> bloat.Sample:
        return bloat.sample(self._conn, self._claim_like)


@contextmanager
def pinned(dsn: str) -> Iterator[None]:
    """Hold a snapshot."""
    with connect(dsn) as conn:
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        conn.execute("SELECT count(*) FROM pg_class")
        yield
        conn.execute("ROLLBACK")


def run_system(
    report: Report, installed: Installed, system: System, options: argparse.Namespace
) -> Rows:
    """One system from beginning to end."""
    is_ours = system.name == "awa"
    with (
        installed.database(system) as dsn,
        connect(dsn) as conn,
        Process(system) as worker,
        Process(system) as producer,
    ):
        bloat.prepare(conn)
        if is_ours:
            change_settings(conn, SETTINGS)
        producer.ask("connect", dsn=dsn)
        producer.ask("backlog", jobs=options.backlog, within=ANSWER_SECONDS)
        worker.ask("record", dsn=dsn)
        producer.ask("hold")
        with pinned(dsn):
            watch = Watch(report, system, conn, worker, options.minutes)
            sent = load(producer, watch, options)
        if is_ours:
            check(report, watch, sent, options.rate)
            check_heads(report, watch, conn)
            generations = wait_for_wraps(conn, producer)
            check_reclaimed(report, conn, generations)
        worker.ask("stop")
    rate = sent["jobs"] / ((sent["last"] - sent["first"]) / 1e9)
    report.figure(system.name, "enqueued_per_s", rate, "jobs/s", minutes=options.minutes)
    return watch.rows


def load(producer: Process, watch: Watch, options: argparse.Namespace) -> dict[str, Any]:
    """Enqueue at the rate for all of the time, sampling; what was sent."""
    seconds = options.minutes * 60
    interval = min(60.0, seconds / SAMPLES_AT_LEAST)
    jobs = int(options.rate * seconds)
    start = time.monotonic()
    producer.tell("steady", jobs=jobs, rate=options.rate, batch=BATCH, fail_every=FAIL_EVERY)
    for number in range(1, round(seconds / interval) + 1):
        time.sleep(max(0.0, start + number * interval - time.monotonic()))
        watch.look(number * interval / 60)
    sent: dict[str, Any] = producer.answer(seconds * 10 + ANSWER_SECONDS)
    end = time.monotonic() + CATCH_UP_SECONDS
    while watch.begun < jobs and time.monotonic() < end:
        time.sleep(1)
        watch.count_rest()
    return sent


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last samples."""
    count = max(1, min(SHORT, len(values) // 2))
    return median(values[:count]), median(values[-count:])


def growth(values: Sequence[float]) -> float:
    """The most of the second half of the samples, against the most of the first."""
    half = len(values) // 2
    return max(values[half:]) / max(1, *values[:half])


def check(report: Report, watch: Watch, sent: dict[str, Any], rate: float) -> None:
    """Compare the run with its limits."""
    first, last = watch.first.own(), watch.last.own()

    def rewritten(name: str) -> int:
        return last[name].rewritten - (first[name].rewritten if name in first else 0)

    buckets = [name for name in last if BUCKET in name]
    append_only = [
        name
        for name, t in last.items()
        if name.endswith("_ring_rotations") or (t.is_partition and name not in buckets)
    ]
    total = sum(rewritten(name) for name in append_only)
    report.limit(f"rows rewritten in {len(append_only)} leaves and ledgers", total, "0", not total)
    for name in sorted(last):
        if name not in append_only and rewritten(name):
            say(f"       rewritten in {name}: {rewritten(name):,}, dead {last[name].dead:,}")
    dead = max(t.dead for s in watch.samples for name, t in s.own().items() if name in append_only)
    report.limit("most dead rows of a leaf or ledger", dead, "0", not dead)
    # Deferred jobs are ordinary rows in tables of a minute each, emptied when it is over.
    dead_in_buckets = [sum(s.own()[name].dead for name in buckets) for s in watch.samples]
    ratio = growth(dead_in_buckets)
    report.limit(
        "dead rows of deferred jobs, second half", ratio, f"<= {DEAD_TIMES}", ratio <= DEAD_TIMES
    )
    most = max(watch.rows["pg_class_dead_tuples"])
    report.limit("dead rows of pg_class", most, f"<= {PG_CLASS_DEAD}", most <= PG_CLASS_DEAD)
    for name, times in (("buffers_per_claim", BUFFERS_TIMES), ("claim_p99_ms", P99_TIMES)):
        early, late = ends(watch.rows[name])
        ratio = late / early
        report.limit(f"{name}, end against beginning", ratio, f"<= {times}", ratio <= times)
    sizes = watch.rows["table_bytes"]
    ratio = growth(sizes)
    report.limit("table bytes, second half", ratio, f"<= {SIZE_TIMES}", ratio <= SIZE_TIMES)
    kept = sent["jobs"] / ((sent["last"] - sent["first"]) / 1e9) / rate
    report.limit("rate kept", kept, f">= {LEAST_SHARE}", kept >= LEAST_SHARE)
    # The job that is held began as well.
    missing = sent["jobs"] + 1 - watch.begun
    report.limit("jobs that never began", missing, "0", not missing)


def check_heads(report: Report, watch: Watch, conn: Connection) -> None:
    """The claim heads are rewritten by prunes only: once a lane, and no ring turned oftener."""
    name = next(name for name in watch.last.tables if name.endswith("queue_claim_heads"))
    before = watch.first.tables[name].rewritten
    rewritten = watch.last.tables[name].rewritten - before
    row: Any = conn.execute("SELECT sum(lanes) FROM awa.queues").fetchone()
    turned = sum(generation for generation, _ in generations_of(conn).values())
    most = int(row[0]) * turned
    is_kept = rewritten <= most
    report.limit("claim heads rewritten", rewritten, f"<= {most} (lanes x rotations)", is_kept)


def generations_of(conn: Connection) -> dict[str, tuple[int, int]]:
    """The generation and the number of slots of each ring."""
    rows: list[Any] = conn.execute(
        "SELECT ring, max(generation), count(*) FROM awa.ring_status()"
        " WHERE ring <> 'deferred' GROUP BY ring"
    ).fetchall()
    return {ring: (generation or 0, slots) for ring, generation, slots in rows}


def wait_for_wraps(conn: Connection, producer: Process) -> dict[str, int]:
    """Load until each ring went round twice; the generations that were current before."""
    change_settings(conn, AFTERWARDS)
    before = generations_of(conn)
    end = time.monotonic() + WRAP_SECONDS
    while time.monotonic() < end:
        producer.ask("steady", jobs=400, rate=200, batch=BATCH)
        after = generations_of(conn)
        if all(after[ring][0] - g >= WRAPS * slots for ring, (g, slots) in before.items()):
            break
    return {ring: generation for ring, (generation, _) in before.items()}


def check_reclaimed(report: Report, conn: Connection, generations: dict[str, int]) -> None:
    """Say which slots still hold what was there when the snapshot ended."""
    slots: list[Any] = conn.execute(
        "SELECT ring, slot, generation, row_count, bytes, blocked_by FROM awa.ring_status()"
    ).fetchall()
    for ring, generation in generations.items():
        now = max(g or 0 for r, _, g, *_ in slots if r == ring)
        say(f"       {ring} ring: generation {generation} at release, {now} now")
        wraps = (now - generation) / sum(r == ring for r, *_ in slots)
        report.limit(f"{ring} ring, wraps", wraps, f">= {WRAPS}", wraps >= WRAPS)
    old = [s for s in slots if s[3] and (s[2] or 0) <= generations[s[0]]]
    for ring, slot, generation, count, size, why in old:
        say(f"       {ring} {slot}: generation {generation}, {count:,} rows, {size:,} bytes: {why}")
    report.limit("slots not reclaimed after the wraps", len(old), "0", not old)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.pinned", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=int, default=800, help="jobs a second")
    parser.add_argument("--backlog", type=int, default=BACKLOG, help="of the paused queue")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    add_systems_option(parser, "awa,awa-pg,graphile-worker")
    options = parser.parse_args()
    for system in options.systems:
        if not system.has_retries:
            parser.error(f"{system.name} has no retries or no second queue here")
    report = Report("pinned")
    rows: list[list[object]] = []
    with server(bloat.SETTINGS) as running, Installed(running, options.systems) as installed:
        for system in options.systems:
            say(f"{system.name}: {options.minutes:g} minutes")
            figures = run_system(report, installed, system, options)
            for name, values in figures.items():
                rows.append([f"{system.name} {name}", *ends(values), max(values)])
    table("a pinned snapshot (medians)", ["figure", "beginning", "end", "most"], rows)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
