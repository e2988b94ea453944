"""What should be true of every job, in as few words as the contract has."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from engine import outcome_item
from stateful.stage import LATE_QUEUE, QUEUES, SETTINGS

WAITING = ("scheduled", "retryable", "available")
ENDED = ("completed", "failed", "cancelled")
# States in which a job holds its unique key, by the first letter of the key.
MASKS = {
    "d": ("scheduled", "available", "running", "completed", "retryable"),
    "w": ("scheduled", "available"),
}
RETENTION = {
    "completed": SETTINGS["terminal_retention_seconds"] * 1000,
    "cancelled": SETTINGS["terminal_retention_seconds"] * 1000,
    "failed": SETTINGS["failed_retention_seconds"] * 1000,
    "dead": SETTINGS["dlq_retention_seconds"] * 1000,
}
EVIDENCE = SETTINGS["attempt_evidence_seconds"] * 1000
# What attempt_status() says of an attempt that did not end its job.
CLOSURES = {"retry": "retried", "rescue": "rescued", "snooze": "snoozed", "released": "released"}
SHARDS = {"sharded": 2}
ALL_QUEUES = (*QUEUES, LATE_QUEUE)


def shard_of(key: str | None, queue: str) -> int:
    """The published shard of an ordering key."""
    if key is None:
        return 0
    number = 14695981039346656037
    for byte in key.encode():
        number = (number * 1099511628211 + byte) % 2**64
    return number % SHARDS.get(queue, 1)


@dataclass(frozen=True, slots=True)
class Token:
    """The five numbers of an attempt, and who holds it."""

    job_id: int
    run_lease: int
    claim_slot: int
    batch_id: int
    position: int
    owner: str

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return (self.job_id, self.run_lease, self.claim_slot, self.batch_id, self.position)

    def item(self, outcome: str, **fields: object) -> dict[str, object]:
        return outcome_item(self.numbers, outcome, **fields)


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that ended, how and when."""

    token: Token
    outcome: str
    at: int


@dataclass(slots=True)
class Job:
    """One job; times are milliseconds of the model's clock."""

    job_id: int
    queue: str
    priority: int
    shard: int
    state: str
    run_at: int
    place: int = 0  # order in its lane, while it is available
    max_attempts: int = 25
    deadline: int | None = None  # milliseconds of an attempt
    key: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    lease: int = 0
    progress: object = None
    releases: int = 0
    errors: int = 0
    ended_at: int = 0
    token: Token | None = None
    claimed_at: int = 0
    deadline_at: int | None = None

    @property
    def lane(self) -> tuple[str, int, int]:
        return (self.queue, self.priority, self.shard)

    def copy(self) -> Job:
        return replace(self)


@dataclass(slots=True)
class Worker:
    """What a worker told about itself: when it beat, and what it said it holds (None: all)."""

    name: str
    beats: list[tuple[int, frozenset[int] | None]] = field(default_factory=list)


