"""What the outside world knows of jobs and attempts: only what was committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

TERMINAL = frozenset({"completed", "failed", "cancelled", "dead_lettered"})
# How a job stands after an attempt that ended so; the rest goes on waiting.
STATE_AFTER = {state: state for state in TERMINAL}
# Smaller ids are of jobs that started deferred.
FIRST_POSITION = 2**42 + 1


class Broken(Exception):
    """The ledger and the database disagree."""


class Token(NamedTuple):
    """What names an attempt."""

    job_id: int
    run_lease: int
    claim_slot: int
    batch_id: int
    position: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed job as the database returned it."""

    COLUMNS: ClassVar[str] = (
        "job_id, run_lease, claim_slot, batch_id, position, queue, priority, attempt,"
        " args ->> 'mark'"
    )
    token: Token
    queue: str
    priority: int
    attempt: int
    mark: int

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> Self:
        """Return the claim that a row with COLUMNS holds."""
        *token, queue, priority, attempt, mark = row
        return cls(Token(*token), queue, priority, attempt, int(mark))


@dataclass(slots=True)
class Job:
    """One committed job."""

    job_id: int
    mark: int  # unique number in its args
    queue: str
    priority: int
    max_attempts: int
    state: str = "waiting"
    attempt: int = 0
    lease: int = 0
    is_late: bool = False  # its producer may have written to a slot that was left before
    position: int | None = None  # of the first life, if the job was ready at once
    key: int | None = None  # its unique key, which it holds while it is alive

    @property
    def is_alive(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def may_be_unsettled(self) -> bool:
        """Once its slot is pruned, a job that ended before any claim came by looks like one whose
        insert may still commit; one that started deferred does so whatever it has become."""
        if self.job_id < FIRST_POSITION:
            return self.state in TERMINAL
        return self.state == "cancelled" and self.lease == 0

    def end(self, wish: str) -> str:
        """Return what becomes of the running attempt when its worker wishes so, and do it."""
        if wish in ("retried", "rescued") and self.attempt >= self.max_attempts:
            final = "dead_lettered" if self.queue in DLQ_QUEUES else "failed"
            self.state = final
            return "rescued" if wish == "rescued" else final
        outcome = wish
        if wish == "failed" and self.queue in DLQ_QUEUES:
            outcome = "dead_lettered"
        if wish in ("snoozed", "released"):
            self.attempt -= 1
        self.state = STATE_AFTER.get(outcome, "waiting")
        return outcome


DLQ_QUEUES = frozenset({"two"})


@dataclass(slots=True)
class Ledger:
    """Jobs by id, open attempts by token, closed attempts with their outcome."""

    jobs: dict[int, Job] = field(default_factory=dict)
    open: dict[Token, str] = field(default_factory=dict)  # with the instance that owns it
    closed: dict[Token, str] = field(default_factory=dict)
    owners: dict[Token, str] = field(default_factory=dict)  # of all attempts
    positions: set[int] = field(default_factory=set)  # all that were ever emitted

    def insert(self, job: Job) -> None:
        if job.job_id in self.jobs:
            raise Broken(f"two inserts answered job {job.job_id}")
        self.check_key(job)
        self.jobs[job.job_id] = job

    def holders(self, key: int | None) -> list[int]:
        """The living jobs of a key."""
        alive = (job for job in self.jobs.values() if job.is_alive)
        return [job.job_id for job in alive if job.key == key is not None]

    def check_key(self, job: Job) -> None:
        """A job that begins a life is the only living one of its key."""
        if holders := self.holders(job.key):
            raise Broken(f"job {job.job_id} got key {job.key}, but {holders} hold it")

    def retry(self, job_id: int) -> None:
        job = self.jobs[job_id]
        if job.state in ("running", "completed"):
            raise Broken(f"job {job_id} was retried, but is {job.state}")
        if job.state != "waiting":
            self.check_key(job)
            job.state, job.attempt = "waiting", 0
        job.position = None

    def update(self, job_id: int, mark: int) -> None:
        job = self.jobs[job_id]
        if job.state != "waiting":
            raise Broken(f"job {job_id} was updated, but is {job.state}")
        job.mark, job.position = mark, None

    def claim(self, claims: Iterable[Claim], owner: str) -> None:
        for claim in claims:
            token = claim.token
            job = self.jobs.get(token.job_id)
            if job is None:
                raise Broken(f"job {token.job_id} was emitted but its insert never committed")
            if token.position in self.positions:
                raise Broken(f"position {token.position} of job {token.job_id} was emitted twice")
            if job.state != "waiting":
                raise Broken(f"job {token.job_id} was emitted while {job.state}")
            job.attempt += 1
            job.lease += 1
            job.state = "running"
            seen = (token.run_lease, claim.attempt, claim.queue, claim.priority, claim.mark)
            known = (job.lease, job.attempt, job.queue, job.priority, job.mark)
            if seen != known:
                raise Broken(f"job {token.job_id} was emitted as {seen}, but is {known}")
            self.positions.add(token.position)
            self.open[token] = self.owners[token] = owner

    def end(self, token: Token, wish: str) -> None:
        if token not in self.open:
            raise Broken(f"{token} ended as {wish}, but is {self.closed.get(token, 'unknown')}")
        del self.open[token]
        self.closed[token] = self.jobs[token.job_id].end(wish)

    def cancel(self, job_id: int) -> None:
        job = self.jobs[job_id]
        if job.state != "waiting":
            raise Broken(f"job {job_id} was cancelled as waiting, but is {job.state}")
        job.state = "cancelled"

    def cancel_running(self, job_id: int) -> None:
        found = [token for token in self.open if token.job_id == job_id]
        if not found:
            raise Broken(f"job {job_id} was cancelled as running, but is {self.jobs[job_id].state}")
        self.end(found[0], "cancelled")

    def judge(self, token: Token, wish: str) -> Literal["done", "already_done", "stale"]:
        """Return the right answer to a finish of an attempt, if nothing else changes it."""
        if token in self.open:
            return "done"
        outcome = self.closed.get(token)
        failures = ("failed", "dead_lettered")
        if outcome == wish or (outcome in failures and wish in ("failed", "retried")):
            return "already_done"
        return "stale"

    def counts(self, queue: str) -> Counter[str]:
        return Counter(job.state for job in self.jobs.values() if job.queue == queue)
