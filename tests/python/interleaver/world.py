"""The play: a cast, a ledger, who moves next, and what must hold at the end."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import psycopg

from tools.edits import Edit

from .actors import (
    READ_COMMITTED,
    REPEATABLE_READ,
    Actor,
    Bystander,
    Canceller,
    Changer,
    Claimer,
    Finisher,
    Maintainer,
    Producer,
)
from .ledger import Broken, Claim, Job, Ledger, Token
from .script import CLAIM_SLOTS, LOCK_TIMEOUT, PAUSE_LOCK, QUEUE_SLOTS, build

__all__ = ["KEY_SEED", "Broken", "Result", "World", "new_database", "play"]

SETTINGS = {
    "queue_rotate_seconds": "0.05",
    "claim_rotate_seconds": "0.05",
    "queue_rotate_bytes": "8192",  # a slot that holds anything may be left
    "claim_rotate_bytes": "8192",
    "terminal_retention_seconds": "0",
    "attempt_evidence_seconds": "0",
    "evacuate_attempt_seconds": "0",
    "aging_seconds": "0",
    "staleness_seconds": "86400",
}
# Lanes as (queue, priority). The lane of "late" is made by whoever inserts there first.
LANES = (("one", 2), ("two", 1), ("two", 3))
LATE_LANE = ("late", 2)
KEY_SEED = 100  # from here on jobs have unique keys, and are retried and updated
PERIOD = 150  # moves
STORM, TAIL = 120, 30  # moves of a storm; the last ones come after its victim has gone on
KEPT_MOVES = 90  # lines of the log, about 40 moves
READY_STATES = ("available", "scheduled", "retryable")


@contextmanager
def new_database(
    server_dsn: str, name: str, edits: Sequence[Edit] = (), template: str | None = None
) -> Iterator[str]:
    """A database with the engine as it is tested, installed or copied; gone afterwards."""
    drop = f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'
    run(server_dsn, drop)
    run(server_dsn, f'CREATE DATABASE "{name}" TEMPLATE "{template or "template0"}"')
    dsn = psycopg.conninfo.make_conninfo(server_dsn, dbname=name)
    try:
        if template is None:
            install(dsn, edits)
        yield dsn
    finally:
        run(server_dsn, drop)


def run(dsn: str, statement: str) -> None:
    """Run one statement on a connection of its own."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(statement.encode())