class Model:
    """All jobs of a play, and the rules by which they move."""

    def __init__(self) -> None:
        self.now, self.moves = 0, 0
        self.jobs: dict[int, Job] = {}
        self.old: list[Ended] = []
        self.paused: set[str] = set()
        self.had_no_room = False  # a ring without an empty slot keeps no history
        self.lost_evidence = False  # of attempts, for the same reason
        self.moved_to: Counter[str] = Counter()

    # ---- who is where

    def among(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    def counts(self, queue: str) -> Counter[str]:
        """Jobs by state, with all that ever ended; dead letters that are gone do not count."""
        return Counter(
            job.state for job in self.jobs.values() if job.queue == queue and job.state != "gone"
        )

    def holder(self, key: str, but: int | None = None) -> Job | None:
        """The job that holds a key."""
        found = [job for job in self.jobs.values() if job.key == key and self.holds(job)]
        assert len(found) <= 1, f"{len(found)} jobs hold key {key}: {found}"
        return next((job for job in found if job.job_id != but), None)

    def holds(self, job: Job) -> bool:
        assert job.key
        if job.state not in MASKS[job.key[0]]:
            return False
        return job.state in (*WAITING, "running") or (
            self.now < job.ended_at + RETENTION[job.state]
        )

    def is_kept(self, job: Job) -> bool:
        """Whether an ended job must still be visible."""
        is_young = self.now < job.ended_at + RETENTION[job.state]
        return is_young and (job.state in ("failed", "dead") or not self.had_no_room)

    def lanes(self, queue: str) -> dict[tuple[str, int, int], list[Job]]:
        """Claimable jobs by lane, each in the order of the lane."""
        lanes = defaultdict(list)
        if queue not in self.paused:
            for job in sorted(self.among("available"), key=lambda job: job.place):
                if job.queue == queue:
                    lanes[job.lane].append(job)
        return lanes

    def ahead(self, job: Job) -> int:
        """How many of its lane come before an available job."""
        return sum(
            other.lane == job.lane and other.place < job.place for other in self.among("available")
        )

    def rank(self, lane: list[Job]) -> tuple[int, int]:
        """Effective priority and age of the head: the order of lanes."""
        head = lane[0]
        waited = max(0, self.now - head.run_at)
        raised = head.priority - waited // (SETTINGS["aging_seconds"] * 1000)
        return (max(1, raised), head.run_at)

    # ---- how they move

    def enqueue(self, job: Job) -> None:
        """Put an available job at the end of its lane, after all that came before."""
        self.moves += 1
        job.state, job.place = "available", self.moves

    def defer(self, job: Job, state: str, delay: int) -> None:
        job.state, job.run_at = state, self.now + delay

    def start(self, job: Job, token: Token, deadline: int | None) -> None:
        job.attempt += 1
        job.lease += 1
        job.state, job.token, job.claimed_at = "running", token, self.now
        limit = job.deadline or deadline
        job.deadline_at = self.now + limit if limit else None

    def finish(self, job: Job, outcome: str, delay: int | None = None, reason: str = "") -> None:
        """End the attempt of a running job."""
        assert job.token
        token, job.token = job.token, None
        job.errors += outcome in ("retry", "rescue", "fail")
        self.move_on(job, outcome, delay, reason)
        if outcome == "rescue" or job.state in WAITING:
            closure = CLOSURES[outcome]
        else:
            closure = "dead_lettered" if job.state == "dead" else job.state
        self.old.append(Ended(token, closure, self.now))

    def move_on(self, job: Job, outcome: str, delay: int | None, reason: str) -> None:
        """Put a job where the end of its attempt sends it."""
        if outcome in ("retry", "rescue") and job.attempt >= job.max_attempts:
            outcome = "fail"
        waits = {"retry": "retryable", "rescue": "retryable", "snooze": "scheduled"}.get(outcome)
        if outcome == "released":
            waits = "scheduled" if reason == "unknown_kind" else "available"
        if waits is None:
            self.end(job, {"cancel": "cancelled", "fail": "failed"}.get(outcome, outcome))
            return
        # While its key was free another job may have taken it.
        if job.key and waits in MASKS[job.key[0]] and self.holder(job.key, job.job_id):
            self.end(job, "cancelled")
        elif waits == "retryable":
            job.releases = 0
            backoff = 2**job.attempt * 1000
            self.defer(job, waits, backoff if delay is None else delay)
        else:
            job.attempt -= 1
            if waits == "available":
                self.enqueue(job)
            elif outcome == "snooze":
                self.defer(job, waits, delay or 0)
            else:
                job.releases += 1
                self.defer(job, waits, 1000 * min(60, 2 ** (min(job.releases, 7) - 1)))

    def end(self, job: Job, state: str) -> None:
        if state == "failed" and job.queue == "dead":
            state = "dead"
        job.state, job.ended_at = state, self.now
        if state == "completed":
            job.progress = None

    def promote(self) -> None:
        """Every due job becomes available, those that need their key first."""
        due = [job for job in self.among("scheduled", "retryable") if job.run_at <= self.now]
        due.sort(key=lambda job: (job.run_at, job.job_id))
        needy = [job for job in due if job.key and job.state not in MASKS[job.key[0]]]
        kept = []
        for job in needy:
            assert job.key
            if self.holder(job.key, job.job_id):
                self.end(job, "cancelled")
            else:
                self.enqueue(job)
                kept.append(job)
        kept.sort(key=lambda job: (job.run_at, job.job_id))
        for job in [*kept, *(job for job in due if job not in needy)]:
            self.enqueue(job)

    def revive(self, job: Job, delay: int) -> bool:
        """Make a job run again, or sooner; false when another job holds its key."""
        fresh = job.state in (*ENDED, "dead")
        state = "retryable" if job.state == "retryable" else "scheduled"
        if not delay:
            state = "available"
        if job.key and state in MASKS[job.key[0]] and self.holder(job.key, job.job_id):
            return False
        if fresh:
            job.attempt, job.progress = 0, None
        job.releases = 0
        job.run_at = self.now + delay
        job.state = state
        if not delay:
            self.enqueue(job)
        return True
