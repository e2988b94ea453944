"""Who plays: each has one connection, at most one transaction, at most one suspended statement."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from psycopg import IsolationLevel

from .ledger import Broken, Claim, Job, Token
from .script import LOCK_TIMEOUT, PAUSE_LOCK

if TYPE_CHECKING:
    from .world import World

READ_COMMITTED, REPEATABLE_READ = IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ
# A lock that another transaction holds, a snapshot that is too old: such a transaction is repeated.
EXPECTED = {"55P03", "40001"}
READY_FROM = 1 << 42  # ids from here on are positions: the job was ready at once
KEYS = 5  # unique keys that producers share

Rows = list[tuple[Any, ...]]


class Actor:
    """Base of all: transactions, pauses, and what happens to the ledger at a commit."""

    isolations: tuple[IsolationLevel, ...] = (READ_COMMITTED,)
    commit_chance = 0.8

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.random = world, name, world.random
        self.thread: threading.Thread | None = None
        self.point = ""  # where its statement is suspended
        self.instance = str(uuid.UUID(int=len(world.actors) + 1))
        self.connect()

    def connect(self) -> None:
        """Open its connection, or another one where the server has ended it."""
        self.db = self.world.new_connection()
        self.db.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
        self.db.execute("SELECT setseed(0)")
        self.db.commit()
        self.pid = self.db.info.backend_pid
        self.reset()

    def reset(self) -> None:
        """Forget a transaction that has ended."""
        self.is_open = False
        self.has_snapshot = False
        self.effects: list[Callable[[], object]] = []
        self.touched: set[int] = set()  # jobs whose position it may have locked
        self.holds_lanes = False  # whether it may hold a lane or mutation lock

    def begin(self, isolation: IsolationLevel) -> None:
        self.db.isolation_level = isolation
        self.is_open = True

    def step(self) -> None:
        """Make one move; a suspended actor may go on instead."""
        if self.thread:
            if self.random.random() < self.eagerness:
                self.resume()
            return
        if not self.is_open:
            self.begin(self.random.choice(self.isolations))
        self.move()

    def move(self) -> None:
        raise NotImplementedError

    def end(self, commit: bool | None = None) -> None:
        """End the transaction; only a commit reaches the ledger."""
        if commit is None:
            commit = self.random.random() < self.commit_chance
        self.world.log(f"{self.name}: {'commit' if commit else 'rollback'}")
        facts = self.facts() if commit else []
        if commit:
            self.db.commit()
        else:
            self.db.rollback()
        self.reset()
        for fact in facts:
            fact()

    def facts(self) -> list[Callable[[], object]]:
        """Return what a commit tells the ledger."""
        return list(self.effects)

    # ---- statements

    def run(
        self,
        sql: str,
        parameters: Iterable[object] = (),
        then: Callable[[Rows], None] = lambda rows: None,
        pause: tuple[str, int] | None = None,
    ) -> None:
        """Run one statement and give its rows to `then`; it may stay suspended at a pause point."""
        values = tuple(parameters)
        where = f" [pause {pause[0]} after {pause[1]}]" if pause else ""
        called = re.search(r"awa\.\w+", sql)
        self.world.log(f"{self.name}: {called[0] if called else sql} {values or ''}{where}")
        if pause is None:
            self.settle(lambda: self.fetch(sql, values), then)
            return
        self.world.monitor.execute(
            "SELECT pg_advisory_lock(%s, %s)", (PAUSE_LOCK, self.pid)
        ).fetchall()
        outcome: list[Rows | psycopg.Error] = []

        def work() -> None:
            try:
                self.fetch(
                    "SELECT set_config('awa_test.pause_at', %s, true),"
                    " set_config('awa_test.pause_skip', %s, true)",
                    (pause[0], str(pause[1])),
                )
                outcome.append(self.fetch(sql, values))
            except psycopg.Error as error:
                outcome.append(error)

        self.outcome, self.then = outcome, then
        self.eagerness = self.random.choice((0.3,) * 7 + (0.04,))
        self.thread = threading.Thread(target=work)
        self.thread.start()
        while self.thread.is_alive():
            if self.world.waits_at_pause(self.pid):
                self.world.log(f"{self.name}: suspended")
                self.world.seen[f"paused at {pause[0]}"] += 1
                self.point = pause[0]
                return
            self.thread.join(0.0005)
        self.resume()

    def resume(self) -> None:
        """Let a suspended statement go on to its end."""
        assert self.thread is not None
        self.world.monitor.execute(
            "SELECT pg_advisory_unlock(%s, %s)", (PAUSE_LOCK, self.pid)
        ).fetchall()
        self.thread.join()
        self.thread = None
        self.world.log(f"{self.name}: goes on")

        def result() -> Rows:
            if isinstance(self.outcome[0], psycopg.Error):
                raise self.outcome[0]
            return self.outcome[0]

        self.settle(result, self.then)

    def fetch(self, sql: str, values: tuple[object, ...]) -> Rows:
        return self.db.execute(sql.encode(), values).fetchall()

    def settle(self, result: Callable[[], Rows], then: Callable[[Rows], None]) -> None:
        try:
            rows = result()
        except psycopg.Error as error:
            self.world.log(f"{self.name}: {error.sqlstate} {error}".splitlines()[0])
            self.db.rollback()
            self.failed(error)
            self.world.seen[f"{type(self).__name__} {error.sqlstate}"] += 1
            self.reset()
            return
        self.has_snapshot = True
        self.world.log(f"{self.name}: -> {rows}")
        then(rows)

    def failed(self, error: psycopg.Error) -> None:
        """Judge an error; the transaction is rolled back already."""
        is_old = self.db.isolation_level == REPEATABLE_READ
        if error.sqlstate not in EXPECTED and not (error.sqlstate == "25001" and is_old):
            raise Broken(f"{self.name}: {error.sqlstate} {error}") from error

    def savepoint(self) -> None:
        self.world.log(f"{self.name}: savepoint")
        self.db.execute("SAVEPOINT s")

    def rollback_to_savepoint(self) -> None:
        self.world.log(f"{self.name}: rollback to savepoint")
        self.db.execute("ROLLBACK TO SAVEPOINT s")

    def maybe_pause(self, chance: float, *points: str) -> tuple[str, int] | None:
        if wanted := [point for point in points if point in self.world.wanted]:
            return self.random.choice(wanted), self.random.choice((0, 0, 1))
        if self.random.random() >= chance:
            return None
        return self.random.choice(points), self.random.choice((0, 0, 0, 1, 3))


class Producer(Actor):
    """Inserts, with savepoints, rollbacks and long pauses."""

    isolations = (READ_COMMITTED,) * 4 + (REPEATABLE_READ,)

    def reset(self) -> None:
        super().reset()
        self.pending: list[Job] = []
        self.mark: int | None = None

    def move(self) -> None:
        x = self.random.random()
        if x < 0.2:
            self.run("SELECT pg_current_xact_id() IS NULL")
        elif x < 0.55:
            self.insert()
        elif x < 0.6 and self.mark is None:
            self.mark = len(self.pending)
            self.savepoint()
        elif x < 0.7 and self.mark is not None:
            self.rollback_to_savepoint()
            del self.pending[self.mark :]
            self.mark = None
        elif x < 0.85:
            self.end()

    def facts(self) -> list[Callable[[], object]]:
        return [partial(self.world.ledger.insert, job) for job in self.pending]

    def insert(self) -> None:
        queue, priority = self.random.choice(self.world.targets)
        is_plain = self.random.random() < 0.6
        attempts = 25 if is_plain else self.random.choice((1, 2, 3))
        pause = self.maybe_pause(0.25, "insert", "row", "row")
        if self.world.has_keys and self.random.random() < 0.4:
            job = Job(0, self.world.new_mark(), queue, priority, attempts)
            job.key = self.random.randrange(KEYS)
            pause = self.maybe_pause(0.3, "insert", "row", "key", "key")
            self.insert_unique(job, pause, is_late=self.random.random() < 0.2)
            return
        shape = self.random.choice(("one", "one", "many", "mixed", "later"))
        if shape == "mixed":
            targets = [self.random.choice(self.world.targets) for _ in range(2)]
        else:
            targets = [(queue, priority)] * (3 if shape == "many" else 1)
        jobs = [Job(0, self.world.new_mark(), q, p, attempts) for q, p in targets]
        args = [json.dumps({"mark": job.mark}) for job in jobs]
        options = '{"tags": ["x"]}' if not is_plain and shape != "mixed" else "{}"

        def got(rows: Rows) -> None:
            for job, (job_id,) in zip(jobs, rows, strict=True):
                job.job_id = job_id
                job.position = job_id if job_id >= READY_FROM else None
                job.is_late = pause is not None
            self.pending += jobs

        if shape == "many":
            sql = "SELECT * FROM awa.insert_many('k', %s::jsonb[], %s, %s, %s, NULL, %s)"
            self.run(sql, (args, queue, priority, attempts, options), got, pause)
        elif shape == "mixed":
            items = [
                {
                    "kind": "k",
                    "queue": job.queue,
                    "priority": job.priority,
                    "args": {"mark": job.mark},
                    "max_attempts": attempts,
                }
                for job in jobs
            ]
            self.run("SELECT job_id FROM awa.insert_jobs(%s)", (json.dumps(items),), got, pause)
        else:
            if shape == "later":
                options = '{"delay_seconds": 0.001}'
            sql = "SELECT job_id FROM awa.insert_job('k', %s, %s, %s, %s, NULL, %s)"
            self.run(sql, (args[0], queue, priority, attempts, options), got, pause)

    def insert_unique(
        self, job: Job, pause: tuple[str, int] | None = None, *, is_late: bool = False
    ) -> None:
        options: dict[str, object] = {"unique": {"key": f"{job.key:032x}"}}
        if is_late:
            options |= {"delay_seconds": 0.001}

        def got(rows: Rows) -> None:
            [(job_id, is_duplicate)] = rows
            self.world.seen[f"unique {'duplicate' if is_duplicate else 'new'}"] += 1
            if not is_duplicate:
                job.job_id = job_id
                job.position = job_id if job_id >= READY_FROM else None
                job.is_late = pause is not None
                self.pending.append(job)
            elif pause is None:
                mine = [other.job_id for other in self.pending if other.key == job.key]
                holders = self.world.ledger.holders(job.key) + mine
                if job_id not in holders:
                    raise Broken(f"key {job.key}: job {job_id} is said to hold it, not {holders}")

        sql = "SELECT job_id, duplicate FROM awa.insert_job('k', %s, %s, %s, %s, NULL, %s)"
        values = (json.dumps({"mark": job.mark}), job.queue, job.priority, job.max_attempts)
        self.run(sql, (*values, json.dumps(options)), got, pause)


class Claimer(Actor):
    """Claims, now and then twice in one transaction, and rolls some of it back."""

    def move(self) -> None:
        if self.random.random() < (0.7 if self.effects else 0.1):
            self.end()
            return
        if not self.has_snapshot and self.random.random() < 0.1:
            self.run("SELECT pg_current_xact_id() IS NULL")  # this id is too old for a horizon
            return
        queues = [q for q in self.world.queues if q != self.world.paused]
        if self.random.random() < 0.6:
            queues = [q for q in queues if self.world.ready(q)] or queues
        queue = self.random.choice(queues)
        limit = self.random.choice((1, 3, 10))
        options = self.random.choice(
            ("{}",) * 6 + ('{"deadline_seconds": 0.001}', '{"separate": ["k"]}')
        )
        pause = self.maybe_pause(0.25, "newest", "probe", "leaf", "leaf", "write", "receipt")
        self.claim(queue, limit, options, pause, ends_empty=self.random.random() < 0.8)

    def claim(
        self,
        queue: str,
        limit: int,
        options: str = "{}",
        pause: tuple[str, int] | None = None,
        *,
        ends_empty: bool = False,
    ) -> None:
        self.ends_empty = ends_empty
        ready = None if pause else self.world.ready(queue)
        others = [a for a in self.world.actors if a is not self and a.holds_lanes]
        self.holds_lanes = True
        self.run(
            f"SELECT {Claim.COLUMNS} FROM awa.claim_ready_runtime(%s, %s, %s, %s)",
            (queue, limit, self.instance, options),
            lambda rows: self.got(rows, limit, ready, bool(others)),
            pause,
        )

    def got(self, rows: Rows, limit: int, ready: set[int] | None, is_hindered: bool) -> None:
        claims = [Claim.read(row) for row in rows]
        positions = {claim.token.position for claim in claims}
        if ready is not None:
            self.world.check_order(ready, positions)
            if len(claims) < limit and not is_hindered and ready - positions:
                raise Broken(f"{self.name} left positions {sorted(ready - positions)} of {limit}")
        self.touched |= {claim.token.job_id for claim in claims}
        self.world.seen["claimed"] += len(claims)
        if claims:
            self.effects.append(partial(self.world.ledger.claim, claims, self.instance))
        elif self.ends_empty:
            self.end(True)


class Finisher(Actor):
    """Finishes attempts by all three calls, ended ones as well."""

    isolations = (READ_COMMITTED,) * 3 + (REPEATABLE_READ,)

    def reset(self) -> None:
        super().reset()
        self.wishes: dict[Token, str] = {}  # ended in this transaction

    def move(self) -> None:
        ledger = self.world.ledger
        if self.random.random() < (0.5 if self.effects else 0.15) or not ledger.open:
            self.end()
            return
        if self.random.random() < 0.15:
            self.run("SELECT 1 FROM awa.queue_meta LIMIT 1")  # an old snapshot is taken here
            return
        tokens = list(ledger.open)[:40]
        if ledger.closed and self.random.random() < 0.15:
            tokens = list(ledger.closed)[-40:]
        first = self.random.choice(tokens)
        batch = [t for t in tokens if t.batch_id == first.batch_id]
        self.world.check_bodies([t for t in batch if t in ledger.open])
        batch = [t for t in batch if self.random.random() < 0.8]
        pause = self.maybe_pause(0.12, "finish")
        calls = ["compact", "compact", "mixed", "mixed", "one"]
        if self.db.isolation_level == REPEATABLE_READ:
            calls += ["one"] * 20  # the others refuse it
        match self.random.choice(calls):
            case "compact" if batch:
                self.complete(batch, self.owner(first), pause)
            case "mixed":
                others = self.random.sample(tokens, min(3, len(tokens)))
                chosen = dict.fromkeys(batch + others)
                self.finish([t for t in chosen if self.owner(t) == self.owner(first)], first, pause)
            case "one":
                self.complete_one(first)

    def owner(self, token: Token) -> str:
        return self.world.ledger.owners[token]

    def complete(self, batch: list[Token], owner: str, pause: tuple[str, int] | None) -> None:
        slot, batch_id = batch[0].claim_slot, batch[0].batch_id
        self.run(
            "SELECT result FROM awa.complete_jobs(%s, %s, %s, %s)",
            (owner, slot, batch_id, [t.position for t in batch]),
            lambda rows: self.answered([(t, "completed") for t in batch], rows),
            pause,
        )

    def finish(self, tokens: list[Token], first: Token, pause: tuple[str, int] | None) -> None:
        wishes = {"completed": "completed", "retry": "retried", "snooze": "snoozed"}
        wishes |= {"cancel": "cancelled", "fail": "failed", "released": "released"}
        asked = []
        for token in tokens:
            word = self.random.choice((*wishes, "completed", "retry", "retry", "released"))
            item = {**token._asdict(), "outcome": word}
            asked.append(item | ({"delay_seconds": 0} if word in ("retry", "snooze") else {}))
        self.run(
            "SELECT result FROM awa.finish_jobs(%s, %s)",
            (self.owner(first), json.dumps(asked)),
            lambda rows: self.answered(
                [(t, wishes[str(item["outcome"])]) for t, item in zip(tokens, asked, strict=True)],
                rows,
            ),
            pause,
        )

    def complete_one(self, token: Token) -> None:
        self.one = token
        self.run(
            "SELECT outcome FROM awa.complete_job(%s, %s, %s, %s, %s)",
            token,
            lambda rows: self.answered([(token, "completed")], [("done",)]),
        )

    def failed(self, error: psycopg.Error) -> None:
        if error.sqlstate != "JQ001":
            super().failed(error)
        elif self.one in self.world.ledger.open and self.one not in self.wishes:
            raise Broken(f"{self.one} is open, but complete_job answered JQ001")

    def answered(self, wishes: list[tuple[Token, str]], rows: Rows) -> None:
        ledger = self.world.ledger
        for (token, wish), (result,) in zip(wishes, rows, strict=True):
            self.world.seen[f"finish {result}"] += 1
            right = {ledger.judge(token, wish)}
            if token in self.wishes:
                # Ended by this transaction: how, the ledger learns at the commit.
                right = {"already_done", "stale"}
            elif right == {"already_done"}:
                right.add("stale")  # the evidence may be gone
            if result not in right | {"busy"}:
                raise Broken(f"{token}, {wish}: answered {result}, not {right}")
            if result == "done":
                self.wishes[token] = wish
                self.effects.append(partial(ledger.end, token, wish))


class Canceller(Actor):
    """Cancels in transactions that stay open, with savepoints."""

    isolations = (READ_COMMITTED,) * 11 + (REPEATABLE_READ,)
    commit_chance = 0.6

    def reset(self) -> None:
        super().reset()
        self.mark: int | None = None

    def move(self) -> None:
        x = self.random.random()
        if x < 0.35:
            self.pick()
        elif x < 0.4 and self.mark is None:
            self.mark = len(self.effects)
            self.savepoint()
        elif x < 0.45 and self.mark is not None:
            self.rollback_to_savepoint()
            del self.effects[self.mark :]
            self.mark = None
        elif x < 0.6:
            self.end()

    def pick(self) -> None:
        chances = {"waiting": 1.0, "running": 0.1}
        jobs = [
            job.job_id
            for job in list(self.world.ledger.jobs.values())[-60:]
            if self.random.random() < chances.get(job.state, 0.03)
        ]
        if jobs:
            pause = self.maybe_pause(0.15, "cancel", "cancel_lease")
            self.cancel(self.random.choice(jobs), pause)

    def cancel(self, job_id: int, pause: tuple[str, int] | None = None) -> None:
        self.touched.add(job_id)
        self.holds_lanes = True
        self.run(
            "SELECT awa.cancel_job(%s)", (job_id,), lambda rows: self.got(job_id, rows[0][0]), pause
        )

    def got(self, job_id: int, answer: str) -> None:
        ledger = self.world.ledger
        self.world.seen[f"cancel {answer}"] += 1
        match answer:
            case "cancelled":
                self.effects.append(partial(ledger.cancel, job_id))
            case "cancelled_running":
                self.effects.append(partial(ledger.cancel_running, job_id))
            case _ if not self.effects:  # it may have cancelled the job itself
                state = ledger.jobs[job_id].state
                if answer not in ("pruned", "already_" + state, state) or state in (
                    "waiting",
                    "running",
                ):
                    raise Broken(f"cancel of job {job_id} answered {answer}, but it is {state}")


class Changer(Actor):
    """Gives jobs that ended another life, and changes those that wait."""

    isolations = (READ_COMMITTED,) * 11 + (REPEATABLE_READ,)

    def move(self) -> None:
        x = self.random.random()
        if x < 0.4:
            jobs = list(self.world.ledger.jobs.values())[-80:]
            is_retry = self.random.random() < 0.6
            jobs = [job for job in jobs if is_retry != (job.state == "waiting")] or jobs
            jobs = [job for job in jobs if job.state not in ("running", "completed")] or jobs
            if jobs and is_retry:
                self.retry(self.random.choice(jobs))
            elif jobs:
                self.update(self.random.choice(jobs))
        elif x < 0.7:
            self.end()

    def retry(self, job: Job, pause: tuple[str, int] | None = None) -> None:
        pause = pause or self.maybe_pause(0.2, "retry", "undo", "undo_seen", "key", "key")
        self.change(job, "retry_job(%s)", (), partial(self.world.ledger.retry, job.job_id), pause)

    def update(self, job: Job) -> None:
        mark = self.world.new_mark()
        changes = json.dumps({"args": {"mark": mark}})
        effect = partial(self.world.ledger.update, job.job_id, mark)
        pause = self.maybe_pause(0.2, "update", "cancel", "take", "insert")
        self.change(job, "update_job(%s, %s)", (changes,), effect, pause)

    def change(
        self,
        job: Job,
        call: str,
        values: tuple[str, ...],
        effect: Callable[[], object],
        pause: tuple[str, int] | None,
    ) -> None:
        self.job, self.is_judged = job, pause is None and not self.effects
        self.is_retry = call.startswith("retry")
        self.touched.add(job.job_id)
        self.holds_lanes = True

        def done(rows: Rows) -> None:
            self.world.seen[f"{call.split('(')[0]} done"] += 1
            self.effects.append(effect)

        self.run(f"SELECT awa.{call}::text", (job.job_id, *values), done, pause)

    def failed(self, error: psycopg.Error) -> None:
        job = self.job
        match error.sqlstate:
            case "23505":
                is_right = bool(self.world.ledger.holders(job.key))
            case "55000":
                is_right = job.state != ("dead_lettered" if self.is_retry else "waiting")
            case _:
                super().failed(error)
                return
        if self.is_judged and not is_right:
            raise Broken(f"{self.name}: job {job.job_id} is {job.state}, but: {error}") from error


class Maintainer(Actor):
    """Plans, publishes, prunes, promotes and rescues, mostly one step per transaction."""

    commit_chance = 0.9
    steps: ClassVar[dict[str, tuple[str, ...]]] = {
        "plan_queue": (),
        "publish_queue": ("publish",),
        "prune_queue": ("prune", "prune", "recheck", "newest"),
        "plan_claim": (),
        "publish_claim": ("publish",),
        "prune_claim": ("prune", "prune", "recheck"),
        "refill": (),
        "promote": ("insert", "row"),
        "rescue": ("rescue", "rescue_lease"),
        "hints": ("newest",),
        "evacuate": ("evacuate", "newest", "lease", "lease"),
        "prune_deferred": ("prune", "recheck"),
    }
    key_steps = ("unique_keys",)  # where jobs have keys
    often = ("plan_queue", "publish_queue", "prune_queue", "prune_queue", "evacuate", "promote")

    def reset(self) -> None:
        super().reset()
        self.rescued: set[Token] = set()

    def move(self) -> None:
        if self.has_snapshot and self.random.random() < 0.9:
            self.end()
            return
        keys = self.key_steps if self.world.has_keys else ()
        step = self.random.choice((*self.steps, *self.often, *keys))
        steps = [step]
        if self.random.random() < 0.05:
            # Without rescue: prune in the same call would remove what tells us of it.
            steps = [step for step in self.steps if step != "rescue"]
        points = self.steps.get(step, ())
        self.tick(steps, self.maybe_pause(0.3, *points) if points else None)

    def tick(self, steps: list[str], pause: tuple[str, int] | None = None) -> None:
        self.holds_lanes = self.holds_lanes or "hints" in steps or "evacuate" in steps
        self.run(
            "SELECT step, outcome, detail ->> 'sqlstate', detail ->> 'message'"
            " FROM awa.tick(jsonb_build_object('steps', %s::text[], 'milliseconds', 600000))",
            (steps,),
            self.got,
            pause,
        )

    def got(self, rows: Rows) -> None:
        for step, outcome, sqlstate, message in rows:
            self.world.seen[f"{step} {outcome}"] += 1
            if outcome == "failed" and sqlstate not in EXPECTED:
                raise Broken(f"step {step} failed: {sqlstate} {message}")
            if step == "rescue" and outcome == "done":
                self.note_rescued()

    def note_rescued(self) -> None:
        """Learn which attempts this transaction rescued: those the ledger still has as open."""
        ledger = self.world.ledger
        sql = (
            "SELECT c.batch_id, p FROM awa.lease_claim_closures c,"
            " unnest(awa._to_list(c.closed)) p WHERE c.outcome = 'rescued'"
            " UNION ALL SELECT batch_id, position FROM awa.leases WHERE outcome = 'rescued'"
        )

        def found(rows: Rows) -> None:
            by_place = {(t.batch_id, t.position): t for t in ledger.open}
            tokens = [by_place[row] for row in rows if row in by_place]
            tokens = [token for token in tokens if token not in self.rescued]
            self.rescued |= set(tokens)
            self.world.seen["rescued"] += len(tokens)
            self.effects += [partial(ledger.end, token, "rescued") for token in tokens]

        self.run(sql, (), found)


class Bystander(Actor):
    """Holds a transaction id, or a snapshot with locks on every leaf, for a long while."""

    def __init__(self, world: World, name: str, sql: str, isolation: IsolationLevel) -> None:
        self.sql, self.isolations = sql, (isolation,)
        super().__init__(world, name)

    def move(self) -> None:
        if self.has_snapshot:
            if self.random.random() < 0.08:
                self.end(False)
        elif self.random.random() < 0.03:
            self.run(self.sql)
