"""Case b28: promotion at volume: many jobs due at once, and many more that are not.

Shown elsewhere: what promotion costs under a pinned snapshot
(test_g8_promotion_costs_the_same_however_long_a_snapshot_is_pinned in test_deferred.py); memory of
a promotion of large jobs (test_g7_promotion_of_many_large_jobs_stays_small in test_guarantees.py);
one job that cannot be promoted (promote_due.sql).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

import awa
from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    claim,
    claim_all,
    complete,
    counts,
    insert,
    insert_many,
    open_transaction,
    read_buffers,
    rotate,
    set_settings,
    tick,
    value,
)

PROMOTE = """SELECT * FROM awa.tick('{"steps": ["promote"]}')"""
REFILL = """SELECT * FROM awa.tick('{"steps": ["refill"]}')"""
PORTION = 4096
FAR_AHEAD = ("30 days", "8 minutes")  # in the leaf for later, and in a bucket


def defer(conn: psycopg.Connection, queue: str, count: int, run_at: object) -> list[int]:
    """Defer jobs of one queue to one time; their ids."""
    rows = conn.execute(
        "SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[%s]), queue => %s,"
        " run_at => %s)",
        [count, queue, run_at],
    )
    return [job_id for (job_id,) in rows]


def fill_far(database: Database, count: int) -> None:
    """Defer jobs to times that this test does not reach, half of them within ten minutes."""

    def part(ahead: str) -> None:
        with database.connect() as conn:
            for start in range(0, count // 2, 10_000):
                size = min(10_000, count // 2 - start)
                moment = f"clock_timestamp() + interval '{ahead}' + interval '{start} ms'"
                conn.execute(
                    "SELECT count(*) FROM awa.insert_many('far', array_fill('{}'::jsonb,"
                    f" ARRAY[{size}]), queue => 'far{start % 7}', run_at => {moment})"
                )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(part, FAR_AHEAD))


def look_costs(conn: psycopg.Connection) -> dict[str, int]:
    """Buffers of a promotion and of a refill that find nothing due."""
    conn.execute(PROMOTE)
    conn.execute(REFILL)
    costs = {}
    for name, query in (("promote", PROMOTE), ("refill", REFILL)):
        readings = []
        for _ in range(3):
            # A refill looks every 15 seconds; here it always does.
            conn.execute("SELECT setval('awa.deferred_refill', 1)")
            readings.append(read_buffers(conn, query))
        costs[name] = min(readings)
    return costs


# Broken by a look for due jobs that does not use the index (enable_seqscan of _promote_due).
@pytest.mark.parametrize("many", [20_000, pytest.param(5_000_000, marks=pytest.mark.long)])
def test_b28_finding_what_is_due_costs_the_same_however_much_is_not(
    database: Database, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str], many: int
) -> None:
    fill_far(database, 200)
    look_costs(conn)  # warms the session
    few_cost = look_costs(conn)
    fill_far(database, many)
    cost = look_costs(conn)
    conn.execute("ANALYZE awa.deferred_jobs")
    analysed = look_costs(conn)
    with capsys.disabled():
        print(f"\nlook for due jobs, in buffers: {few_cost} with 200 ahead, {cost} with {many}")
    for costs in (cost, analysed):
        # A level or two of the indexes is what more rows may cost: 17 leaves, and one.
        assert costs["promote"] <= few_cost["promote"] + 2 * 17
        assert costs["refill"] <= few_cost["refill"] + 2 * 17
    assert tick(conn, "promote") == {"promote": "done"}
    assert value(conn, "SELECT count(*) FROM awa.ready_entries") == 0


class Promoters:
    """Processes that tick, of which one is killed now and then."""

    def __init__(self, database: Database, kills: int) -> None:
        self._database = database
        self._kills = kills
        self.moved = 0
        self.killed = 0
        self.is_over = False
        self.milliseconds: list[float] = []
        self.portions: list[int] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        """Promote until nothing is left; a killed process is followed by another one."""
        while True:
            with self._database.connect() as conn:
                conn.execute("SET application_name = 'promoter'; SET statement_timeout = '5s'")
                try:
                    while True:
                        [(_, outcome, rows, milliseconds, _)] = conn.execute(PROMOTE).fetchall()
                        assert outcome in ("done", "contended")
                        if outcome == "done":
                            self.portions.append(rows)
                            self.milliseconds.append(milliseconds)
                            if rows == 0:
                                self.is_over = True
                                return
                        else:
                            time.sleep(0.01)
                except psycopg.OperationalError:
                    self.killed += 1

    def kill(self, conn: psycopg.Connection) -> None:
        """Kill a promotion under way, as often as was asked for."""
        while self.killed < self._kills and not self.is_over:
            before = self.killed
            hit = conn.execute(
                "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a JOIN pg_locks l"
                " ON l.pid = a.pid AND l.locktype = 'relation' AND l.mode = 'RowExclusiveLock'"
                " WHERE a.application_name = 'promoter' AND a.datname = current_database()"
                " AND l.relation::regclass::text LIKE 'awa.ready_entries%' LIMIT 1"
            ).fetchone()
            # Not a second one before the first is counted.
            while hit and self.killed == before and not self.is_over:
                time.sleep(0.005)
            time.sleep(0.005)


def cancel_some(
    database: Database, ids: Sequence[int], count: int, answers: dict[str, list[int]]
) -> None:
    """Cancel jobs while promotion runs, some before it has come to them, some after."""
    with database.connect() as conn:
        for job_id in random.Random(1).sample(ids, count):
            while True:
                try:
                    answer = value(conn, "SELECT awa.cancel_job(%s)", job_id)
                    break
                except psycopg.errors.SerializationFailure:
                    continue
            answers[answer].append(job_id)


# Broken by a promotion without limit, by one that takes what it has locked in another order, and
# by a cancel that takes no lock of the deferred row (_find_deferred).
@pytest.mark.parametrize(
    ("queues", "each", "kills"),
    [(40, 250, 2), pytest.param(200, 2500, 10, marks=pytest.mark.long)],
)
def test_b28_many_jobs_due_at_once_come_in_portions_and_in_their_order(
    database: Database,
    conn: psycopg.Connection,
    capsys: pytest.CaptureFixture[str],
    queues: int,
    each: int,
    kills: int,
) -> None:
    names = [f"q{n}" for n in range(queues)]
    for name in names:
        conn.execute("SELECT awa.declare_queue(%s)", [name])
    due = datetime.now(UTC) + timedelta(seconds=1 + queues * each / 20_000)
    # In rounds, so that each queue has some of the first ids and some of the last.
    ids: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(10):
        for name in names:
            ids[name] += defer(conn, name, each // 10, due)
    everything = sorted(job_id for mine in ids.values() for job_id in mine)
    fill_far(database, 2000)
    assert datetime.now(UTC) < due
    promoters = Promoters(database, kills)
    cancelled: dict[str, list[int]] = defaultdict(list)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as pinned:
        pinned.execute("SELECT FROM awa.queue_meta")
        while datetime.now(UTC) < due:
            time.sleep(0.01)
        with ThreadPoolExecutor(5) as pool:
            jobs = [pool.submit(promoters.run) for _ in range(2)]
            jobs += [
                pool.submit(promoters.kill, conn),
                pool.submit(cancel_some, database, everything, len(everything) // 50, cancelled),
            ]
            for job in jobs:
                job.result()
    assert set(cancelled) == {"cancelled"}
    with capsys.disabled():
        print(
            f"\npromotion of {queues} x {each}: {len(promoters.portions)} portions, at most"
            f" {max(promoters.milliseconds):.0f} ms, {promoters.killed} killed"
        )
    assert promoters.killed == kills
    assert max(promoters.portions) <= PORTION
    assert max(promoters.milliseconds) < 1000
    # Progress was kept: what was moved was moved once.
    gone = set(cancelled["cancelled"])
    assert sum(promoters.portions) <= len(everything)
    # Each lane has its jobs in the order of their ids, since all were due at once.
    promoted = 0
    for name in names:
        claimed = [attempt.job_id for attempt in claim_all(conn, name, 1000)]
        assert claimed == [job_id for job_id in ids[name] if job_id not in gone]
        promoted += len(claimed)
    assert promoted == len(everything) - len(gone)


# Broken by an order of promotion that goes by queue.
def test_b28_promotion_is_fair_over_queues(conn: psycopg.Connection) -> None:
    """What was due before goes before, whichever queue has how many."""
    names = ["busy", *(f"q{n}" for n in range(10))]
    for name in names:
        conn.execute("SELECT awa.declare_queue(%s)", [name])
    due = datetime.now(UTC) + timedelta(seconds=1)
    defer(conn, "busy", 300, due)
    for name in names[1:]:
        defer(conn, name, 10, due + timedelta(milliseconds=1))
    defer(conn, "busy", 3000, due + timedelta(milliseconds=2))
    while datetime.now(UTC) < due + timedelta(milliseconds=3):
        time.sleep(0.01)
    rows = 'SELECT rows FROM awa.tick(\'{"steps": ["promote"], "rows": 400}\')'
    assert value(conn, rows) == 400
    assert counts(conn, "busy") == {"available": 300, "scheduled": 3000}
    for name in names[1:]:
        assert counts(conn, name) == {"available": 10}


def percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


@pytest.mark.long
def test_b28_nothing_else_waits_for_a_promotion_of_half_a_million_jobs(
    database: Database, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims of another queue, rescue and prune, while a worker's maintenance promotes."""
    set_settings(conn, **PRUNE_AT_ONCE)
    fill_far(database, 5_000_000)
    due = datetime.now(UTC) + timedelta(seconds=60)
    for n in range(200):
        defer(conn, f"q{n}", 2500, due)
    worker = uuid.uuid4()

    def claims(condition: Callable[[], bool]) -> list[float]:
        """How long claims of ten jobs take, while something is so."""
        taken = []
        with database.connect() as mine:
            while condition():
                insert_many(mine, 10, "other")
                begin = time.monotonic()
                attempts = claim(mine, "other", 10, worker)
                taken.append(time.monotonic() - begin)
                complete(mine, attempts, worker)
                time.sleep(0.01)
        return taken

    def is_early() -> bool:
        return datetime.now(UTC) < due - timedelta(seconds=1)

    def left() -> int:
        query = "SELECT count(*) FROM awa.deferred_jobs WHERE slot < 16 AND run_at <= now()"
        return int(value(conn, query))

    async def scenario() -> dict[str, Any]:
        async with awa.Worker(database.dsn, {"idle": lambda: None}, queues=["idle"]):
            before = await asyncio.to_thread(claims, is_early)
            await asyncio.sleep(2)
            insert(conn, "overdue")
            assert len(claim(conn, "overdue", 1, deadline_seconds=0.01)) == 1
            rotate(conn, "claim")
            end = threading.Event()
            during = asyncio.create_task(asyncio.to_thread(claims, lambda: not end.is_set()))
            size = "SELECT pg_relation_size('awa.lease_claim_batches_0')"
            begin = time.monotonic()
            done: dict[str, float] = {}
            while await asyncio.to_thread(left):
                if "rescue" not in done and not counts(conn, "overdue").get("running"):
                    done["rescue"] = time.monotonic() - begin
                if "prune" not in done and not value(conn, size):
                    done["prune"] = time.monotonic() - begin
                await asyncio.sleep(0.2)
            end.set()
            return {"before": before, "during": await during, "done": done}

    facts = asyncio.run(scenario())
    before, during = percentile(facts["before"]), percentile(facts["during"])
    with capsys.disabled():
        print(
            f"\nclaim p99 {before * 1000:.1f} ms, {during * 1000:.1f} ms while 500,000 jobs are"
            f" promoted; on time meanwhile: {facts['done']}"
        )
    assert during < 1.5 * before
    assert set(facts["done"]) == {"rescue", "prune"}
    assert max(facts["done"].values()) < 10
    ready = "SELECT (c.available + c.running) FROM awa.queue_counts(%s) c"
    assert [value(conn, ready, f"q{n}") for n in range(200)] == [2500] * 200
