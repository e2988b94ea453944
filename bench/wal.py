"""WAL: bytes a job over its whole life, by phase and by relation, and the floor of a plain table.

The main figures are without full pages. In a second set a checkpoint precedes each phase, so that
every page that it touches is written whole once; that share shrinks as checkpoints get rarer.
Maintenance is left out: it writes per slot of a ring, not per job.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.adapters import Installed, Process, System, add_systems_option
from bench.calls import Calls
from bench.cluster import Connection, Server, connect, server
from bench.jobs import ARGS_BYTES, args_text
from bench.report import Report, table

JOBS = {1: 2_000, 100: 20_000}  # by batch size
LIMITS = {1: 1_250.0, 100: 360.0}
FLOOR_BATCH, TIMES_FLOOR = 100, 1.3
MOST_SECONDS = 600
# No autovacuum, no checkpoint on time: nothing writes but the calls that are measured.
# The WAL of a run is kept, as it is read again to tell what it was for.
QUIET = {
    "autovacuum": "off",
    "bgwriter_lru_maxpages": "0",
    "checkpoint_timeout": "1d",
    "wal_keep_size": "8GB",
}

FLOOR_DDL = "CREATE TABLE floor_jobs (id bigint NOT NULL UNIQUE, args jsonb NOT NULL)"
FLOOR_INSERT = """
    INSERT INTO floor_jobs (id, args)
    SELECT %s + o, a FROM unnest(%s::jsonb[]) WITH ORDINALITY u (a, o)
"""
POSITION = "SELECT pg_current_wal_insert_lsn() - '0/0'"
# A record counts for the relation of its first block; leaves of a ring count together.
BY_RELATION = """
    SELECT regexp_replace(coalesce(c.relname, lower(r.resource_manager || ' ' || r.record_type)),
                          '_\\d+(_|$)', '\\1'),
           sum(r.record_length)
    FROM pg_get_wal_records_info('0/0'::pg_lsn + %s, '0/0'::pg_lsn + %s) r
    LEFT JOIN pg_get_wal_block_info('0/0'::pg_lsn + %s, '0/0'::pg_lsn + %s) b
        ON b.start_lsn = r.start_lsn AND b.block_id = 0
    LEFT JOIN pg_class c ON c.oid = pg_filenode_relation(b.reltablespace, b.relfilenode)
    GROUP BY 1
"""

Run = Callable[[Connection, "WalMeter", int, int], None]


class WalMeter:
    """Counts the WAL of each phase of a run."""

    def __init__(self, conn: Connection, *, checkpoints: bool) -> None:
        self._conn = conn
        self._checkpoints = checkpoints
        self.phases: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is written in here for a phase."""
        if self._checkpoints or not self.phases:
            self._conn.execute("CHECKPOINT")
        start = self._position()
        yield
        self.phases[name] = (start, self._position())

    def total(self) -> int:
        """Bytes of all phases."""
        return sum(end - start for start, end in self.phases.values())

    def by_relation(self) -> Counter[str]:
        """Bytes by relation, or by kind of record where there is none; the rest is padding."""
        sizes: Counter[str] = Counter()
        for start, end in self.phases.values():
            rows: list[Any] = self._conn.execute(BY_RELATION, [start, end, start, end]).fetchall()
            sizes.update({name: int(size) for name, size in rows})
        sizes["padding and page headers"] = self.total() - sizes.total()
        return sizes

    def _position(self) -> int:
        row: Any = self._conn.execute(POSITION).fetchone()
        return int(row[0])


def run_awa(conn: Connection, meter: WalMeter, jobs: int, batch: int) -> None:
    """Take jobs through their whole life, in batches."""
    calls = Calls(conn)
    with meter.phase("enqueue"):
        for _ in range(0, jobs, batch):
            calls.enqueue(batch)
    with meter.phase("claim"):
        claimed = [calls.claim(batch) for _ in range(0, jobs, batch)]
    with meter.phase("finish"):
        for receipt in claimed:
            calls.complete(receipt)


