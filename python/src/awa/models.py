"""Frozen dataclasses for the row types of the SQL interface."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

# A JSON value. Recursive aliases make every caller cast, so this is the one place where Any stands.
Json: TypeAlias = Any

TERMINAL_STATES = frozenset({"completed", "failed", "cancelled", "pruned"})


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of one enqueued job."""

    job_id: int
    state: str
    duplicate: bool
    pressure: str | None


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job handed to a worker, with the token (run_lease, claim_slot, batch_id, position)."""

    job_id: int
    kind: str
    queue: str
    args: Json
    priority: int
    attempt: int
    max_attempts: int
    run_at: datetime
    created_at: datetime
    tags: list[str] | None
    metadata: Json
    progress: Json
    trace: str | None
    deadline_at: datetime | None
    run_lease: int
    claim_slot: int
    batch_id: int
    position: int


@dataclass(frozen=True, slots=True)
class ClaimStatus:
    """Why nothing was claimed, and how long to wait."""

    reason: str
    channel: str | None
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class FinishResult:
    """The answer for one attempt: done, already_done, stale, busy or invalid."""

    job_id: int
    run_lease: int
    result: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class FinalizationReceipt:
    """Proof that an attempt was closed in the caller's transaction."""

    job_id: int
    run_lease: int
    outcome: str
    claim_slot: int
    batch_id: int
    position: int
    finalized_at: datetime


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """What the database wants to tell a worker."""

    cancelled: Json
    paused_queues: list[str] | None
    overrides: Json
    drain: bool
    drained_queues: list[str]


@dataclass(frozen=True, slots=True)
class TickReport:
    """One step of a maintenance round."""

    step: str
    outcome: str
    rows: int | None
    milliseconds: float
    detail: Json


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What one call of work() did inside the database."""

    queue: str
    claimed: int
    completed: int
    failed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class JobExplanation:
    """Why a job is where it is: a sentence for people, facts for programs."""

    job_id: int
    state: str
    sentence: str
    facts: Json


@dataclass(frozen=True, slots=True)
class ApiFunction:
    """One public function; without capabilities it is for the owner alone."""

    name: str
    arguments: str
    returns: str
    capabilities: list[str]
    description: str


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Everything known about a job; state `pruned` when only its end is."""

    job_id: int
    state: str
    kind: str | None
    queue: str | None
    priority: int | None
    args: Json
    attempt: int | None
    max_attempts: int | None
    run_lease: int | None
    run_at: datetime | None
    created_at: datetime | None
    attempted_at: datetime | None
    finalized_at: datetime | None
    deadline_at: datetime | None
    tags: list[str] | None
    metadata: Json
    progress: Json
    result: Json
    errors: Json
    reason: str | None
    instance_id: UUID | None
    pruned_at: datetime | None

    @property
    def is_terminal(self) -> bool:
        """Whether the job will not run again by itself."""
        return self.state in TERMINAL_STATES


@dataclass(frozen=True, slots=True)
class QueueCount:
    """Exact number of jobs per state of one queue."""

    queue: str
    scheduled: int
    available: int
    running: int
    completed: int
    retryable: int
    failed: int
    cancelled: int
    waiting_external: int
    dead_lettered: int


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Waiting jobs of one lane, from its cursors."""

    queue: str
    priority: int
    shard: int
    depth: int
    paused: bool


@dataclass(frozen=True, slots=True)
class RingSlotStatus:
    """One slot of a ring and what keeps it from being reused."""

    ring: str
    slot: int
    generation: int | None
    is_current: bool
    row_count: int | None
    bytes: int | None
    age: timedelta | None
    blocked_by: str | None
    detail: Json


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One SQLSTATE that the interface raises."""

    sqlstate: str
    name: str
    description: str
    hint: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the settings view."""

    name: str
    value: str
    default_value: str
    unit: str | None
    description: str | None
