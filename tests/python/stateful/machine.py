"""The rules: each makes a call, lets the model move, and compares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple, TypeVar

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from psycopg.types.json import Jsonb

from stateful.model import (
    ALL_QUEUES,
    ENDED,
    EVIDENCE,
    SHARDS,
    WAITING,
    Job,
    Model,
    Token,
    Worker,
    shard_of,
)
from stateful.stage import CLAIM_SLOTS, EPOCH, PLACES, QUEUE_SLOTS, SETTINGS, Stage

WORKERS = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")
SECOND = 1000
# A worker is dead when it was silent for so long and one heartbeat interval more, but heartbeats
# within such an interval are not written down.
SILENCE = SETTINGS["staleness_seconds"] * SECOND
KEYS = ("d1", "w1")
STEPS = (
    *("verify", "publish_queue", "publish_claim", "plan_queue", "plan_claim", "refill", "promote"),
    *("rescue", "expire", "unique_keys", "instances", "hints", "evacuate"),
    *("prune_attempts", "prune_claim", "prune_queue", "prune_deferred"),
)

queues = st.sampled_from(ALL_QUEUES)
picks = st.integers(0, 999)  # which of the jobs that a rule may take
delays = st.sampled_from((0, 0, 1, 5, 40, 700))
workers = st.sampled_from(WORKERS)
outcomes = st.sampled_from(("completed", "retry", "snooze", "cancel", "fail", "released"))
options = st.fixed_dictionaries(
    {
        "queue": queues,
        "priority": st.sampled_from((2, 2, 1, 4)),
        "delay": delays,
        "key": st.sampled_from((None, None, *KEYS)),
        "ordering_key": st.sampled_from(("a", "b", "c")),
        "max_attempts": st.sampled_from((25, 25, 1, 2)),
        "deadline": st.sampled_from((None, None, None, 20)),
    }
)
Options = dict[str, Any]


When = Callable[[Any], object]


class Call(NamedTuple):
    """What may be drawn: a method with its arguments, how often, and when."""

    weight: int
    when: When
    arguments: st.SearchStrategy[dict[str, Any]]


# Of rules hypothesis leaves out, by its design, many in each play, and a job needs many calls to
# get anywhere. So there is one rule, which draws the call.
CALLS: dict[str, Call] = {}
Method = TypeVar("Method", bound=Callable[..., None])


def call(weight: int = 1, when: When = bool, **arguments: Any) -> Callable[[Method], Method]:
    """Let a method be drawn."""

    def register(method: Method) -> Method:
        CALLS[method.__name__] = Call(weight, when, st.fixed_dictionaries(arguments))
        return method

    return register


def some(*states: str) -> When:
    """When there are jobs in some states."""
    return lambda self: self.model.among(*states)


class Machine(RuleBasedStateMachine):
    """One play. The stage is set by the test."""

    stage: ClassVar[Stage]

    @initialize()
    def begin(self) -> None:
        self.stage.reset()
        self.model = Model()
        self.workers = {name: Worker(name) for name in WORKERS}
        self.made, self.refusal = 0, ""
        self.looked_at = 0  # when rescue looked last
        self.touched: set[int] = set()

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = [name for name, one in CALLS.items() if one.when(self) for _ in range(one.weight)]
        name = data.draw(st.sampled_from(names), label="call")
        getattr(self, name)(**data.draw(CALLS[name].arguments, label=name))

    # ---- time and calls

    def wait(self, milliseconds: int = 1) -> None:
        self.model.now += milliseconds
        self.stage.set_clock(self.model.now)

    def ask(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Make a call, a moment later than the last one."""
        self.wait()
        return self.stage.rows(sql, *values)

    def value(self, sql: str, *values: object) -> Any:
        [(value, *_)] = self.ask(sql, *values)
        return value

    def attempt(self, body: Callable[[], Any]) -> tuple[Any, str]:
        """Return the answer of a call, and the code of the error that it raised instead."""
        try:
            return body(), ""
        except psycopg.Error as error:
            if error.sqlstate not in ("23505", "55000", "JQ001"):
                raise
            self.refusal = str(error)
            return None, error.sqlstate

    def pick(self, number: int, *states: str) -> Job:
        jobs = self.model.among(*states)
        job = jobs[number % len(jobs)]
        self.touched.add(job.job_id)
        return job

    # ---- inserts

    def arguments(self, options: Options, conflict: str = "return") -> tuple[dict[str, Any], Job]:
        """Arguments of insert_job, and the job that they ask for."""
        self.made += 1
        args = {"n": self.made}
        opts: Options = {}
        if options["queue"] in SHARDS:
            opts["ordering_key"] = options["ordering_key"]
        if options["delay"]:
            opts["delay_seconds"] = options["delay"]
        if options["deadline"]:
            opts["deadline_seconds"] = options["deadline"]
        if key := options["key"]:
            opts["unique"] = {"key": digits(key), "on_conflict": conflict}
            if key[0] == "w":
                opts["unique"]["states"] = ["scheduled", "available"]
        names = ("queue", "priority", "max_attempts")
        call = {"kind": "k", "args": args, "opts": opts} | {n: options[n] for n in names}
        job = Job(
            0,
            options["queue"],
            options["priority"],
            shard_of(opts.get("ordering_key"), options["queue"]),
            "scheduled" if options["delay"] else "available",
            0,
            max_attempts=options["max_attempts"],
            deadline=options["deadline"] and options["deadline"] * SECOND,
            key=key,
            args=args,
        )
        return call, job

    def inserted(self, job: Job, answer: tuple[Any, ...], delay: int) -> None:
        """Compare the answer of one insert with what it had to be."""
        job_id, state, duplicate = answer
        holder = self.model.holder(job.key) if job.key else None
        if holder:
            expected = (holder.job_id, holder.state, True)
            assert answer == expected, f"duplicate of {holder} was answered {answer}"
            return
        assert (state, duplicate) == (job.state, False), f"insert of {job} was answered {answer}"
        assert job_id not in self.model.jobs, f"job id {job_id} was given twice"
        job.job_id, job.run_at = job_id, self.model.now + delay * SECOND
        self.model.jobs[job_id] = job
        self.touched.add(job_id)
        if job.state == "available":
            self.model.enqueue(job)

    INSERT = (
        "SELECT job_id, state::text, duplicate FROM awa.insert_job(kind => %s, args => %s,"
        " queue => %s, priority => %s, max_attempts => %s, opts => %s)"
    )

    def insert_row(self, call: dict[str, Any]) -> tuple[Any, ...]:
        names = ("kind", "args", "queue", "priority", "max_attempts", "opts")
        values = [Jsonb(call[n]) if n in ("args", "opts") else call[n] for n in names]
        [row] = self.ask(self.INSERT, *values)
        return row

    @call(
        weight=3,
        options=options,
        conflict=st.sampled_from(("return", "return", "raise", "replace")),
    )
    def insert(self, options: Options, conflict: str) -> None:
        call, job = self.arguments(options, conflict)
        answer, refused = self.attempt(lambda: self.insert_row(call))
        holder = self.model.holder(job.key) if job.key else None
        if conflict == "raise" and holder:
            assert refused == "23505", f"a duplicate of {holder} was let in: {answer}"
            assert str(holder.job_id) in self.refusal, f"{self.refusal} does not name {holder}"
            return
        assert not refused, f"insert of {job}: {self.refusal}"
        self.inserted(job, answer, options["delay"])
        if conflict == "replace" and holder and holder.state in WAITING:
            holder.args = job.args
            if holder.state == "available":
                self.model.enqueue(holder)

    @call(weight=2, when=some("running"), number=picks, options=options)
    def insert_beside_one_that_runs(self, number: int, options: Options) -> None:
        """With the key of a running job, if it has one."""
        job = self.pick(number, "running")
        self.insert(options | {"key": job.key}, "return")

    @call(options=options)
    def insert_plain(self, options: Options) -> None:
        """The shortest way, which has code of its own."""
        plain = options | {"delay": 0, "key": None, "max_attempts": 25, "deadline": None}
        if plain["queue"] in SHARDS:
            plain["queue"] = "plain"
        call, job = self.arguments(plain)
        self.inserted(job, self.insert_row(call), 0)

    @call(options=options)
    def insert_and_roll_back(self, options: Options) -> None:
        call, _ = self.arguments(options | {"key": None})
        with self.stage.conn.transaction(force_rollback=True):
            self.insert_row(call)
        self.wait()  # the clock went back as well

    @call(weight=2, several=st.lists(options, min_size=1, max_size=4))
    def insert_jobs(self, several: list[Options]) -> None:
        pairs = [self.arguments(options) for options in several]
        rows = self.ask(
            "SELECT job_id, state::text, duplicate FROM awa.insert_jobs(%s)",
            Jsonb([call for call, _ in pairs]),
        )
        for (_, job), answer, options in zip(pairs, rows, several, strict=True):
            self.inserted(job, answer, options["delay"])

    @call(options=options, count=st.integers(1, 5))
    def insert_many(self, options: Options, count: int) -> None:
        pairs = [self.arguments(options | {"key": None}) for _ in range(count)]
        call = pairs[0][0]
        rows = self.ask(
            "SELECT awa.insert_many('k', %s::jsonb[], %s, %s, %s, NULL, %s)",
            [Jsonb(call["args"]) for call, _ in pairs],
            *(call[n] for n in ("queue", "priority", "max_attempts")),
            Jsonb(call["opts"]),
        )
        for (_, job), (job_id,) in zip(pairs, rows, strict=True):
            self.inserted(job, (job_id, job.state, False), options["delay"])

    # ---- claims

    CLAIM = (
        "SELECT job_id, run_lease, claim_slot, batch_id, position, attempt, max_attempts, queue,"
        " priority, args, progress, deadline_at"
        " FROM awa.claim_ready_runtime(%s, %s, %s, %s)"
    )

    @call(
        queue=queues,
        limit=st.sampled_from((1, 2, 5, 50)),
        worker=workers,
        deadline=st.sampled_from((None, None, 40)),
        separate=st.booleans(),
    )
    def claim(
        self, queue: str, limit: int, worker: str, deadline: int | None, separate: bool
    ) -> None:
        opts: Options = {"deadline_seconds": deadline} if deadline else {}
        if separate:
            opts["separate"] = ["k"]
        rows = self.ask(self.CLAIM, queue, limit, worker, Jsonb(opts))
        lanes = self.model.lanes(queue)
        expected = min(limit, sum(len(lane) for lane in lanes.values()))
        assert len(rows) == expected, f"{len(rows)} of {expected} claimed: {rows} of {lanes}"
        lane: list[Job] = []
        for row in rows:
            job = self.model.jobs[row[0]]
            if not lane:  # the next lane is the best one; those of equal rank in any order
                assert job.lane in lanes, f"{job} was claimed but is not claimable"
                lane = lanes.pop(job.lane)
                best = min([self.model.rank(other) for other in (lane, *lanes.values())])
                assert self.model.rank(lane) == best, f"{lane} was claimed before {lanes}"
            assert job is lane.pop(0), f"{row} was claimed out of its order"
            self.started(job, row, worker, deadline)
        if not rows:
            [(reason,)] = self.ask("SELECT reason FROM awa.claim_status(%s)", queue)
            assert (reason == "paused") == (queue in self.model.paused), reason

    @call(
        weight=2,
        when=some("available"),
        number=picks,
        limit=st.sampled_from((1, 5)),
        worker=workers,
    )
    def claim_what_waits(self, number: int, limit: int, worker: str) -> None:
        """As claim, but most queues are empty most of the time."""
        self.claim(self.pick(number, "available").queue, limit, worker, None, separate=False)

    @call(
        weight=4,
        when=some("available"),
        number=picks,
        worker=workers,
        ends=st.lists(outcomes, min_size=1, max_size=5),
    )
    def work(self, number: int, worker: str, ends: list[str]) -> None:
        """What a worker does: claim some, and end them."""
        before = {job.job_id for job in self.model.among("running")}
        self.claim_what_waits(number, len(ends), worker)
        jobs = [job for job in self.model.among("running") if job.job_id not in before]
        for job, outcome in zip(jobs, ends, strict=False):
            self.end_attempt(job, outcome, {"delay_seconds": 1} if outcome == "snooze" else {})

    @call(queue=queues, limit=st.sampled_from((1, 50)), worker=workers)
    def claim_and_roll_back(self, queue: str, limit: int, worker: str) -> None:
        with self.stage.conn.transaction(force_rollback=True):
            self.ask(self.CLAIM, queue, limit, worker, Jsonb({}))
        self.wait()

    def started(self, job: Job, row: tuple[Any, ...], worker: str, deadline: int | None) -> None:
        limit = deadline and deadline * SECOND
        self.model.start(job, Token(row[0], row[1], row[2], row[3], row[4], worker), limit)
        self.touched.add(job.job_id)
        expected = (
            job.lease,
            job.attempt,
            job.max_attempts,
            job.queue,
            job.priority,
            job.args,
            job.progress,
            job.deadline_at,
        )
        found = (row[1], *row[5:11], row[11] and clock(row[11]))
        assert found == expected, f"claim of {job.job_id} is {found}, not {expected}"

    # ---- ends of attempts

    FINISH = "SELECT result FROM awa.finish_jobs(%s, %s)"

    def close(self, token: Token | None, outcome: str, **fields: Any) -> str:
        assert token
        items = Jsonb([token.item(outcome, **fields)])
        return str(self.value(self.FINISH, token.owner, items))

    @call(
        weight=4,
        when=some("running"),
        number=picks,
        outcome=outcomes,
        delay=st.sampled_from((0, 1, 30)),
        has_delay=st.booleans(),
        is_unknown=st.booleans(),
    )
    def finish(
        self, number: int, outcome: str, delay: int, has_delay: bool, is_unknown: bool
    ) -> None:
        job = self.pick(number, "running")
        fields: Options = {}
        if outcome == "snooze" or (outcome == "retry" and has_delay):
            fields["delay_seconds"] = delay
        if outcome == "released" and is_unknown:
            fields["reason"] = "unknown_kind"
        self.end_attempt(job, outcome, fields)

    def end_attempt(self, job: Job, outcome: str, fields: Options) -> None:
        if outcome in ("retry", "fail"):
            fields["error"] = "on purpose"
        answer = self.close(job.token, outcome, **fields)
        assert answer == "done", f"finish of {job} as {outcome} was answered {answer}"
        delayed = fields["delay_seconds"] * SECOND if "delay_seconds" in fields else None
        self.model.finish(job, outcome, delayed, fields.get("reason", ""))

    @call(weight=2, when=some("running"), number=picks)
    def complete_batch(self, number: int) -> None:
        token = self.pick(number, "running").token
        assert token
        jobs = [
            job
            for job in self.model.among("running")
            if job.token and job.token.batch_id == token.batch_id
        ]
        positions = [job.token.position for job in jobs if job.token]
        rows = self.ask(
            "SELECT result, job_id, run_lease FROM awa.complete_jobs(%s, %s, %s, %s)",
            token.owner,
            token.claim_slot,
            token.batch_id,
            positions,
        )
        assert rows == [("done", job.job_id, job.lease) for job in jobs], rows
        for job in jobs:
            self.touched.add(job.job_id)
            self.model.finish(job, "completed")

    COMPLETE = "SELECT outcome FROM awa.complete_job(%s, %s, %s, %s, %s)"

    @call(weight=2, when=some("running"), number=picks, rolls_back=st.booleans())
    def complete_one(self, number: int, rolls_back: bool) -> None:
        job = self.pick(number, "running")
        assert job.token
        with self.stage.conn.transaction(force_rollback=rolls_back):
            assert self.value(self.COMPLETE, *job.token.numbers) == "completed"
        if not rolls_back:
            self.model.finish(job, "completed")
        self.wait()  # a rollback takes the clock back as well

    @call(
        weight=2,
        when=lambda self: self.model.old,
        number=picks,
        way=st.sampled_from(("complete_job", "progress", "completed", "retry")),
    )
    def use_an_old_token(self, number: int, way: str) -> None:
        """What an attempt does after its end changes nothing, and is told so."""
        token = self.model.old[number % len(self.model.old)].token
        self.touched.add(token.job_id)
        if way == "complete_job":
            _, refused = self.attempt(lambda: self.value(self.COMPLETE, *token.numbers))
            assert refused == "JQ001", f"{token} was completed again"
        elif way == "progress":
            assert self.value(self.PROGRESS, *token.numbers, Jsonb(0)) is False, token
        else:
            fields = {"delay_seconds": 1} if way == "retry" else {}
            answer = self.close(token, way, **fields)
            assert answer in ("already_done", "stale"), f"{token} was finished again: {answer}"

    STATUS = "SELECT awa.attempt_status(%s, %s, %s, %s, %s)"

    @call(weight=2, when=lambda self: self.model.old, number=picks)
    def ask_for_an_old_attempt(self, number: int) -> None:
        """Its evidence stays for a while; later the end of the job may still tell."""
        old = self.model.old[number % len(self.model.old)]
        answer = self.value(self.STATUS, *old.token.numbers)
        right = {old.outcome}
        if self.model.now - old.at >= EVIDENCE or self.model.lost_evidence:
            right |= {"unknown"} | ({"failed"} if old.outcome == "rescued" else set())
        assert answer in right, f"{old} is {answer}"

    PROGRESS = "SELECT awa.set_progress(%s, %s, %s, %s, %s, %s)"

    @call(weight=2, when=some("running"), number=picks, progress=st.integers(1, 9))
    def set_progress(self, number: int, progress: int) -> None:
        job = self.pick(number, "running")
        assert job.token
        assert self.value(self.PROGRESS, *job.token.numbers, Jsonb(progress)) is True, job
        job.progress = progress

    @call(weight=2, worker=workers, forgets=st.booleans(), holds_all=st.booleans())
    def heartbeat(self, worker: str, forgets: bool, holds_all: bool) -> None:
        jobs = [
            job for job in self.model.among("running") if job.token and job.token.owner == worker
        ]
        held = frozenset(job.token.position for job in jobs[forgets:] if job.token)
        holds = [
            {"claim_slot": t.claim_slot, "batch_id": t.batch_id, "positions": [t.position]}
            for t in (job.token for job in jobs[forgets:])
            if t
        ]
        self.ask("SELECT awa.heartbeat(%s, %s)", worker, None if holds_all else Jsonb(holds))
        self.workers[worker].beats.append((self.model.now, None if holds_all else held))

    # ---- changes by operators

    @call(weight=2, when=lambda self: self.model.jobs, number=picks)
    def cancel(self, number: int) -> None:
        self.cancel_job(self.pick(number, *WAITING, "running", *ENDED, "dead", "gone"))

    def cancel_job(self, job: Job) -> None:
        was = job.state
        answer = self.value("SELECT awa.cancel_job(%s)", job.job_id)
        if was in WAITING:
            right = {"cancelled"}
            self.model.end(job, "cancelled")
        elif was == "running":
            right = {"cancelled_running"}
            self.model.finish(job, "cancel")
        elif was in ("dead", "gone"):
            right = {"dead_lettered" if was == "dead" else "pruned"}
        else:
            right = {f"already_{was}"} | (set() if self.model.is_kept(job) else {"pruned"})
        assert answer in right, f"cancel of {job} was answered {answer}"

    @call(key=st.sampled_from(KEYS))
    def cancel_by_key(self, key: str) -> None:
        sql = "SELECT awa.cancel_by_unique_key(decode(%s, 'hex'))"
        answer = self.value(sql, digits(key))
        holder = self.model.holder(key)
        if holder is None or holder.state not in (*WAITING, "running"):
            assert answer is None, f"{answer} was cancelled by its key, which has {holder}"
            return
        assert answer == holder.job_id, f"{answer} was cancelled for {holder}"
        self.touched.add(holder.job_id)
        if holder.state == "running":
            self.model.finish(holder, "cancel")
        else:
            self.model.end(holder, "cancelled")

    @call(
        weight=4,
        when=lambda self: self.model.jobs,
        number=picks,
        delay=delays,
        queue=st.sampled_from((None, None, *ALL_QUEUES)),
    )
    def retry_job(self, number: int, delay: int, queue: str | None) -> None:
        job = self.pick(number, *WAITING, "running", *ENDED, "dead", "gone")
        opts: Options = {"delay_seconds": delay} if delay else {}
        if queue:
            opts["queue"] = queue
        sql = "SELECT state::text FROM awa.retry_job(%s, %s)"
        was = job.copy()
        answer, refused = self.attempt(lambda: self.value(sql, job.job_id, Jsonb(opts)))
        if refused == "55000":
            is_right = was.state in ("available", "running", "completed", "gone")
            is_right |= was.state in ENDED and not self.model.is_kept(was)
            assert is_right, f"{was}: {self.refusal}"
            return
        assert was.state in ("scheduled", "retryable", "failed", "cancelled", "dead"), was
        revived = self.model.revive(job, delay * SECOND)
        assert revived == (not refused), f"retry of {was}: {answer} {self.refusal}"
        if revived:
            assert answer == job.state, f"retry of {was} was answered {answer}"
            if queue:
                job.queue, job.shard = queue, job.shard % SHARDS.get(queue, 1)

    @call(
        weight=3,
        when=some(*WAITING, "running"),
        number=picks,
        delay=st.sampled_from((None, 0, 5, 700)),
        queue=st.sampled_from((None, None, *ALL_QUEUES)),
        priority=st.sampled_from((None, None, 1, 3)),
    )
    def update_job(
        self, number: int, delay: int | None, queue: str | None, priority: int | None
    ) -> None:
        job = self.pick(number, *WAITING, "running")
        self.made += 1
        changes: Options = {"args": {"n": self.made}, "queue": queue, "priority": priority}
        changes["delay_seconds"] = delay
        changes = {name: value for name, value in changes.items() if value is not None}
        sql = "SELECT awa.update_job(%s, %s)"
        was = job.copy()
        answer, refused = self.attempt(lambda: self.value(sql, job.job_id, Jsonb(changes)))
        if refused == "23505":
            assert job.key, self.refusal
            assert self.model.holder(job.key, job.job_id), f"{job} may have its key"
            return
        if refused:
            assert job.state == "running", f"{job}: {self.refusal}"
            return
        assert job.state != "running", f"{job} runs and was changed"
        if job.state == "available":
            job.state, job.run_at = "scheduled", min(job.run_at, self.model.now)
        job.args, job.priority = changes["args"], priority or job.priority
        if queue and queue != job.queue:
            job.queue, job.shard = queue, job.shard % SHARDS.get(queue, 1)
        if delay is not None:
            job.run_at = self.model.now + delay * SECOND
        if job.run_at <= self.model.now:
            self.model.enqueue(job)
        assert answer == job.state, f"update of {was} by {changes} was answered {answer}"

    @call(queue=queues)
    def pause(self, queue: str) -> None:
        answer = self.value("SELECT awa.pause_queue(%s)", queue)
        assert answer == (queue not in self.model.paused)
        self.model.paused.add(queue)

    @call(weight=2, when=lambda self: self.model.paused, number=picks)
    def resume(self, number: int) -> None:
        queue = sorted(self.model.paused)[number % len(self.model.paused)]
        assert self.value("SELECT awa.resume_queue(%s)", queue) is True
        self.model.paused.remove(queue)

    @call(queue=queues)
    def drain(self, queue: str) -> None:
        waiting = [job for job in self.model.among(*WAITING) if job.queue == queue]
        answer = self.value("SELECT awa.drain_queue(%s)", queue)
        assert answer == len(waiting), f"drained {answer}, but waiting are {waiting}"
        for job in waiting:
            self.model.end(job, "cancelled")

    @call(weight=2, when=some("dead"), number=picks, delay=delays)
    def retry_dlq(self, number: int, delay: int) -> None:
        job = self.pick(number, "dead")
        sql = "SELECT state::text FROM awa.retry_dlq(%s, %s)"
        opts = Jsonb({"delay_seconds": delay} if delay else {})
        answer, refused = self.attempt(lambda: self.value(sql, job.job_id, opts))
        revived = self.model.revive(job, delay * SECOND)
        assert revived == (not refused), f"retry of {job}: {answer} {self.refusal}"
        assert answer == (job.state if revived else None), f"retry of {job}: {answer}"

    @call(when=some("dead"), number=picks)
    def purge_dlq(self, number: int) -> None:
        job = self.pick(number, "dead")
        assert self.value("SELECT awa.purge_dlq(%s)", job.job_id) is True, job
        job.state = "gone"

    # ---- maintenance

    @call(weight=2, step=st.sampled_from(STEPS), seconds=st.sampled_from((0, 16, 310)))
    def tick_and_roll_back(self, step: str, seconds: int) -> None:
        """What sequences remember stays, and must not matter."""
        self.wait(seconds * SECOND + 1)
        with self.stage.conn.transaction(force_rollback=True):
            self.stage.tick(step)

    @call(weight=2, seconds=st.sampled_from((1, 6, 25, 70, 310, 800)))
    def pass_time(self, seconds: int) -> None:
        self.wait(seconds * SECOND)

    @call(weight=3)
    def promote(self) -> None:
        """Refill looks every 15 seconds, and then nothing that is due may stay behind."""
        self.wait(16 * SECOND)
        self.stage.tick("refill", "promote")
        self.model.promote()

    @call(weight=2, passes=st.integers(1, 2))
    def rescue(self, passes: int) -> None:
        for _ in range(passes):
            self.wait(11 * SECOND)
            self.stage.tick("rescue")
            self.rescued()
            self.looked_at = self.model.now

    def rescued(self) -> None:
        """Rescue takes what it must and nothing that it must not."""
        running = [job for job in self.model.among("running") if job.token]
        for job in running:
            assert job.token
            [(status,)] = self.stage.rows(self.STATUS, *job.token.numbers)
            is_late = job.deadline_at is not None and job.deadline_at < self.model.now
            if status == "open":
                assert not is_late, f"{job} is past its deadline"
                assert not self.must_be_lost(job), f"{job} was not rescued: {self.workers}"
                continue
            assert status == "rescued", f"{job} was {status} by rescue"
            assert is_late or self.may_be_lost(job), f"{job} was rescued, but {self.workers}"
            self.touched.add(job.job_id)
            self.model.finish(job, "rescue")

    def may_be_lost(self, job: Job) -> bool:
        """Its worker is silent, or has twice said that it does not hold the job."""
        assert job.token
        beats = self.workers[job.token.owner].beats
        now, position = self.model.now, job.token.position
        if not beats:
            return now - job.claimed_at >= SILENCE
        denied = [
            time
            for time, held in beats
            if time >= job.claimed_at and held is not None and position not in held
        ]
        is_denied = denied and denied[-1] - denied[0] >= SETTINGS["heartbeat_seconds"] * SECOND
        return bool(is_denied) or now - beats[-1][0] >= SILENCE

    def must_be_lost(self, job: Job) -> bool:
        """Its worker was silent for too long already when rescue looked last, and since then."""
        assert job.token
        beats = self.workers[job.token.owner].beats
        is_old = self.model.now - job.claimed_at > SILENCE
        return is_old and (not beats or beats[-1][0] < self.looked_at - SILENCE)

    @call(weight=2, ring=st.sampled_from(("queue", "claim")), seconds=st.sampled_from((1, 21)))
    def rotate(self, ring: str, seconds: int) -> None:
        self.wait(seconds * SECOND)
        self.stage.tick(f"plan_{ring}")
        self.wait()
        self.stage.tick(f"publish_{ring}")

    @call(weight=2, ring=st.sampled_from(("queue", "claim", "deferred", "attempts")))
    def prune(self, ring: str) -> None:
        for _ in range(3):  # a slot is released first, and emptied later
            self.wait(6 * SECOND)
            self.look_for_room()
            self.stage.tick(f"prune_{ring}")

    ROOM = (
        "SELECT (SELECT bool_or(awa._slot_is_empty('queue', s)) FROM generate_series(0, %s) s),"
        " (SELECT bool_or(awa._slot_is_empty('claim', s)) FROM generate_series(0, %s) s)"
    )

    def look_for_room(self) -> None:
        [(queue_room, claim_room)] = self.stage.rows(self.ROOM, QUEUE_SLOTS - 1, CLAIM_SLOTS - 1)
        self.model.had_no_room |= not queue_room
        self.model.lost_evidence |= not (queue_room and claim_room)

    @call(weight=2)
    def evacuate(self) -> None:
        self.wait()
        outcome = self.stage.tick("evacuate")["evacuate"]
        assert outcome != "contended"

    @call(step=st.sampled_from(("unique_keys", "instances", "hints", "verify")))
    def keep_house(self, step: str) -> None:
        self.wait()
        self.stage.tick(step)

    @call()
    def expire(self) -> None:
        self.wait()
        self.stage.tick("expire")
        for job in self.model.among("dead"):
            if not self.model.is_kept(job):
                job.state = "gone"

    @call()
    def verify(self) -> None:
        rows = self.ask("SELECT step, outcome FROM awa.verify()")
        assert {outcome for _, outcome in rows} == {"done"}, rows

    @call()
    def turn(self) -> None:
        """Both rings as far as they go, with all that makes room. An idle ring does not turn."""
        for _ in range(QUEUE_SLOTS):
            self.insert_plain({"queue": "plain", "priority": 2})
            self.cancel_job(max(self.model.among("available"), key=lambda job: job.place))
            self.wait(21 * SECOND)
            steps = ("plan_queue", "plan_claim", "publish_queue", "publish_claim", "evacuate")
            for step in steps:
                self.stage.tick(step)
            self.look_for_room()
            self.stage.tick("prune_claim")
            self.stage.tick("prune_queue")

    # ---- what always holds

    @invariant()
    def every_job_is_in_one_place(self) -> None:
        found: dict[int, list[tuple[str, int]]] = {}
        for job_id, place, lease in self.stage.rows(PLACES):
            found.setdefault(job_id, []).append((place, lease))
        for job in self.model.jobs.values():
            places = found.pop(job.job_id, [])
            expected = (job.state, job.lease)
            if job.state == "gone" or (job.state in ENDED and not places):
                assert not places, f"{job} is still there: {places}"
                assert job.state == "gone" or not self.model.is_kept(job), f"{job} is lost"
            else:
                assert places == [expected], f"{job} is in {places}"
        assert not found, f"nobody inserted {found}"

    @invariant()
    def counts_are_exact(self) -> None:
        columns = (*WAITING, "running", *ENDED, "dead_lettered")
        sql = f"SELECT queue, {', '.join(columns)} FROM unnest(%s::text[]) q, awa.queue_counts(q)"
        for queue, *row in self.stage.rows(sql, list(ALL_QUEUES)):
            known = self.model.counts(queue)
            known["dead_lettered"] = known.pop("dead", 0)
            shown = dict(zip(columns, row, strict=True))
            assert shown == {name: known[name] for name in columns}, f"counts of {queue}"

    JOB = (
        "SELECT e.state, (e.facts ->> 'ahead')::integer, j.state, j.queue, j.priority, j.run_lease,"
        " j.attempt, j.max_attempts, j.args, j.progress, coalesce(jsonb_array_length(j.errors), 0),"
        " j.run_at, j.finalized_at"
        " FROM awa.job(%s) j, awa.explain_job(%s) e"
    )

    @invariant()
    def job_says_the_same(self) -> None:
        """For the jobs that the last rule was about."""
        touched, self.touched = self.touched, set()
        for job_id in sorted(touched):
            job = self.model.jobs[job_id]
            [found] = self.stage.rows(self.JOB, job_id, job_id)
            explained, ahead, *row, run_at, ended_at = found
            state = {"dead": "failed", "gone": "pruned"}.get(job.state, job.state)
            assert explained == row[0], f"{job} is {row[0]}, and explained as {explained}"
            is_gone = job.state == "gone" or (job.state in ENDED and not self.model.is_kept(job))
            if is_gone and row[0] == "pruned":
                continue
            expected = [
                *(state, job.queue, job.priority, job.lease, job.attempt, job.max_attempts),
                *(job.args, job.progress, job.errors),
            ]
            assert row == expected, f"{job} is {row}"
            assert clock(run_at) == job.run_at, f"{job} runs at {clock(run_at)}"
            if job.state == "available":
                assert ahead == self.model.ahead(job), f"{job} waits behind {ahead}"
            if job.state in (*ENDED, "dead"):
                assert clock(ended_at) == job.ended_at, f"{job} ended at {clock(ended_at)}"

    @invariant()
    def a_key_has_one_holder(self) -> None:
        for key in KEYS:
            self.model.holder(key)

    def teardown(self) -> None:
        """Nothing is lost: whoever waits can be run, and every job ends."""
        if not hasattr(self, "model") or sys.exc_info()[0]:
            return
        for queue in sorted(self.model.paused):
            self.ask("SELECT awa.resume_queue(%s)", queue)
        self.model.paused.clear()
        for _ in range(60):
            left = self.model.among(*WAITING, "running")
            if not left:
                break
            self.rescue(2)
            self.wait(max([0, *(job.run_at - self.model.now for job in left)]))
            self.promote()
            for queue in ALL_QUEUES:
                self.claim(queue, 50, WORKERS[0], None, separate=False)
            for job in self.model.among("running"):
                if job.token and job.token.owner == WORKERS[0]:
                    assert self.close(job.token, "completed") == "done", job
                    self.model.finish(job, "completed")
        assert not self.model.among(*WAITING, "running"), "jobs do not end"
        self.every_job_is_in_one_place()
        self.counts_are_exact()


def digits(key: str) -> str:
    """A key as the engine knows it."""
    return f"{KEYS.index(key):032x}"


def clock(time: datetime) -> int:
    """A time of the server on the clock of the model."""
    return round((time - EPOCH) / timedelta(milliseconds=1))
