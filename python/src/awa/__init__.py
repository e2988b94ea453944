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
    ClaimedJob,
    ClaimStatus,
    ErrorCode,
    FinalizationReceipt,
    FinishResult,
    HeartbeatResult,
    InsertResult,
    JobInfo,
    Json,
    QueueCount,
    QueueDepth,
    RingSlotStatus,
    Setting,
    TickReport,
)
from .outcomes import Cancel, Fail, Outcome, RetryAfter, Snooze
from .retry import Exponential, Fixed
from .worker import Worker, run

__all__ = [
    "AsyncClient",
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
    "JobInfo",
    "Json",
    "LimitExceeded",
    "Middleware",
    "NotEnabled",
    "NotFound",
    "Outcome",
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
    "Worker",
    "WrongIsolation",
    "WrongState",
    "__version__",
    "run",
]
