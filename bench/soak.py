"""Soak: mixed load for half an hour, a worker killed every minute, and every job accounted for.

All along there are a paused queue, an open attempt, and idle transactions with an id in this and in
another database. What was enqueued, run and ended is written down outside and compared at the end.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from psycopg.types.json import Jsonb

from bench.adapters import SYSTEMS, Installed
from bench.child import Child
from bench.cluster import Connection, Server, change_settings, connect, server
from bench.report import Report, say, table
from bench.soak_jobs import DEAD, HELD_QUEUE, HOLD, QUEUES, Ledger, produce, tick, work

AWA = SYSTEMS["awa"]
PRODUCERS = 2
NUMBERS_APART = 100_000_000
TICKERS = 2
BACKLOG = 10_000
LOOK_SECONDS = 5.0
KILL_SECONDS = 60.0
SAMPLES_AT_LEAST = 6
DRAIN_SECONDS = 180
ANSWER_SECONDS = 120
SETTINGS = {
    "terminal_retention_seconds": 60,
    "attempt_evidence_seconds": 60,
    "queue_rotate_seconds": 5,
    "claim_rotate_seconds": 5,
    "staleness_seconds": 10,
    "heartbeat_seconds": 2,
}
MEMORY_TIMES = 1.25
# What a server says of a client that was killed.
OF_KILLS = re.compile(
    r"unexpected EOF on client connection|could not (receive|send) data (from|to) client|"
    r"connection to client lost|terminating connection because"
)
SEVERE = re.compile(r" (WARNING|ERROR|FATAL|PANIC): ")
HELD = "SELECT count(*) FROM awa.insert_many('succeed', array_fill('{}'::jsonb, array[%s]), %s)"
WAITING = """
    SELECT sum(c.scheduled + c.available + c.running + c.retryable)
    FROM unnest(%s::text[]) q, awa.queue_counts(q) c
"""
COUNTS = """
    SELECT sum(c.completed), sum(c.failed), sum(c.cancelled), sum(c.dead_lettered)
    FROM unnest(%s::text[]) q, awa.queue_counts(q) c
"""
COUNTED = ("completed", "failed", "cancelled", DEAD)


def anonymous_bytes(pid: int) -> int | None:
    """Memory of a process that it shares with nobody."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


class Watch:
    """What an observer sees: how jobs ended, memory, ring generations."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self.ends: dict[int, set[str]] = defaultdict(set)
        self.memory: dict[str, list[int]] = defaultdict(list)
        self.generations: dict[str, list[int]] = defaultdict(list)

    def see_ends(self) -> None:
        """Write down the jobs that have ended and are not pruned yet."""
        rows: list[Any] = self._conn.execute(
            "SELECT job_id, state::text FROM awa.terminal_jobs"
        ).fetchall()
        for job_id, state in rows:
            self.ends[job_id].add(state)

    def see_dead_letters(self) -> None:
        """The same of the dead letters, which stay."""
        rows: list[Any] = self._conn.execute("SELECT job_id FROM awa.dlq").fetchall()
        for (job_id,) in rows:
            self.ends[job_id].add(DEAD)

    def see_memory(self, worker: int) -> None:
        """Sample the worker that nobody kills, the backends, and the rings."""
        pids: list[Any] = self._conn.execute(
            "SELECT pid, application_name FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
        samples = {"worker": anonymous_bytes(worker)}
        samples |= {f"backend {pid} {name}": anonymous_bytes(pid) for pid, name in pids}
        for name, size in samples.items():
            if size is not None:
                self.memory[name].append(size)
        rows: list[Any] = self._conn.execute(
            # The buckets of deferred jobs turn with the clock, whatever happens.
            "SELECT ring, max(generation) FROM awa.ring_status()"
            " WHERE ring <> 'deferred' GROUP BY ring"
        ).fetchall()
        for ring, generation in rows:
            self.generations[ring].append(generation or 0)


@contextmanager
def idle_with_id(dsn: str) -> Iterator[None]:
    """A transaction that has an id and does nothing."""
    with connect(dsn) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT pg_current_xact_id()")
        yield
        conn.execute("ROLLBACK")


def prepare(conn: Connection) -> None:
    """Settings, queues, and the backlog of the paused one."""
    change_settings(conn, SETTINGS)
    for queue, opts in QUEUES.items():
        conn.execute("SELECT awa.declare_queue(%s, %s)", [queue, Jsonb(opts)])
    conn.execute("CREATE TABLE soak_rows (number bigint PRIMARY KEY)")
    conn.execute("SELECT awa.pause_queue(%s)", [HELD_QUEUE])
    conn.execute(HELD, [BACKLOG, HELD_QUEUE])


def hold(conn: Connection, journal: Path) -> int:
    """Start the attempt that stays open; the job's id."""
    row: Any = conn.execute(
        "SELECT job_id FROM awa.insert_job(%s, queue => 'soak_plain')", [HOLD]
    ).fetchone()
    end = time.monotonic() + ANSWER_SECONDS
    while not journal.exists() or HOLD not in journal.read_text():
        if time.monotonic() > end:
            raise TimeoutError("the worker did not start the job to hold")
        time.sleep(0.1)
    return int(row[0])


