"""Case b18: many claimers, some killed in the middle; each job is claimed once per lease.

Shown elsewhere: limits of 0, -1 and NULL are refused, and a rolled back claim takes nothing
(claim_ready.sql); a claim that rolls back after others have claimed behind it
(test_g2_a_claim_that_is_rolled_back_can_be_claimed_again in test_guarantees.py); the same with
processes, cancels and rescues against a ledger outside the database (test_race.py).
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import psycopg
import pytest
from psycopg.types.json import Jsonb

from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    Attempt,
    claim,
    claim_all,
    complete,
    counts,
    finish,
    insert_many,
    open_transaction,
    set_settings,
    terminate,
    tick,
)

LANE = 2**42


@dataclass
class Ledger:
    """What claimers got and committed, by hand."""

    claims: list[list[Attempt]] = field(default_factory=list)
    killed: int = 0
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, attempts: list[Attempt]) -> None:
        with self.lock:
            self.claims.append(attempts)


class Race:
    """Claimers that complete what they get, but for a tenth that they retry once or twice."""

    def __init__(self, database: Database, limit: int, kills: int) -> None:
        self.database = database
        self.limit = limit
        self.kills = kills
        self.ledger = Ledger()
        self.done = threading.Event()

    def claimer(self, seed: int) -> None:
        chance = random.Random(seed)
        instance = uuid.UUID(int=1000 + seed, version=4)
        while not self.done.is_set():
            with self.database.connect(autocommit=False) as conn:
                conn.execute("SET application_name = 'claimer'")
                conn.commit()
                try:
                    while not self.done.is_set():
                        self._round(conn, instance, chance)
                except psycopg.OperationalError:
                    with self.ledger.lock:
                        self.ledger.killed += 1

    def _round(self, conn: psycopg.Connection, instance: uuid.UUID, chance: random.Random) -> None:
        attempts = claim(conn, limit=self.limit, instance=instance)
        if len(attempts) > self.limit:
            self.ledger.problems.append(f"{len(attempts)} jobs for {self.limit}")
        if not attempts:
            conn.commit()
            time.sleep(0.002)
            return
        if chance.random() < 0.1:
            conn.rollback()
            return
        if chance.random() < 0.05:
            time.sleep(0.01)  # a good moment to be killed
        conn.commit()
        self.ledger.note(attempts)
        conn.autocommit = True
        again = [a for a in attempts if a.attempt < 3 and chance.random() < 0.1]
        complete(conn, [a for a in attempts if a not in again], instance)
        finish(conn, [a.item("retry", delay_seconds=0) for a in again], instance)
        conn.autocommit = False

    def killer(self) -> None:
        with self.database.connect() as conn:
            # What a claimer had committed is lost with it until a rescue: so not to the last.
            while not self.done.wait(0.05) and self.ledger.killed < self.kills:
                conn.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'claimer' AND datname = current_database()"
                    " AND backend_xid IS NOT NULL ORDER BY random() LIMIT 1"
                )

    def ticker(self) -> None:
        with self.database.connect() as conn:
            while not self.done.wait(0.02):
                assert "failed" not in tick(conn).values()


# Broken by a claim without the lane lock (_claim_lane), and by one that takes what its snapshot
# shows without reading the newest emission under the lock.
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    ("limit", "jobs", "claimers"),
    [
        (7, 1_000, 6),
        *(pytest.param(n, 200_000, 32, marks=pytest.mark.long) for n in (1, 7, 100)),
    ],
)
def test_b18_each_job_is_claimed_once_per_lease_whatever_is_killed(
    database: Database,
    conn: psycopg.Connection,
    shards: int,
    limit: int,
    jobs: int,
    claimers: int,
) -> None:
    set_settings(conn, **PRUNE_AT_ONCE)
    set_settings(conn, queue_rotate_seconds=0.2, claim_rotate_seconds=0.2, aging_seconds=0.1)
    set_settings(conn, heartbeat_seconds=0.1, staleness_seconds=0.5)
    conn.execute("SELECT awa.declare_queue('default', %s)", [Jsonb({"enqueue_shards": shards})])
    ids: list[int] = []
    for start in range(0, jobs, 50):
        # One call fills one lane.
        rows = conn.execute(
            "SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[%s]),"
            ' opts => \'{"backoff": {"delays": [0]}}\')',
            [min(50, jobs - start)],
        )
        ids += [job_id for (job_id,) in rows]
    race = Race(database, limit, kills=claimers)
    ended = 0
    with ThreadPoolExecutor(claimers + 2) as pool:
        running = [pool.submit(race.claimer, seed) for seed in range(claimers)]
        running += [pool.submit(race.killer), pool.submit(race.ticker)]
        end = time.monotonic() + max(30, jobs / 100)
        while ended < jobs and time.monotonic() < end:
            time.sleep(0.05)
            ended = counts(conn).get("completed", 0)
        race.done.set()
        for thread in running:
            thread.result()
    ledger = race.ledger
    assert ledger.problems == []
    assert counts(conn) == {"completed": jobs}
    assert ledger.killed >= claimers
    leases: dict[int, list[int]] = defaultdict(list)
    positions: set[int] = set()
    for attempts in ledger.claims:
        for attempt in attempts:
            leases[attempt.job_id].append(attempt.run_lease)
            assert attempt.position not in positions
            positions.add(attempt.position)
        for before, after in pairwise(attempts):
            # Within a lane, a claim hands out jobs in their order.
            assert before.position < after.position or (
                before.position // LANE != after.position // LANE
            )
    # A claim that was killed after its commit is known to nobody: that lease is missing here.
    for job_id, numbers in leases.items():
        assert numbers == sorted(set(numbers)), job_id
    assert set(leases) == set(ids)
    assert claim_all(conn) == []


# Broken by a position that a rolled back claim leaves neither waiting nor held.
def test_b18_what_a_killed_claimer_did_not_commit_is_there_at_once(
    database: Database, conn: psycopg.Connection
) -> None:
    ids = insert_many(conn, 30)
    with open_transaction(database) as victim:
        assert [a.job_id for a in claim(victim, limit=10)] == ids[:10]
        terminate(conn, victim)
    again = claim(conn, limit=10)
    assert [(a.job_id, a.run_lease, a.attempt) for a in again] == [(i, 1, 1) for i in ids[:10]]
