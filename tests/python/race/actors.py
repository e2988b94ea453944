"""The processes of a race. Each draws what it does from a generator of its own."""

from __future__ import annotations

import mmap
import random
import struct
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb

from race.ledger import Cancel, Claim, Duplicate, Effect, End, Insert, Session

QUEUES = ("plain", "sharded", "dead")
HOLD_SECONDS = 2.0  # a commit held open longer than this counts
OWN_KIND = "own"  # completes in its own transaction, so it is claimed one job per batch
BACKLOG = 1500  # producers pause beyond it, so that the ring can turn
SLOTS = 64
KEYS = 20  # unique keys that all producers share


class Board:
    """Counters in memory that all processes share; each writes its own cells."""

    NAMES = ("jobs", "started", "rolled_back", "held", "generation", "stop")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * SLOTS * len(self.NAMES))

    def _offset(self, name: str, cell: int) -> int:
        return 8 * (SLOTS * self.NAMES.index(name) + cell)

    def put(self, name: str, cell: int, value: int) -> None:
        struct.pack_into("q", self.memory, self._offset(name, cell), value)

    def values(self, name: str) -> tuple[int, ...]:
        return struct.unpack_from(f"{SLOTS}q", self.memory, self._offset(name, 0))

    def add(self, name: str, cell: int, value: int) -> None:
        self.put(name, cell, self.values(name)[cell] + value)

    @property
    def backlog(self) -> int:
        return sum(self.values("jobs")) - sum(self.values("started"))

    @property
    def stopped(self) -> bool:
        return bool(self.values("stop")[0])