def install(dsn: str, edits: Sequence[Edit]) -> None:
    """Install the engine, and what both queues of a play need from the start."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute(build(edits).encode())
        for setting, value in SETTINGS.items():
            connection.execute("SELECT awa.set_setting(%s, %s)", (setting, value))
        for queue, options in (("one", "{}"), ("two", '{"dlq": true}')):
            connection.execute("SELECT awa.declare_queue(%s, %s)", (queue, options))
        for queue, priority in LANES:
            connection.execute("SELECT awa._create_lane(%s, %s, 0, false)", (queue, priority))


class World:
    """One play in one database."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn, self.random = dsn, random.Random(seed)
        self.has_keys = seed >= KEY_SEED
        self.connect()
        self.ledger, self.seen = Ledger(), Counter[str]()
        self.moves: deque[str] = deque(maxlen=KEPT_MOVES)
        self.digest = hashlib.sha256()
        self.actors: list[Actor] = []
        self.paused: str | None = None
        self.turns: list[Actor] = []
        self.storm: tuple[Actor, int] | None = None
        self.marks = itertools.count(1)
        self.wanted: Collection[str] = ()  # pause points that statements stop at if they can
        self.targets = (*LANES * 3, LATE_LANE)
        self.queues = sorted({queue for queue, _ in self.targets})

    def connect(self) -> None:
        """Open the connection that looks on, or another one where the server has ended it."""
        self.monitor = psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None)
        self.monitor.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
        self.monitor.execute("SELECT setseed(0)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self.actors:
            if actor.thread:
                self.query("SELECT pg_advisory_unlock(%s, %s)", PAUSE_LOCK, actor.pid)
                actor.thread.join()
            actor.db.close()
        self.monitor.close()

    # ---- what actors need

    def new_connection(self) -> psycopg.Connection:
        return psycopg.connect(self.dsn, prepare_threshold=None)

    def log(self, line: str) -> None:
        self.moves.append(line)
        self.digest.update(line.encode())

    def new_mark(self) -> int:
        return next(self.marks)

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self.monitor.execute(sql.encode(), values).fetchall()

    def waits_at_pause(self, pid: int) -> bool:
        return bool(
            self.query(
                "SELECT FROM pg_locks WHERE pid = %s AND locktype = 'advisory'"
                " AND classid = %s AND NOT granted",
                pid,
                PAUSE_LOCK,
            )
        )

    def ready(self, queue: str) -> set[int]:
        """Positions that a claim of the queue must find now, as far as the ledger knows them."""
        busy = set[int]().union(*(actor.touched for actor in self.actors))
        return {
            job.position
            for job in self.ledger.jobs.values()
            if job.position is not None
            and job.queue == queue
            and job.lease == 0
            and job.state == "waiting"
            and not job.is_late
            and job.job_id not in busy
        }

    # ---- checks

    def check_order(self, ready: set[int], claimed: set[int]) -> None:
        """A claim passes over no visible job of a lane."""
        newest: dict[int, int] = {}
        for position in claimed:
            newest[position >> 42] = max(position, newest.get(position >> 42, 0))
        passed = {p for p in ready - claimed if p < newest.get(p >> 42, 0)}
        if passed:
            raise Broken(f"positions {sorted(passed)} passed over by {sorted(claimed)}")

    def check_bodies(self, tokens: list[Token]) -> None:
        """Bodies of open attempts of a batch are there, whatever was pruned."""
        if not tokens:
            return
        positions = [token.position for token in tokens]
        try:
            [(found,)] = self.query(
                "WITH moved AS (SELECT position FROM awa.leases"
                " WHERE batch_id = %s AND position = ANY (%s) AND outcome IS NULL)"
                " SELECT (SELECT count(*) FROM moved) + (SELECT count(*)"
                " FROM awa._read_batch(%s, %s) b, LATERAL awa._read_ready(b.ready_slot, %s) r"
                " WHERE b.positions IS NOT NULL AND r.position NOT IN (TABLE moved))",
                tokens[0].batch_id,
                positions,
                tokens[0].claim_slot,
                tokens[0].batch_id,
                positions,
            )
        except psycopg.errors.LockNotAvailable:
            return
        if found != len(tokens):
            raise Broken(f"only {found} bodies of open attempts {tokens} are left")

    def audit(self) -> None:
        """Ask the database about a job, an attempt and a queue, and compare."""
        ledger = self.ledger
        try:
            if ledger.jobs:
                self.audit_job(self.random.choice(list(ledger.jobs)[-100:]))
            tokens = [*list(ledger.open)[-20:], *list(ledger.closed)[-20:]]
            if tokens:
                self.audit_attempt(self.random.choice(tokens))
            self.audit_status(self.random.choice(self.queues))
        except psycopg.errors.LockNotAvailable:
            self.seen["audit 55P03"] += 1

    def audit_job(self, job_id: int) -> None:
        job = self.ledger.jobs[job_id]
        try:
            [(state, lease)] = self.query("SELECT state, run_lease FROM awa.job(%s)", job_id)
        except psycopg.errors.SerializationFailure as error:
            if not job.may_be_unsettled:
                raise Broken(f"job {job_id} is {job.state}, but job() answers: {error}") from error
            return
        match job.state:
            case "waiting":
                is_right = state in READY_STATES and lease == job.lease
            case "dead_lettered":
                is_right = state == "failed"
            case _:
                is_right = state in (job.state, "pruned")
                is_right &= job.state != "running" or (state, lease) == ("running", job.lease)
        if not is_right:
            raise Broken(f"job {job_id} is {job.state}, but job() answers {state}, lease {lease}")

    def audit_attempt(self, token: Token) -> None:
        [(status,)] = self.query("SELECT awa.attempt_status(%s, %s, %s, %s, %s)", *token)
        known = "open" if token in self.ledger.open else self.ledger.closed[token]
        right = {known}
        if known != "open":
            right.add("unknown")  # the evidence may be gone
        if known == "rescued":
            right.add("failed")  # from the history of a job that had no attempt left
        if status not in right:
            raise Broken(f"{token} is {known}, but attempt_status answers {status}")

    def audit_status(self, queue: str) -> None:
        """A worker may sleep only if nothing waits and nothing is on its way."""
        [(reason,)] = self.query("SELECT reason FROM awa.claim_status(%s)", queue)
        self.seen[f"status {reason}"] += 1
        lanes = {lane for (lane,) in self.query("SELECT lane_id FROM awa.queue_lanes")}
        pending = [
            job.position
            for actor in self.actors
            if isinstance(actor, Producer)
            for job in actor.pending
            if job.queue == queue and job.position is not None and job.position >> 42 in lanes
        ]
        waiting = self.ready(queue)
        if reason == "idle" and (waiting or pending):
            raise Broken(f"queue {queue} is said to be idle: {sorted(waiting)}, soon {pending}")

    def check_counts(self) -> None:
        for queue in self.queues:
            [row] = self.query(
                "SELECT scheduled + available + retryable, running, completed, failed, cancelled,"
                " dead_lettered FROM awa.queue_counts(%s)",
                queue,
            )
            names = ("waiting", "running", "completed", "failed", "cancelled", "dead_lettered")
            known = self.ledger.counts(queue)
            if row != tuple(known[name] for name in names):
                raise Broken(f"counts of queue {queue}: {row}, but {known}")

    # ---- moves

    def cast(self) -> None:
        """Hire actors: small casts find other faults than large ones."""
        sizes = (
            (Producer, 1, 5),
            (Claimer, 1, 2),
            (Finisher, 1, 2),
            (Canceller, 0, 2),
            (Maintainer, 1, 2),
        )
        for kind, low, high in sizes:
            for n in range(self.random.choice((low, high, high))):
                self.actors.append(kind(self, f"{kind.__name__.lower()} {n + 1}"))
        if self.has_keys:
            self.actors += [Changer(self, f"changer {n}") for n in (1, 2)]
        if self.random.random() < 0.6:
            sql = "SELECT pg_current_xact_id() IS NULL"
            self.actors.append(Bystander(self, "writer", sql, READ_COMMITTED))
            sql = (
                "SELECT count(*) FROM awa.ready_entries UNION ALL"
                " SELECT count(*) FROM awa.lease_claim_batches"
            )
            self.actors.append(Bystander(self, "reader", sql, REPEATABLE_READ))

    def new_period(self) -> None:
        """For a while only some of them move, and perhaps one queue is not claimed."""
        self.paused = self.random.choice((None, None, "one", "two"))
        weights = self.random.choice(((0, 1, 2, 5), (1, 1, 2)))
        self.turns = []
        for actor in self.actors:
            weight = self.random.choice(weights)
            if weight == 0 and not actor.thread and actor.is_open and self.random.random() < 0.7:
                actor.end()
            is_slow = isinstance(actor, Producer | Bystander)
            self.turns += [actor] * weight * (1 if is_slow else 2)
        self.turns = self.turns or list(self.actors)

    def step(self) -> None:
        if self.storm:
            self.storm_step(*self.storm)
            return
        if self.random.random() < 0.02:
            self.audit()
            return
        actor = self.random.choice(self.turns)
        was_suspended = actor.thread is not None
        actor.step()
        is_victim = actor.thread and not was_suspended and not isinstance(actor, Maintainer)
        if is_victim and self.random.random() < 0.2:
            for other in self.actors:
                if other is not actor and other.is_open and not other.thread:
                    other.end()
            self.log("a storm begins")
            self.seen["storms"] += 1
            self.storm = (actor, STORM)

    def storm_step(self, victim: Actor, left: int) -> None:
        """While one statement is suspended the rings turn and jobs come; then it goes on."""
        self.storm = (victim, left - 1) if left else None
        if left == TAIL and victim.thread:
            victim.resume()
            if victim.is_open:
                victim.end(True)
        kinds: tuple[type[Actor], ...] = (Maintainer,)
        if left > TAIL:
            kinds = (Producer, Maintainer)
            if left < STORM - 20:
                kinds = (Producer, Maintainer, Claimer, Finisher)
        cast = [a for a in self.actors if a is not victim and isinstance(a, kinds)]
        maintainers: list[Actor] = [a for a in cast if isinstance(a, Maintainer)]
        self.random.choice(cast + maintainers * 2).step()

    # ---- the end

    def drain(self) -> None:
        """Everybody ends; then a few quiet rounds must bring everything home."""
        self.log("everybody ends")
        for actor in self.actors:
            while actor.thread:
                actor.resume()
            if actor.is_open:
                actor.end()
        self.check_counts()
        self.claim_all()
        lost = [job for job in self.ledger.jobs.values() if job.state == "waiting"]
        if lost:  # now, not only after later inserts
            raise Broken(f"{len(lost)} committed jobs are lost: {lost[:5]}")
        self.turn_rings()
        self.claim_all()
        self.finish_all()
        self.check_counts()
        for queue in self.queues:
            [(reason,)] = self.query("SELECT reason FROM awa.claim_status(%s)", queue)
            if reason != "idle":
                raise Broken(f"queue {queue} is not idle at the end, but {reason}")

    def tick(self, step: str) -> str:
        sql = "SELECT outcome, detail::text FROM awa.tick(jsonb_build_object('steps', ARRAY[%s]))"
        [(outcome, detail)] = self.query(sql, step)
        if outcome == "failed":
            raise Broken(f"step {step} failed in the drain: {detail}")
        return str(outcome)

    def claim_all(self) -> None:
        self.tick("refill")
        self.tick("promote")
        self.claim_ready()

    def claim_ready(self) -> None:
        owner = "00000000-0000-0000-0000-000000000000"
        for queue in self.queues:
            empty = 0
            while empty < 4:  # one for the rows, two to settle the gaps, one to set the hint
                sql = f"SELECT {Claim.COLUMNS} FROM awa.claim_ready_runtime(%s, 50, %s)"
                claims = [Claim.read(row) for row in self.query(sql, queue, owner)]
                if claims:
                    self.log(f"drain: claimed {claims}")
                self.ledger.claim(claims, owner)
                empty = 0 if claims else empty + 1

    def finish_all(self) -> None:
        batches: dict[int, list[Token]] = {}
        for token in self.ledger.open:
            batches.setdefault(token.batch_id, []).append(token)
        for tokens in batches.values():
            self.check_bodies(tokens)
        for owner in dict.fromkeys(self.ledger.open.values()):
            tokens = [token for token in self.ledger.open if self.ledger.open[token] == owner]
            for part in (tokens[n : n + 60] for n in range(0, len(tokens), 60)):
                items = [{**token._asdict(), "outcome": "completed"} for token in part]
                rows = self.query(
                    "SELECT result FROM awa.finish_jobs(%s, %s)", owner, json.dumps(items)
                )
                for token, (result,) in zip(part, rows, strict=True):
                    if result != "done":
                        raise Broken(f"finish of {token} in the drain: {result}")
                    self.ledger.end(token, "completed")

    def turn_rings(self) -> None:
        """Every slot of both rings must come round again."""
        wanted = {"queue": QUEUE_SLOTS, "claim": CLAIM_SLOTS}
        before = {
            ring: self.query(f"SELECT last_value / 64 FROM awa.{ring}_ring")[0][0]
            for ring in wanted
        }
        self.seen["generations"] = before["queue"]
        self.seen["claim generations"] = before["claim"]
        used = dict.fromkeys(wanted, 0)
        for _ in range(4 * QUEUE_SLOTS):
            self.insert_one()
            self.claim_all()
            self.finish_all()
            for ring in wanted:
                for step in ("publish", "plan", "publish"):
                    self.tick(f"{step}_{ring}")
            while {"pruned", "released"} & {self.tick("prune_claim"), self.tick("prune_queue")}:
                pass
            for ring in wanted:
                sql = f"SELECT count(DISTINCT slot) FROM awa.{ring}_ring_rotations"
                used[ring] = self.query(sql + " WHERE generation > %s", before[ring])[0][0]
            if used == wanted:
                return
        state = self.query("SELECT ring, slot, blocked_by, detail::text FROM awa.ring_status()")
        raise Broken(f"slots reused in the drain: {used} of {wanted}: {state}")

    def insert_one(self, queue: str = "one", *, later: bool = False) -> int:
        """Insert and commit a job; return its id."""
        mark = self.new_mark()
        options = '{"delay_seconds": 0.001}' if later else "{}"
        sql = "SELECT job_id FROM awa.insert_job('k', %s, %s, opts => %s)"
        [(job_id,)] = self.query(sql, json.dumps({"mark": mark}), queue, options)
        self.ledger.insert(Job(job_id, mark, queue, 2, 25, position=None if later else job_id))
        return int(job_id)


@dataclass(frozen=True, slots=True)
class Result:
    """How a play went."""

    seed: int
    steps: int
    seconds: float
    broken: str | None
    moves: tuple[str, ...]  # the last ones
    digest: str  # of all moves: the same seed gives the same one
    seen: Counter[str]
    jobs: int
    attempts: int

    def __str__(self) -> str:
        line = (
            f"seed {self.seed}: {self.broken or 'ok'}; {self.steps} steps, {self.seconds:.0f} s,"
            f" {self.jobs} jobs, {self.attempts} attempts, {self.seen['generations']} generations"
            f" (claims {self.seen['claim generations']}), digest {self.digest}"
        )
        return "\n    ".join([line, *self.moves]) if self.broken else line


def play(
    server_dsn: str,
    seed: int,
    steps: int,
    edits: Sequence[Edit] = (),
    template: str | None = None,
) -> Result:
    """Play one seed in a database of its own."""
    began = time.monotonic()
    name = f"interleaver_{seed}_{random.SystemRandom().getrandbits(40):x}"
    broken, step = None, 0
    with new_database(server_dsn, name, edits, template) as dsn, World(dsn, seed) as world:
        world.cast()
        try:
            for step in range(steps):
                if step % PERIOD == 0:
                    world.new_period()
                world.step()
            world.drain()
        except Broken as error:
            broken = f"at step {step}: {error}"
    return Result(
        seed,
        step + 1,
        time.monotonic() - began,
        broken,
        tuple(world.moves),
        world.digest.hexdigest()[:12],
        world.seen,
        len(world.ledger.jobs),
        len(world.ledger.positions),
    )
