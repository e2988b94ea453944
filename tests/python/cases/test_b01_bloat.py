"""Case b01: what is left behind while one transaction keeps an old snapshot.

20 minutes at 800 jobs a second with real workers are `make bench-pinned BENCH_ARGS=--check`. That
the ring tables have no dead row at all is also shown with pgstattuple in test_guarantees.py
(test_g5_a_pinned_snapshot_meets_no_dead_tuple_on_the_hot_path), and what promotion costs then in
test_deferred.py (test_g8_promotion_costs_the_same_however_long_a_snapshot_is_pinned).
Cron does not exist yet.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import quantiles

import psycopg
import pytest
from psycopg import IsolationLevel

import awa
from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    Attempt,
    claim_all,
    complete,
    complete_open,
    counts,
    finish,
    open_transaction,
    read_buffers,
    rotate,
    set_settings,
    tick,
    value,
)

OWNER = uuid.UUID(int=1, version=4)
OTHER = uuid.UUID(int=2, version=4)
CLAIM = "SELECT * FROM awa.claim_ready_runtime('default', 10, %s)"
# Rows that are updated or deleted, by what makes them so.
PER_RETRY = "deferred_jobs"
PER_KEY = "job_unique_claims"
PER_LEASE = "leases"
APPEND_ONLY = (
    "(ready_entries|ready_tombstones|ready_claim_attempt_batches|done_entries"
    "|receipt_completion_batches|lease_claim_batches|lease_claim_closures)_[0-9]+"
    "|(queue|claim)_ring_rotations"
)
CONTROL_MOST = 1000


@dataclass
class Load:
    """Jobs in rounds of enqueue, claim, complete, retry, heartbeat and maintenance."""

    conn: psycopg.Connection
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    open: list[Attempt] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    buffers: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    def round(self, jobs: int) -> None:
        """One job in ten fails once, one in twenty runs until the next round, some are unique."""
        client = awa.Client(self.conn)
        opts = {"backoff": {"delays": [0]}}
        client.insert_many("k", [{"n": n} for n in range(jobs)], opts=opts)
        keys = [{"key": uuid.uuid4().hex} for _ in range(jobs // 50)]
        client.insert_many("k", keys, opts={**opts, "unique": {"states": ["available"]}})
        self.done["unique"] += len(keys)
        self.buffers.append(read_buffers(self.conn, CLAIM, OTHER))
        complete_open(self.conn, OTHER)
        start = time.perf_counter()
        attempts = claim_all(self.conn, limit=50)
        self.milliseconds.append((time.perf_counter() - start) * 1000)
        self.chance.shuffle(attempts)
        tenth, twentieth = len(attempts) // 10, len(attempts) // 20
        failing = [a for a in attempts[:tenth] if a.attempt == 1]
        items = [a.item("retry") for a in failing]
        for start_at in range(0, len(items), 50):
            assert set(finish(self.conn, items[start_at : start_at + 50])) <= {"done", "busy"}
        before, self.open = self.open, attempts[tenth : tenth + twentieth]
        ending = [a for a in attempts[:tenth] if a.attempt > 1] + attempts[tenth + twentieth :]
        assert set(complete(self.conn, before + ending)) <= {"done"}
        holds = [
            {"claim_slot": a.claim_slot, "batch_id": a.batch_id, "positions": [a.position]}
            for a in self.open
        ]
        client.heartbeat(OWNER, holds=holds)
        self.idle_queue()
        for ring in ("queue", "claim"):
            rotate(self.conn, ring)
        assert "failed" not in tick(self.conn).values()
        for ring in ("queue", "claim"):
            while tick(self.conn, f"prune_{ring}")[f"prune_{ring}"] in ("released", "pruned"):
                pass
        self.done["jobs"] += jobs + len(keys)
        self.done["retries"] += len(items)
        self.done["rounds"] += 1

    def turn(self) -> None:
        """Turn the rings with next to no load, and let prune take what it finds."""
        awa.Client(self.conn).insert_many("k", [{}] * 2)
        assert set(complete(self.conn, claim_all(self.conn) + self.open)) <= {"done"}
        self.open = []
        self.done["jobs"] += 2
        for ring in ("queue", "claim"):
            rotate(self.conn, ring)
            while tick(self.conn, f"prune_{ring}")[f"prune_{ring}"] in ("released", "pruned"):
                pass

    def idle_queue(self) -> None:
        """What a worker of an idle queue does, round after round."""
        client = awa.Client(self.conn)
        for queue in ("idle", "never used"):
            assert client.claim_ready_runtime(queue, 10, OWNER) == []
            assert client.claim_status(queue, arm=True).reason == "idle"


def rewritten(conn: psycopg.Connection) -> Counter[str]:
    """Updated and deleted rows of each table; the leaves of deferred jobs together."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    rows = conn.execute(
        "SELECT relname, n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE schemaname = 'awa'"
    ).fetchall()
    found: Counter[str] = Counter()
    for name, count in rows:
        found[PER_RETRY if name.startswith(PER_RETRY) else name] += count
    return found


def written(conn: psycopg.Connection) -> int:
    conn.execute("SELECT pg_stat_force_next_flush()")
    rows = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
    return int(value(conn, f"{rows} WHERE schemaname = 'awa'"))


