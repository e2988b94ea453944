"""Case b22: prune meets readers, a vacuum and other prunes; nobody waits for it.

Shown elsewhere: emptiness is proved again under the lock
(test_g7_a_row_that_comes_while_prune_locks_its_slot_is_kept in test_guarantees.py); a reader and an
inserter of a bucket of deferred jobs (test_g6_a_reader_keeps_its_bucket_and_stops_nobody and
test_g1_a_job_that_commits_after_its_bucket_was_to_be_emptied_is_not_lost in test_deferred.py);
two prunes at once, one of them killed
(test_g7_a_killed_step_leaves_no_trace_and_nobody_waits_for_it).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import IsolationLevel

from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    WAIT_SECONDS,
    claim,
    claim_all,
    complete,
    counts,
    finish,
    insert_many,
    open_transaction,
    prune_all,
    read_buffers,
    rotate,
    set_settings,
    tick,
    value,
)

SLOTS = {"queue": 16, "claim": 8}
TABLES = {
    "queue": (
        *("ready_entries", "ready_tombstones", "ready_claim_attempt_batches"),
        *("done_entries", "receipt_completion_batches"),
    ),
    "claim": ("lease_claim_batches", "lease_claim_closures"),
}
LEAVES = [f"{t}_{s}" for ring in SLOTS for t in TABLES[ring] for s in range(SLOTS[ring])]
WORKERS = [uuid.UUID(int=number, version=4) for number in range(11, 15)]
JOBS_A_SECOND = 200
PRUNE = """SELECT * FROM awa.tick('{"steps": ["prune_queue"]}')"""
WAITS = """
    SELECT count(*) FILTER (WHERE wait_event_type = 'Lock' AND wait_event IN ('relation', 'tuple')),
           count(*)
    FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'load'