def run(
    server: Server, dsn: str, journal: Path, options: argparse.Namespace
) -> tuple[Watch, Ledger, int, int]:
    """The whole soak; what was seen, what was enqueued, the held job, and how often was killed."""
    seconds = options.minutes * 60
    look, kill = min(LOOK_SECONDS, seconds / 10), min(KILL_SECONDS, seconds / 3)
    with ExitStack() as stack:
        conn = stack.enter_context(connect(dsn))
        watch = Watch(conn)
        prepare(conn)
        survivor = stack.enter_context(Child(work, dsn, str(journal)))
        held = hold(conn, journal)
        stack.enter_context(idle_with_id(dsn))
        stack.enter_context(idle_with_id(server.dsn))
        for _ in range(TICKERS):
            stack.enter_context(Child(tick, dsn))
        rate = options.rate / PRODUCERS
        producers = [
            stack.enter_context(Child(produce, dsn, number * NUMBERS_APART, rate))
            for number in range(1, PRODUCERS + 1)
        ]
        start, kills = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            with Child(work, dsn, str(journal)) as victim:
                until = min(time.monotonic() + kill, start + seconds)
                while time.monotonic() < until:
                    time.sleep(look)
                    watch.see_ends()
                victim.kill()
                kills += 1
            watch.see_memory(survivor.pid)
        ledger = Ledger()
        for producer in producers:
            producer.pipe.send("stop")
            part = producer.receive(ANSWER_SECONDS)
            ledger.expected |= part.expected
            ledger.rolled_back |= part.rolled_back
            ledger.revoked |= part.revoked
        drain(conn, watch)
        watch.see_dead_letters()
    return watch, ledger, held, kills


def drain(conn: Connection, watch: Watch) -> None:
    """Wait until nothing is left but the attempt that is held."""
    end = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < end:
        watch.see_ends()
        row: Any = conn.execute(WAITING, [list(QUEUES)]).fetchone()
        if row[0] == 1:
            break
        time.sleep(1)
    watch.see_ends()


def check_ledger(
    report: Report, watch: Watch, ledger: Ledger, journal: Path, conn: Connection
) -> None:
    """Compare what was enqueued with what was run and how it ended."""
    ran = {int(line.split()[0]) for line in journal.read_text().splitlines()} - {0}
    expected = dict(ledger.expected.values())
    wrong = {
        "jobs that did not end": sum(job_id not in watch.ends for job_id in expected),
        "jobs that ended otherwise": sum(
            watch.ends[job_id] != {end} for job_id, end in expected.items() if job_id in watch.ends
        ),
        "jobs that ended without having been committed": len(watch.ends.keys() - expected.keys()),
        "jobs that ended without having been run": len(
            ledger.expected.keys() - ledger.revoked - ran
        ),
        "jobs that were run but rolled back": len(ran & ledger.rolled_back),
        "jobs that were run but cancelled before": len(ran & ledger.revoked),
    }
    for what, count in wrong.items():
        report.figure("awa", "ledger_differences", count, "jobs", what=what)
        report.limit(what, count, "0", not count)
    row: Any = conn.execute(COUNTS, [list(QUEUES)]).fetchone()
    ends = Counter(end for _, end in ledger.expected.values())
    for end, count in zip(COUNTED, row, strict=True):
        # The attempt that was held has completed by now.
        off = int(count) - ends[end] - (end == "completed")
        report.limit(f"queue_counts, {end} jobs too many", off, "0", not off)
    rows: Any = conn.execute("SELECT count(*) FROM soak_rows").fetchone()
    say(f"{len(expected):,} jobs enqueued, {len(ran):,} run, {rows[0]:,} in their own transaction")


def check_memory(report: Report, watch: Watch) -> None:
    """Say whether memory is flat and the rings turn."""
    rows: list[list[object]] = []
    most = max(len(values) for values in watch.memory.values())
    for name, values in watch.memory.items():
        if len(values) < most:
            continue  # of a worker that was killed
        early, late = ends(values)
        rows.append([name, early / 2**20, late / 2**20])
        kind = name.split()[0]
        for number, value in enumerate(values):
            report.figure("awa", "memory_bytes", value, "bytes", process=name, sample=number)
        ratio = late / early
        is_kept = ratio <= MEMORY_TIMES
        report.limit(
            f"memory of a {kind}, end against beginning", ratio, f"<= {MEMORY_TIMES}", is_kept
        )
    for ring, generations in watch.generations.items():
        steps = [b - a for a, b in itertools.pairwise(generations)]
        least = min(steps, default=0)
        report.figure("awa", "generations_least", least, "generations", ring=ring)
        report.limit(f"{ring} ring, least turns between two kills", least, ">= 1", least >= 1)
    table("memory, MB", ["process", "beginning", "end"], rows)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the second and of the last quarter: the first one warms up."""
    quarter = max(1, len(values) // 4)
    return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def check_log(report: Report, log: str) -> None:
    """Say what the server complained about besides the clients that were killed."""
    severe = [line for line in log.splitlines() if SEVERE.search(line)]
    unexpected = [line for line in severe if not OF_KILLS.search(line)]
    for line in unexpected[:20]:
        say(f"       {line}")
    report.limit("lines in the server's log", len(unexpected), "0", not unexpected)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=200, help="jobs a second")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("soak")
    with (
        tempfile.TemporaryDirectory() as folder,
        server() as running,
        Installed(running, [AWA]) as installed,
        installed.database(AWA) as dsn,
    ):
        journal = Path(folder) / "journal"
        before = len(running.log_file.read_text(errors="replace"))
        watch, ledger, held, kills = run(running, dsn, journal, options)
        watch.ends.pop(held, None)
        with connect(dsn) as conn:
            check_ledger(report, watch, ledger, journal, conn)
        check_memory(report, watch)
        check_log(report, running.log_file.read_text(errors="replace")[before:])
    params = {"minutes": options.minutes, "rate": options.rate, "kills": kills}
    report.figure("awa", "jobs", len(ledger.expected), "jobs", **params)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