@pytest.fixture
def pinned(database: Database, conn: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A connection in a transaction that has taken its snapshot before all else."""
    client = awa.Client(conn)
    set_settings(conn, heartbeat_seconds=0.05, **PRUNE_AT_ONCE)
    for queue in ("default", "idle"):
        client.declare_queue(queue)
    client.heartbeat(OWNER)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as pin:
        pin.execute("SET statement_timeout = 0")
        pin.execute("SELECT FROM awa.queue_meta")
        yield pin


def check_bounds(before: Counter[str], after: Counter[str], did: Counter[str]) -> None:
    """What each table may have rewritten, given what was done."""
    grown = after - before
    appended = {name: n for name, n in grown.items() if re.fullmatch(APPEND_ONLY, name)}
    assert appended == {}
    # A retry is deleted by its promotion, a key by the end of its job.
    assert grown.pop(PER_RETRY, 0) <= 1.1 * did["retries"] + 10
    assert grown.pop(PER_KEY, 0) <= 2 * did["unique"]
    assert grown.pop(PER_LEASE, 0) <= 2 * did["jobs"] // 20
    # All else is rewritten by rounds of maintenance and heartbeats.
    most = {name: n for name, n in grown.items() if n > 4 * did["rounds"] + 10}
    assert most == {}, most
    assert max(grown.values(), default=0) < CONTROL_MOST


# Broken by an UPDATE of the queue's row at each claim, and by one of the lane at each enqueue.
def test_b01_control_tables_grow_with_ticks_and_not_with_jobs(
    conn: psycopg.Connection, pinned: psycopg.Connection
) -> None:
    load = Load(conn)
    rounds, few, many = 6, 40, 160
    control: list[Counter[str]] = []
    load.round(few)
    for jobs in (few, many):
        before, did = rewritten(conn), load.done.copy()
        for _ in range(rounds):
            load.round(jobs)
        after = rewritten(conn)
        check_bounds(before, after, load.done - did)
        control.append(after - before)
    for name in (PER_RETRY, PER_KEY, PER_LEASE):
        for grown in control:
            grown.pop(name, None)
    little, much = control
    assert {name: (little[name], n) for name, n in much.items() if n > little[name] + rounds} == {}
    # A claim costs what it cost, with few jobs as with many.
    early, late = load.buffers[2:rounds], load.buffers[-5:]
    assert max(late) <= 1.25 * max(early), load.buffers
    assert value(conn, "SELECT count(*) FROM awa.job_unique_claims") < load.done["unique"]
    pinned.rollback()
    reclaim(load)


def reclaim(load: Load) -> None:
    """After the snapshot's end everything goes within two wraps of the rings."""
    conn = load.conn
    generations: dict[str, int] = dict(
        conn.execute(
            "SELECT ring, max(generation) FROM awa.ring_status()"
            " WHERE ring <> 'deferred' GROUP BY ring"
        ).fetchall()
    )
    slots = max(
        value(conn, "SELECT count(*) FROM awa.ring_status() WHERE ring = %s", ring)
        for ring in generations
    )
    for _ in range(2 * slots):
        load.turn()
    old = [
        tuple(row)
        for ring, generation in generations.items()
        for row in conn.execute(
            "SELECT ring, slot, row_count, blocked_by FROM awa.ring_status()"
            " WHERE ring = %s AND generation <= %s AND row_count > 0",
            [ring, generation],
        )
    ]
    assert old == []
    conn.execute("UPDATE awa.deferred_jobs SET run_at = now()")
    tick(conn, "promote")
    assert set(complete(conn, claim_all(conn))) <= {"done"}
    assert counts(conn) == {"completed": load.done["jobs"]}


# Broken by a row for each look at an empty lane, and by a rotation of rings in which nothing is.
def test_b01_an_idle_queue_adds_no_rows(
    conn: psycopg.Connection, pinned: psycopg.Connection
) -> None:
    load = Load(conn)
    for queue in ("idle", "other"):
        awa.Client(conn).insert_job("k", queue=queue)
        assert set(complete(conn, claim_all(conn, queue))) == {"done"}
    for _ in range(3):
        tick(conn)
    set_settings(conn, heartbeat_seconds=3600)
    awa.Client(conn).heartbeat(OWNER)
    before = written(conn)
    for _ in range(30):
        load.idle_queue()
        awa.Client(conn).heartbeat(OWNER)
        tick(conn)
    assert written(conn) == before


@pytest.mark.long
def test_b01_claims_are_as_fast_after_three_minutes(
    conn: psycopg.Connection, pinned: psycopg.Connection
) -> None:
    set_settings(conn, heartbeat_seconds=1)
    load = Load(conn)
    load.round(200)
    before, did = rewritten(conn), load.done.copy()
    end = time.monotonic() + 180
    while time.monotonic() < end:
        load.round(200)
    check_bounds(before, rewritten(conn), load.done - did)
    fifth = len(load.milliseconds) // 5
    first, last = (
        quantiles(times, n=100)[98]
        for times in (load.milliseconds[:fifth], load.milliseconds[-fifth:])
    )
    assert last <= 1.5 * first, (first, last)
    assert max(load.buffers[-fifth:]) <= 1.25 * max(load.buffers[2:fifth])
    pinned.rollback()
    reclaim(load)
