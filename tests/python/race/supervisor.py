"""Runs a race: forks the actors, kills claimers, and drains what is left."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg

from race.actors import Board, Claimer, Producer, Stage, Ticker

PRODUCERS = 8
CLAIMERS = 4
TICKERS = 2
SLOTS = 16
DRAIN_SECONDS = 40
SETTINGS = {
    "queue_rotate_seconds": 0.2,
    "claim_rotate_seconds": 0.2,
    "terminal_retention_seconds": 0,
    "attempt_evidence_seconds": 0,
    "dump_lock_seconds": 0,
    "heartbeat_seconds": 0.2,
    "staleness_seconds": 1,
    "evacuate_attempt_seconds": 0.3,
}
# The engine's own record of receipts and leases does not last; this copy outlives it.
OBSERVER = """
CREATE SCHEMA observed;
CREATE TABLE observed.batches (batch_id bigint, positions int8multirange);
CREATE TABLE observed.closures (batch_id bigint, outcome text, closed int8multirange);
CREATE TABLE observed.leases (batch_id bigint, position bigint);
CREATE FUNCTION observed.note_batch() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO observed.batches VALUES (NEW.batch_id, NEW.positions);
    RETURN NULL;
END $$;
CREATE FUNCTION observed.note_closure() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO observed.closures VALUES (NEW.batch_id, NEW.outcome, NEW.closed);
    RETURN NULL;
END $$;
CREATE TRIGGER observe AFTER INSERT ON awa.lease_claim_batches
    FOR EACH ROW EXECUTE FUNCTION observed.note_batch();
CREATE TRIGGER observe AFTER INSERT ON awa.lease_claim_closures
    FOR EACH ROW EXECUTE FUNCTION observed.note_closure();
CREATE FUNCTION observed.note_lease() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO observed.leases VALUES (NEW.batch_id, NEW.position);
    ELSE
        INSERT INTO observed.closures
        SELECT NEW.batch_id, NEW.outcome, range_agg(int8range(NEW.position, NEW.position, '[]'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER observe AFTER INSERT OR UPDATE ON awa.leases
    FOR EACH ROW EXECUTE FUNCTION observed.note_lease();
"""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a race must have done to count."""

    jobs: int
    rolled_back: int
    held: int
    wraps: int
    kills: int

    @classmethod
    def for_seconds(cls, seconds: float) -> Quota:
        part = seconds / 60
        return cls(
            jobs=round(20_000 * part),
            rolled_back=round(500 * part),
            held=round(50 * part),
            # A quarter of a minute may end just before the first.
            wraps=int(3 * part),
            kills=round(20 * part),
        )


@dataclass(slots=True)
class Race:
    """One race, run in this process and its children."""

    stage: Stage
    seconds: float
    kills: int = 0
    forked: int = 0
    claimers: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def run(self) -> dict[str, int]:
        """Race, drain, and return what was done."""
        try:
            self._race()
        finally:
            for pid in [*self.others, *self.claimers]:
                os.kill(pid, signal.SIGKILL)
        self._drain()
        return self.facts()

    def _race(self) -> None:
        rng = random.Random(self.stage.seed)
        for cell in range(PRODUCERS):
            self.others.append(fork(partial(act, Producer, self.stage, cell)))
        for cell in range(TICKERS):
            self.others.append(fork(partial(act, Ticker, self.stage, cell)))
        for _ in range(CLAIMERS):
            self._add_claimer()
        quota = Quota.for_seconds(self.seconds)
        end = self.stage.began + self.seconds
        # Kills come a little faster than the quota asks; a slow machine gets up to twice the time.
        interval = 0.7 * self.seconds / max(1, quota.kills)
        while time.monotonic() < end or (
            not self._is_enough(quota) and time.monotonic() < end + self.seconds
        ):
            time.sleep(rng.uniform(0.5, 1.5) * interval)
            self._kill(rng.randrange(CLAIMERS))
        self.stage.board.put("stop", 0, 1)
        while self.others or self.claimers:
            pids = self.others or self.claimers
            expect_success(pids.pop())

    def facts(self) -> dict[str, int]:
        """What the race did so far."""
        board = self.stage.board
        return {
            "jobs": sum(board.values("jobs")),
            "rolled_back": sum(board.values("rolled_back")),
            "held": sum(board.values("held")),
            "wraps": max(board.values("generation")) // SLOTS,
            "kills": self.kills,
        }

    def _is_enough(self, quota: Quota) -> bool:
        return all(value >= getattr(quota, name) for name, value in self.facts().items())

    def _add_claimer(self) -> None:
        self.claimers.append(fork(partial(act, Claimer, self.stage, self.forked)))
        self.forked += 1

    def _kill(self, index: int) -> None:
        pid = self.claimers.pop(index)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError("a claimer had failed")
        self.kills += 1
        self._add_claimer()

    def _drain(self) -> None:
        """Run all that is left, what rescue brings back included."""
        last, ticker = Claimer(self.stage, self.forked, calm=True), Ticker(self.stage, TICKERS)
        end = time.monotonic() + DRAIN_SECONDS
        with psycopg.connect(self.stage.dsn, autocommit=True) as conn:
            while left := unfinished(conn):
                if time.monotonic() > end:
                    last.session.write("failed", "drain", f"still at work: {left}")
                    return
                # Backoff is tested elsewhere; here nobody waits for it.
                conn.execute(
                    "UPDATE awa.deferred_jobs SET run_at = now(),"
                    " slot = awa._deferred_slot(now(), now()) WHERE run_at > now()"
                )
                ticker.tick()
                last.beat()
                for queue in left:
                    last.claim(queue)
                for batch in list(last.held):
                    last.complete(batch)


def unfinished(conn: psycopg.Connection) -> list[str]:
    """Queues that have jobs which are not terminal."""
    rows = conn.execute(
        "SELECT q.queue FROM (SELECT queue FROM awa.queue_lanes"
        " UNION SELECT queue FROM awa.deferred_jobs) q, awa.queue_counts(q.queue) c"
        " WHERE c.scheduled + c.available + c.running + c.retryable + c.waiting_external > 0"
    ).fetchall()
    return [queue for (queue,) in rows]


def act(actor: type[Producer] | type[Claimer] | type[Ticker], stage: Stage, number: int) -> None:
    """Play a part; it connects here, in the child process."""
    actor(stage, number).run()


def fork(body: Callable[[], None]) -> int:
    """Run a body in a child process."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body()
        status = 0
    finally:
        if status:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def expect_success(pid: int) -> None:
    """Wait for a child that must end well."""
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"a process ended with status {status}")


def prepare(dsn: str, seed: int) -> None:
    """Set up a fresh database for a race."""
    # In races of even seeds a slot goes in two steps, and the ring turns more slowly for it.
    settings = SETTINGS if seed % 2 else {**SETTINGS, "dump_lock_seconds": 0.1}
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(OBSERVER)
        for name, value in settings.items():
            conn.execute("SELECT awa.set_setting(%s, %s)", [name, str(value)])
        conn.execute("SELECT awa.declare_queue('sharded', '{\"enqueue_shards\": 4}')")
        conn.execute("SELECT awa.declare_queue('dead', '{\"dlq\": true}')")


def run(dsn: str, directory: Path, seed: int, seconds: float) -> dict[str, int]:
    """Run one race in this process, which must have one thread, and its children."""
    prepare(dsn, seed)
    return Race(Stage(dsn, directory, seed, Board(), time.monotonic()), seconds).run()