"""


def queue_of(worker: uuid.UUID) -> str:
    return f"q{worker.int % 16}"


class Load:
    """Producers and workers at a steady rate, with a limit on every wait for a lock."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._end = threading.Event()
        self.jobs = 0
        self.errors: list[BaseException] = []
        self.late = 0.0
        self.waiting = 0
        self.looks = 0
        self.reports: Counter[str] = Counter()

    def _work(self, worker: uuid.UUID) -> None:
        size = 10
        pause = size * len(WORKERS) / JOBS_A_SECOND
        queue = queue_of(worker)
        with self._database.connect() as conn:
            conn.execute("SET application_name = 'load'; SET lock_timeout = '100ms'")
            begin = time.monotonic()
            while not self._end.is_set():
                insert_many(conn, size, queue)
                answers = complete(conn, claim(conn, queue, instance=worker), worker)
                assert set(answers) <= {"done"}
                self.jobs += len(answers)
                begin += pause
                self._end.wait(max(0, begin - time.monotonic()))

    def _look(self) -> None:
        with self._database.connect() as conn:
            while not self._end.wait(0.01):
                [(waiting, sessions)] = conn.execute(WAITS).fetchall()
                self.waiting += waiting
                self.looks += sessions

    def _tick(self) -> None:
        with self._database.connect() as conn:
            while not self._end.wait(0.1):
                self.reports.update(f"{step} {outcome}" for step, outcome in tick(conn).items())

    def _guarded(self, body: Callable[..., None], *arguments: object) -> None:
        try:
            body(*arguments)
        except BaseException as error:
            self.errors.append(error)
            self._end.set()

    def jobs_within(self, seconds: float) -> int:
        """How many jobs are enqueued, claimed and completed in a time."""
        before = self.jobs
        self._end.wait(seconds)
        return self.jobs - before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load, two processes that tick, and one that looks who waits."""
        bodies: list[tuple[object, ...]] = [(self._work, worker) for worker in WORKERS]
        bodies += [(self._look,), (self._tick,), (self._tick,)]
        threads = [threading.Thread(target=self._guarded, args=body) for body in bodies]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()
        assert self.errors == []


def history(conn: psycopg.Connection, slots: int) -> None:
    """Fill slots of both rings with jobs that ended; then the rings stand still."""
    for _ in range(slots):
        insert_many(conn, 100)
        complete(conn, claim_all(conn))
        rotate(conn)
        rotate(conn, "claim")
    set_settings(conn, queue_rotate_bytes=134_217_728, claim_rotate_bytes=4_194_304)


def used(conn: psycopg.Connection, ring: str = "queue") -> list[int]:
    """Slots that hold something and are not current."""
    query = "SELECT slot FROM awa.ring_status() WHERE ring = %s AND bytes > 0 AND NOT is_current"
    return [slot for (slot,) in conn.execute(query, [ring])]


def blocked(conn: psycopg.Connection, pid: int) -> dict[tuple[str, int], str]:
    """Slots that a process has locked, as ring_status says, with the mode of the lock."""
    rows = conn.execute(
        "SELECT ring, slot, detail ->> 'mode' FROM awa.ring_status()"
        " WHERE blocked_by = 'locked' AND detail ->> 'pid' = %s::text",
        [pid],
    )
    return {(ring, slot): mode for ring, slot, mode in rows}


def let_go(conn: psycopg.Connection) -> None:
    """Let both rings turn several times a second, and be emptied at once."""
    set_settings(conn, queue_rotate_seconds=0.2, claim_rotate_seconds=0.2)
    set_settings(conn, **PRUNE_AT_ONCE)


def assert_reclaimed_within_two_wraps(conn: psycopg.Connection) -> None:
    """Without load: two wraps of a ring are as many prunes as it has slots, twice."""
    for ring, slots in SLOTS.items():
        for _ in range(2 * slots):
            tick(conn, f"prune_{ring}")
        assert used(conn, ring) == []


# Broken by a queued ACCESS EXCLUSIVE lock (_lock_slot without NOWAIT): load times out behind it.
@pytest.mark.parametrize("seconds", [1.5, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("locks", ["readers", "vacuum"])
def test_b22_nobody_waits_while_prune_cannot_have_its_locks(
    database: Database, conn: psycopg.Connection, locks: str, seconds: float
) -> None:
    """Readers are as those of pg_dump: every child, in one old snapshot."""
    history(conn, 4)
    oldest = [f"{table}_0" for ring in SLOTS for table in TABLES[ring]]
    names, mode = (
        (LEAVES, "ACCESS SHARE") if locks == "readers" else (oldest, "SHARE UPDATE EXCLUSIVE")
    )
    load = Load(database)
    with load.running():
        # What this machine can do.
        before = load.jobs_within(min(seconds, 5) / 2) / (min(seconds, 5) / 2)
        with database.connect(autocommit=False) as holder:
            holder.isolation_level = IsolationLevel.REPEATABLE_READ
            holder.execute("SELECT 1")
            for name in names:
                holder.execute(f"LOCK TABLE awa.{name} IN {mode} MODE".encode())
            let_go(conn)
            jobs = load.jobs_within(seconds)
            # What cannot be had is named, and its holder, whoever else passes through just now.
            wanted = {("queue", 0), ("claim", 0)} | (
                {("queue", slot) for slot in range(4)} if locks == "readers" else set()
            )
            found: dict[tuple[str, int], str] = {}
            until = time.monotonic() + WAIT_SECONDS
            while not wanted <= set(found) or (
                locks == "vacuum" and load.reports["prune_queue pruned"] < 3
            ):
                assert time.monotonic() < until, (found, load.reports)
                found |= blocked(conn, holder.info.backend_pid)
            holder.rollback()
        # With the lock gone, everything goes while the load goes on.
        until = time.monotonic() + 20
        while 0 in used(conn) or 0 in used(conn, "claim"):
            assert time.monotonic() < until
            time.sleep(0.05)
    # Work goes on at full rate.
    assert jobs >= 0.8 * before * seconds
    # No wait was longer than 100 ms, else it was an error; and all of them are under a hundredth.
    assert load.looks > 50
    assert load.waiting <= 0.01 * load.looks
    assert set(found.values()) == {mode.title().replace(" ", "") + "Lock"}
    if locks == "vacuum":
        assert set(found) == wanted
    assert load.reports["prune_queue locked"] + load.reports["prune_claim locked"] > 0
    assert not [name for name in load.reports if name.endswith("failed")], load.reports
    left = [complete(conn, claim_all(conn, queue_of(worker))) for worker in WORKERS]
    assert_reclaimed_within_two_wraps(conn)
    ended = [counts(conn, queue_of(worker)) for worker in WORKERS]
    assert all(set(states) == {"completed"} for states in ended)
    done = sum(states["completed"] for states in ended)
    assert done == load.jobs + sum(len(answers) for answers in left)
    assert counts(conn) == {"completed": 400}


# Broken by locking the tables of a slot one by one (_lock_slot): those before the held one stay.
@pytest.mark.parametrize("ring", list(SLOTS))
def test_b22_prune_has_all_locks_of_a_slot_or_none(
    database: Database, conn: psycopg.Connection, ring: str
) -> None:
    history(conn, 1)
    set_settings(conn, **PRUNE_AT_ONCE)
    kept = "SELECT count(*) FROM pg_locks WHERE pid = %s AND relation = %s::regclass"
    for held in TABLES[ring]:
        for mode in ("ACCESS SHARE", "SHARE UPDATE EXCLUSIVE"):
            with open_transaction(database) as holder, open_transaction(database) as pruner:
                holder.execute(f"LOCK TABLE awa.{held}_0 IN {mode} MODE".encode())
                assert tick(pruner, f"prune_{ring}") == {f"prune_{ring}": "locked"}
                for table in TABLES[ring]:
                    pid = pruner.info.backend_pid
                    assert value(conn, kept, pid, f"awa.{table}_0") == 0, (held, table)
                holder.rollback()
                pruner.rollback()
    assert prune_all(conn, ring) == 1


# Broken by naming whoever has a lock at the moment (_slot_holder without p_holders).
def test_b22_who_keeps_a_slot_is_named_and_not_who_passes_through(
    database: Database, conn: psycopg.Connection
) -> None:
    """The owner of the schema may not see the age of transactions here."""
    history(conn, 1)
    set_settings(conn, **PRUNE_AT_ONCE)
    end = threading.Event()
    with database.connect() as passing, open_transaction(database) as holder:

        def pass_through() -> None:
            while not end.is_set():
                with passing.transaction():
                    passing.execute("LOCK TABLE awa.ready_entries_0 IN ACCESS SHARE MODE")

        thread = threading.Thread(target=pass_through)
        thread.start()
        try:
            holder.execute("LOCK TABLE awa.done_entries_0 IN ACCESS SHARE MODE")
            looks = [blocked(conn, holder.info.backend_pid) for _ in range(10)]
        finally:
            end.set()
            thread.join()
    assert looks == [{("queue", 0): "AccessShareLock"}] * 10


# Broken by a prune that asks for its strongest lock only after all its work (_is_lockable).
def test_b22_a_prune_that_is_blocked_costs_the_same_whatever_the_slot_holds(
    database: Database, conn: psycopg.Connection
) -> None:
    """It is tried again every second, for as long as a dump takes."""
    costs = []
    set_settings(conn, **PRUNE_AT_ONCE)
    for count in (50, 1000):
        insert_many(conn, count)
        for _ in range(count // 50):
            finish(conn, [attempt.item("fail") for attempt in claim(conn, limit=50)])
        slot = value(conn, "SELECT last_value %% 64 FROM awa.queue_ring")
        rotate(conn)
        with open_transaction(database) as reader:
            reader.execute(f"SELECT FROM awa.done_entries_{slot} LIMIT 1".encode())
            assert tick(conn, "prune_queue") == {"prune_queue": "locked"}
            costs.append(read_buffers(conn, PRUNE))
            reader.rollback()
        assert prune_all(conn) == 1
    assert costs[1] <= 3 * costs[0], costs
