"""Awa: a job queue that lives in PostgreSQL. This package enqueues, and runs handlers."""

from __future__ import annotations

from ._version import __version__
from .async_client import AsyncClient
from .client import Client
from .errors import (
    AwaError,
    Backpressure,
    CallbackUnknown,
    InvalidArgument,
    LimitExceeded,
    NotEnabled,
    NotFound,
    ParentFailed,
    SerializationFailure,
    StaleAttempt,
    UniqueConflict,
    VersionMismatch,
    WrongIsolation,
    WrongState,
)
from .handlers import CallNext, Handlers, Middleware, Task
from .job import Job
from .models import (
    ApiFunction,
    ClaimedJob,
    ClaimStatus,
    ErrorCode,
    FinalizationReceipt,
    FinishResult,
    HeartbeatResult,
    InsertResult,
    JobExplanation,
    JobInfo,
    Json,
    QueueCount,
    QueueDepth,
    RingSlotStatus,
    Setting,
    TickReport,
    WorkReport,
)
from .outcomes import Cancel, Fail, Outcome, RetryAfter, Snooze
from .pacing import AsyncPacedProducer, PacedProducer
from .retry import Exponential, Fixed
from .worker import Worker, run

__all__ = [
    "ApiFunction",
    "AsyncClient",
    "AsyncPacedProducer",
    "AwaError",
    "Backpressure",
    "CallNext",
    "CallbackUnknown",
    "Cancel",
    "ClaimStatus",
    "ClaimedJob",
    "Client",
    "ErrorCode",
    "Exponential",
    "Fail",
    "FinalizationReceipt",
    "FinishResult",
    "Fixed",
    "Handlers",
    "HeartbeatResult",
    "InsertResult",
    "InvalidArgument",
    "Job",
    "JobExplanation",
    "JobInfo",
    "Json",
    "LimitExceeded",
    "Middleware",
    "NotEnabled",
    "NotFound",
    "Outcome",
    "PacedProducer",
    "ParentFailed",
    "QueueCount",
    "QueueDepth",
    "RetryAfter",
    "RingSlotStatus",
    "SerializationFailure",
    "Setting",
    "Snooze",
    "StaleAttempt",
    "Task",
    "TickReport",
    "UniqueConflict",
    "VersionMismatch",
    "WorkReport",
    "Worker",
    "WrongIsolation",
    "WrongState",
    "__version__",
    "run",
]