@dataclass(frozen=True, slots=True)
class Stage:
    """What every actor needs to know."""

    dsn: str
    directory: Path
    seed: int
    board: Board
    began: float

    def session(self, name: str) -> Session:
        return Session(self.dsn, self.directory / f"{name}.ledger")

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def new_queues(self) -> list[str]:
        """Names so far; a new one every two seconds lets producers meet at a brand-new queue."""
        return [f"new_{n}" for n in range(int(time.monotonic() - self.began) // 2 + 1)]


class Producer:
    """Enqueues in every way there is, and cancels now and then."""

    def __init__(self, stage: Stage, number: int) -> None:
        name = f"producer-{number}"
        self.stage, self.number, self.cell = stage, number, number % SLOTS
        self.rng = stage.random(name)
        self.session = stage.session(name)
        self.made = 0
        self.known: list[int] = []

    def run(self) -> None:
        board, rng = self.stage.board, self.rng
        next_hold = time.monotonic() + rng.uniform(0, 2)
        while not board.stopped:
            hold = 0.0
            if time.monotonic() > next_hold:
                hold = rng.uniform(2.05, 2.8) if rng.random() < 0.8 else rng.uniform(2.8, 5)
                next_hold = time.monotonic() + hold + rng.uniform(0.5, 3)
            rollback = rng.random() < 0.3
            cancels = self.known and not hold and rng.random() < 0.1
            isolation = rng.random() < 0.1 and not cancels
            level = psycopg.IsolationLevel
            self.session.conn.isolation_level = (
                level.REPEATABLE_READ if isolation else level.READ_COMMITTED
            )
            effects = self.session.transact(
                self._cancel if cancels else self._enqueue, rollback=rollback, hold_seconds=hold
            )
            if effects is None:
                board.add("rolled_back", self.cell, int(rollback))
            else:
                ids = [e.job_id for e in effects if isinstance(e, Insert)]
                board.add("jobs", self.cell, len(ids))
                board.add("held", self.cell, int(hold > HOLD_SECONDS))
                self.known = (self.known + ids)[-500:]
            time.sleep(rng.uniform(0, 0.06))
            while board.backlog > BACKLOG and not board.stopped:
                time.sleep(0.02)

    def _token(self) -> str:
        self.made += 1
        return f"{self.number}/{self.made}"

    def _job(self) -> dict[str, object]:
        rng = self.rng
        queue = rng.choice((*QUEUES, self.stage.new_queues()[-1]))
        opts: dict[str, object] = {}
        if rng.random() < 0.4:
            opts["backoff"] = {"delays": [0.05, 0.2]}
        if rng.random() < 0.1:
            opts["delay_seconds"] = round(rng.uniform(0.05, 0.5), 3)
        if rng.random() < 0.03:
            opts["deadline_seconds"] = 0.3
        return {
            "kind": OWN_KIND if rng.random() < 0.05 else "any",
            "queue": queue,
            "priority": rng.randint(1, 4) if queue == "sharded" else 2,
            "max_attempts": 2 if rng.random() < 0.2 else 25,
            "opts": opts,
        }

    def _insert(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        way = self.rng.random()
        if way < 0.5:
            self._insert_one(conn, effects)
        elif way < 0.8:
            self._insert_many(conn, effects)
        else:
            self._insert_list(conn, effects)

    def _insert_one(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        job, token = self._job(), self._token()
        key = f"{self.rng.randrange(KEYS):032x}" if self.rng.random() < 0.15 else None
        if key:
            assert isinstance(job["opts"], dict)
            job["opts"] |= {"unique": {"key": key}}
        row = conn.execute(
            "SELECT job_id, duplicate FROM awa.insert_job(kind => %(kind)s, args => %(args)s,"
            " queue => %(queue)s, priority => %(priority)s, max_attempts => %(max_attempts)s,"
            " opts => %(opts)s)",
            job | {"args": Jsonb({"token": token}), "opts": Jsonb(job["opts"])},
        ).fetchone()
        assert row
        if row[1]:
            assert key
            effects.append(Duplicate(row[0], str(job["queue"]), key))
        else:
            effects.append(_inserted(row[0], job, token, key))

    def _insert_many(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        job, tokens = self._job(), [self._token() for _ in range(self.rng.randint(10, 40))]
        rows = conn.execute(
            "SELECT awa.insert_many(kind => %(kind)s, args => %(args)s, queue => %(queue)s,"
            " priority => %(priority)s, max_attempts => %(max_attempts)s, opts => %(opts)s)",
            job | {"args": [Jsonb({"token": t}) for t in tokens], "opts": Jsonb(job["opts"])},
        ).fetchall()
        effects += [
            _inserted(job_id, job, token) for (job_id,), token in zip(rows, tokens, strict=True)
        ]

    def _insert_list(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        jobs = [
            self._job() | {"args": {"token": self._token()}} for _ in range(self.rng.randint(2, 12))
        ]
        rows = conn.execute("SELECT job_id FROM awa.insert_jobs(%s)", [Jsonb(jobs)]).fetchall()
        for (job_id,), job in zip(rows, jobs, strict=True):
            args = job["args"]
            assert isinstance(args, dict)
            effects.append(_inserted(job_id, job, args["token"]))

    def _enqueue(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            if self.rng.random() < 0.25:
                undo = self.rng.random() < 0.5
                inner: list[Effect] = []
                conn.execute("SELECT")  # begins, so that what follows is a savepoint
                with conn.transaction(force_rollback=undo):
                    self._insert(conn, inner)
                effects += [] if undo else inner
            else:
                self._insert(conn, effects)
        last = effects[-1] if effects else None
        fresh = conn.isolation_level == psycopg.IsolationLevel.READ_COMMITTED
        if isinstance(last, Insert) and fresh and self.rng.random() < 0.05:
            self._cancel_job(conn, effects, last.job_id)

    def _cancel(self, conn: psycopg.Connection, effects: list[Effect]) -> None:
        # Sorted, so that two of these do not deadlock more than needed.
        for job_id in sorted(self.rng.sample(self.known, min(3, len(self.known)))):
            self._cancel_job(conn, effects, job_id)
        time.sleep(self.rng.choice((0, 0, 0.05, 0.2)))

    def _cancel_job(self, conn: psycopg.Connection, effects: list[Effect], job_id: int) -> None:
        self.session.tries(job_id)
        row = conn.execute("SELECT awa.cancel_job(%s)", [job_id]).fetchone()
        assert row
        if row[0] in ("cancelled", "cancelled_running"):
            effects.append(Cancel(job_id, row[0] == "cancelled_running"))


def _inserted(job_id: int, job: dict[str, object], token: str, key: str | None = None) -> Insert:
    attempts = job["max_attempts"]
    assert isinstance(attempts, int)
    return Insert(job_id, str(job["queue"]), attempts, token, key)


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt that a claimer runs."""

    job_id: int
    run_lease: int
    claim_slot: int
    batch_id: int
    position: int
    kind: str


class Claimer:
    """Claims, heartbeats and ends attempts in every way; rolls back and forgets now and then."""

    def __init__(self, stage: Stage, number: int, *, calm: bool = False) -> None:
        name = f"claimer-{number}"
        self.stage, self.calm, self.cell = stage, calm, number % SLOTS
        self.rng = stage.random(name)
        self.session = stage.session(name)
        self.instance = uuid.UUID(int=self.rng.getrandbits(128), version=4)
        self.held: dict[int, list[Held]] = {}
        self.next_beat = 0.0

    def run(self) -> None:
        while not self.stage.board.stopped:
            self.beat()
            found = sum(map(len, self.held.values())) < 300 and self.claim(self._queue())
            if self.held:
                self._end_some()
            elif not found:
                time.sleep(0.01)

    def _queue(self) -> str:
        return self.rng.choice((*QUEUES, *self.stage.new_queues()[-6:]))

    def beat(self) -> None:
        if time.monotonic() < self.next_beat:
            return
        self.next_beat = time.monotonic() + 0.1
        holds = [
            {
                "claim_slot": jobs[0].claim_slot,
                "batch_id": batch,
                "positions": [job.position for job in jobs],
            }
            for batch, jobs in self.held.items()
        ]
        self.session.transact(
            lambda conn, _: _ignore(
                conn.execute("SELECT awa.heartbeat(%s, %s)", [self.instance, Jsonb(holds)])
            )
        )

    def claim(self, queue: str) -> bool:
        """Claim from one queue; tell whether that gave anything to run."""
        jobs: list[Held] = []

        def body(conn: psycopg.Connection, effects: list[Effect]) -> None:
            rows = conn.execute(
                "SELECT job_id, run_lease, attempt, max_attempts, claim_slot, batch_id, position,"
                " args->>'token', kind FROM awa.claim_ready_runtime(%s, %s, %s, %s)",
                [
                    queue,
                    500 if self.calm else self.rng.choice((1, 7, 50, 100)),
                    self.instance,
                    Jsonb({"separate": [OWN_KIND]}),
                ],
            ).fetchall()
            for job, lease, attempt, attempts, slot, batch, position, token, kind in rows:
                effects.append(Claim(job, lease, attempt, attempts, batch, position, token))
                jobs.append(Held(job, lease, slot, batch, position, kind))
            if rows and not self.calm:
                time.sleep(self.rng.choice((0, 0, 0.005, 0.03)))

        if self.session.transact(body, rollback=not self.calm and self.rng.random() < 0.1) is None:
            return False
        for job in jobs:
            self.held.setdefault(job.batch_id, []).append(job)
        self.stage.board.add("started", self.cell, sum(job.run_lease == 1 for job in jobs))
        return bool(jobs)

    def _end_some(self) -> None:
        batches = self.rng.sample(list(self.held), min(len(self.held), self.rng.choice((1, 1, 4))))
        jobs = [job for batch in batches for job in self.held[batch]]
        way = self.rng.random()
        if way < 0.03:
            for batch in batches:  # as a worker does that lost an answer: its heartbeat drops them
                del self.held[batch]
        elif jobs[0].kind == OWN_KIND and way < 0.8:
            self._complete_own(jobs[0])
        elif way < 0.6:
            self.complete(batches[0], again=way < 0.05)
        else:
            self._finish_mixed(self.rng.sample(jobs, self.rng.randint(1, len(jobs))))

    def complete(self, batch: int, *, again: bool = False) -> None:
        """Complete all that is held of a batch by complete_jobs."""
        jobs = {job.position: job for job in self.held[batch]}
        slot = self.held[batch][0].claim_slot
        positions = list(jobs)
        answers: list[str] = []

        def body(conn: psycopg.Connection, effects: list[Effect]) -> None:
            rows = conn.execute(
                "SELECT result, job_id, run_lease FROM awa.complete_jobs(%s, %s, %s, %s)",
                [self.instance, slot, batch, positions],
            ).fetchall()
            answers[:] = [result for result, _, _ in rows]
            for position, (result, job_id, lease) in zip(positions, rows, strict=True):
                if result == "done":
                    effects.append(End(job_id, lease, batch, position, "completed"))

        if self._settle(jobs, positions, answers, body) and again:
            self.held[batch] = list(jobs.values())
            self._settle(jobs, positions, answers, body)

    def _finish_mixed(self, jobs: list[Held]) -> None:
        rng = self.rng
        by_position = {job.position: job for job in jobs}
        items = []
        for job in jobs:
            outcome = rng.choice(("completed", "retry", "snooze", "cancel", "fail", "released"))
            item = {
                "job_id": job.job_id,
                "run_lease": job.run_lease,
                "claim_slot": job.claim_slot,
                "batch_id": job.batch_id,
                "position": job.position,
                "outcome": outcome,
            }
            if outcome in ("retry", "snooze"):
                item["delay_seconds"] = round(rng.uniform(0, 0.3), 3)
            if outcome in ("retry", "fail"):
                item["error"] = "on purpose"
            items.append(item)
        answers: list[str] = []

        def body(conn: psycopg.Connection, effects: list[Effect]) -> None:
            rows = conn.execute(
                "SELECT result, reason FROM awa.finish_jobs(%s, %s)",
                [self.instance, Jsonb(items)],
            ).fetchall()
            answers[:] = [result for result, _ in rows]
            for job, item, (result, reason) in zip(jobs, items, rows, strict=True):
                assert result != "invalid", reason
                if result == "done":
                    effects.append(
                        End(
                            job.job_id,
                            job.run_lease,
                            job.batch_id,
                            job.position,
                            str(item["outcome"]),
                        )
                    )

        self._settle(by_position, list(by_position), answers, body)

    def _settle(
        self,
        jobs: dict[int, Held],
        positions: list[int],
        answers: list[str],
        body: object,
    ) -> bool:
        """Run a finish; forget what was answered, keep what was busy or rolled back."""
        assert callable(body)
        rollback = not self.calm and self.rng.random() < 0.08
        if self.session.transact(body, rollback=rollback) is None:
            return False
        for position, answer in zip(positions, answers, strict=True):
            if answer != "busy":
                self._drop(jobs[position])
        return True

    def _drop(self, job: Held) -> None:
        left = [other for other in self.held[job.batch_id] if other.position != job.position]
        if left:
            self.held[job.batch_id] = left
        else:
            del self.held[job.batch_id]

    def _complete_own(self, job: Held) -> None:
        level = psycopg.IsolationLevel
        self.session.conn.isolation_level = self.rng.choice(
            (level.READ_COMMITTED, level.REPEATABLE_READ, level.SERIALIZABLE)
        )

        def body(conn: psycopg.Connection, effects: list[Effect]) -> None:
            conn.execute("SELECT 1 FROM awa.version()")  # takes the snapshot
            time.sleep(self.rng.choice((0, 0, 0.02, 0.1)))
            conn.execute(
                "SELECT awa.complete_job(%s, %s, %s, %s, %s)",
                [job.job_id, job.run_lease, job.claim_slot, job.batch_id, job.position],
            )
            effects.append(End(job.job_id, job.run_lease, job.batch_id, job.position, "completed"))

        done = self.session.transact(body, rollback=self.rng.random() < 0.1)
        self.session.conn.isolation_level = level.READ_COMMITTED
        if done is not None or self.rng.random() < 0.5:
            self._drop(job)


class Ticker:
    """Calls tick all the time."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.cell = stage, number % SLOTS
        self.session = stage.session(f"ticker-{number}")

    def run(self) -> None:
        while not self.stage.board.stopped:
            self.tick()
            time.sleep(0.05)

    def tick(self) -> None:
        """One round; any step that fails is a finding."""

        def body(conn: psycopg.Connection, _: list[Effect]) -> None:
            rows = conn.execute("SELECT step, outcome, rows, detail FROM awa.tick()").fetchall()
            for step, outcome, count, detail in rows:
                if outcome == "failed":
                    self.session.write("failed", "tick", f"{step}: {detail}")
                elif outcome == "skipped":
                    self.session.write(f"{step} skipped for {detail['reason']}")
                elif outcome in (
                    "pruned",
                    "released",
                    "published",
                    "in_use",
                    "locked",
                    "skipped_busy",
                ):
                    self.session.write(f"{step} {outcome}")
                elif count:
                    self.session.write(f"{step} found work")

        self.session.transact(body)
        row = self.session.conn.execute("SELECT last_value / 64 FROM awa.queue_ring").fetchone()
        self.session.conn.commit()
        assert row
        self.stage.board.put("generation", self.cell, row[0])


def _ignore(_: object) -> None:
    return None