def run_floor(conn: Connection, meter: WalMeter, jobs: int, batch: int) -> None:
    """Store what no queue can do without."""
    row: Any = conn.execute("SELECT count(*) FROM floor_jobs").fetchone()
    with meter.phase("enqueue"):
        for first in range(0, jobs, batch):
            args = [args_text(i) for i in range(first, first + batch)]
            conn.execute(FLOOR_INSERT, [row[0] + first, args])


def run_system(system: System, dsn: str) -> Run:
    """The same by a system's own producer and worker, which claims and finishes as it does."""

    def run(conn: Connection, meter: WalMeter, jobs: int, batch: int) -> None:
        with Process(system) as process:
            process.ask("connect", dsn=dsn)
            with meter.phase("enqueue"):
                process.ask("load", jobs=jobs, batch=batch, within=MOST_SECONDS)
            conn.execute("ANALYZE")
            with meter.phase("run"):
                process.ask("drain", dsn=dsn, jobs=jobs, within=MOST_SECONDS)

    return run


def measure(
    report: Report, dsn: str, run: Run, system: str, batch: int, full_page_writes: str
) -> float:
    """Print the figures of one system and batch size; the total in bytes a job."""
    jobs = JOBS[batch]
    has_full_pages = full_page_writes == "on"
    with connect(dsn) as conn:
        conn.execute("CREATE EXTENSION pg_walinspect")
        # The lane, the worker's row, and sequences, which are logged ahead.
        run(conn, WalMeter(conn, checkpoints=False), 2 * batch, batch)
        meter = WalMeter(conn, checkpoints=has_full_pages)
        run(conn, meter, jobs, batch)
        relations = meter.by_relation()
        checksums: Any = conn.execute("SHOW data_checksums").fetchone()
    params = {
        "batch": batch,
        "jobs": jobs,
        "args_bytes": ARGS_BYTES,
        "full_page_writes": full_page_writes,
        "data_checksums": checksums[0],
    }
    name = "wal_bytes_per_job" + ("_with_full_pages" if has_full_pages else "")
    total = meter.total() / jobs
    report.figure(system, name, total, "bytes", **params)
    for phase, (start, end) in meter.phases.items():
        value = (end - start) / jobs
        report.figure(system, f"{name}_by_phase", value, "bytes", **params, phase=phase)
    for relation, size in relations.most_common():
        value = size / jobs
        report.figure(system, f"{name}_by_relation", value, "bytes", **params, relation=relation)
    return total


def measure_batch(
    report: Report, running: Server, systems: list[System], batch: int, full_page_writes: str
) -> dict[str, float]:
    """Print the figures of every system and the floor; bytes a job by system."""
    totals: dict[str, float] = {}
    with running.database(FLOOR_DDL) as dsn:
        totals["floor"] = measure(report, dsn, run_floor, "floor", batch, full_page_writes)
    with Installed(running, systems) as installed:
        for system in systems:
            with installed.database(system) as dsn:
                run = run_awa if system.name == "awa" else run_system(system, dsn)
                totals[system.name] = measure(
                    report, dsn, run, system.name, batch, full_page_writes
                )
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.wal", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    add_systems_option(parser, "awa")
    options = parser.parse_args()
    report = Report("wal")
    rows: list[list[object]] = []
    for full_page_writes in ("off", "on"):
        with server({**QUIET, "full_page_writes": full_page_writes}) as running:
            for batch, limit in LIMITS.items():
                totals = measure_batch(report, running, options.systems, batch, full_page_writes)
                what = f"batch {batch}, full_page_writes {full_page_writes}"
                rows += [[f"{name}, {what}", value] for name, value in totals.items()]
                if full_page_writes == "off" and "awa" in totals:
                    ours = totals["awa"]
                    report.limit(f"WAL bytes a job at {what}", ours, f"<= {limit}", ours <= limit)
                    if batch == FLOOR_BATCH:
                        ratio = ours / totals["floor"]
                        is_kept = ratio <= TIMES_FLOOR
                        report.limit(
                            f"times the floor at {what}", ratio, f"<= {TIMES_FLOOR}", is_kept
                        )
    table("WAL bytes a job, whole life", ["system", "bytes"], rows)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
