"""The job that a handler gets: what was enqueued, and the attempt's own calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast, overload

from ._adapters import AsyncCallerConnection, CallerConnection, is_async
from ._codec import dump_json, load_json
from .async_client import AsyncClient
from .client import Client
from .models import FinalizationReceipt, Json

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ._batches import Batch
    from ._dispatcher import Dispatcher
    from ._executors import Pool

# Columns of a claim, in the order of a row; bytes stand for jsonb and timestamptz until read.
COLUMNS = (
    "job_id",
    "run_lease",
    "claim_slot",
    "batch_id",
    "position",
    "kind",
    "args",
    "attempt",
    "max_attempts",
    "priority",
    "run_at",
    "created_at",
    "tags",
    "metadata",
    "progress",
    "trace",
    "deadline_at",
)
(
    _JOB_ID,
    _RUN_LEASE,
    CLAIM_SLOT,
    BATCH_ID,
    POSITION,
    KIND,
    ARGS,
    _ATTEMPT,
    _MAX_ATTEMPTS,
    _PRIORITY,
    _RUN_AT,
    _CREATED_AT,
    _TAGS,
    _METADATA,
    _PROGRESS,
    _TRACE,
    _DEADLINE_AT,
) = range(len(COLUMNS))

Row = tuple[Any, ...]

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_UNREAD: Any = object()

WAITING, RUNNING, FINISHED = range(3)


def _time(value: bytes) -> datetime:
    return _POSTGRES_EPOCH + timedelta(microseconds=int.from_bytes(value, "big", signed=True))


def _json(value: bytes | None) -> Json:
    # Binary jsonb is a version byte and the text.
    return None if value is None else load_json(value[1:])


class Job:
    """One attempt of a job.

    `lease_lost` turns true when the database gave the job to somebody else: stop, the result
    will be refused.
    """

    __slots__ = (
        "_args",
        "_batch",
        "_cancelled",
        "_dispatcher",
        "_future",
        "_pool",
        "_progress",
        "_row",
        "_state",
        "_stop",
        "_task",
        "lease_lost",
    )

    def __init__(self, row: Row, batch: Batch, dispatcher: Dispatcher) -> None:
        self._row = row
        self._batch = batch
        self._dispatcher = dispatcher
        self._args = _UNREAD
        self._progress = _UNREAD
        self._state = WAITING
        self._task: asyncio.Task[None] | None = None
        self._future: Future[Any] | None = None
        self._pool: Pool | None = None
        # Why the worker interrupts the handler: "closed" or "shutdown".
        self._stop: str | None = None
        self._cancelled = False
        self.lease_lost = False

    @property
    def id(self) -> int:
        """The job's id."""
        return int(self._row[_JOB_ID])

    @property
    def kind(self) -> str:
        """The name that chose the handler."""
        return str(self._row[KIND])

    @property
    def queue(self) -> str:
        """The queue it was claimed from."""
        return self._dispatcher.queue

    @property
    def args(self) -> Json:
        """The arguments as enqueued."""
        if self._args is _UNREAD:
            self._args = _json(self._row[ARGS])
        return self._args

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return int(self._row[_ATTEMPT])

    @property
    def max_attempts(self) -> int:
        """After this attempt a failure is final."""
        return int(self._row[_MAX_ATTEMPTS])

    @property
    def priority(self) -> int:
        """1 (first) to 4."""
        return int(self._row[_PRIORITY])

    @property
    def run_lease(self) -> int:
        """Number of this claim of the job; with the id it names the attempt."""
        return int(self._row[_RUN_LEASE])

    @property
    def token(self) -> tuple[int, int, int, int, int]:
        """job_id, run_lease, claim_slot, batch_id and position, as the SQL functions take them."""
        return self._row[:5]

    @property
    def run_at(self) -> datetime:
        """When the job became due."""
        return _time(self._row[_RUN_AT])

    @property
    def created_at(self) -> datetime:
        """When the job was enqueued."""
        return _time(self._row[_CREATED_AT])

    @property
    def deadline_at(self) -> datetime | None:
        """When the database takes the attempt away; None without a deadline."""
        value = self._row[_DEADLINE_AT]
        return None if value is None else _time(value)

    @property
    def tags(self) -> tuple[str, ...]:
        """The job's tags."""
        return tuple(self._row[_TAGS] or ())

    @property
    def metadata(self) -> dict[str, Json]:
        """The job's metadata."""
        return _json(self._row[_METADATA]) or {}

    @property
    def trace(self) -> str | None:
        """The W3C traceparent given at the insert."""
        value: str | None = self._row[_TRACE]
        return value

    @property
    def progress(self) -> Json:
        """What this or an earlier attempt last set; None at first."""
        if self._progress is _UNREAD:
            self._progress = _json(self._row[_PROGRESS])
        return self._progress

    def is_cancelled(self) -> bool:
        """Whether the job was cancelled while it runs: stop, the result will be refused."""
        return self._cancelled

    def set_progress(self, value: Json) -> Awaitable[bool]:
        """Store progress that survives retries and crashes, for the next attempt to read.

        Await it in an async handler; in a def handler it returns when it is stored. The answer is
        false when the attempt is no longer current.
        """
        dump_json(value, "progress")
        worker = self._dispatcher.worker
        sending = worker.send_progress(self, value)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is worker.loop:
            return here.create_task(sending)
        return _Ready(asyncio.run_coroutine_threadsafe(sending, worker.loop).result())

    @overload
    def complete(self, conn: CallerConnection, result: Json = None) -> FinalizationReceipt: ...

    @overload
    def complete(
        self, conn: AsyncCallerConnection, result: Json = None
    ) -> Coroutine[Any, Any, FinalizationReceipt]: ...

    def complete(
        self, conn: CallerConnection | AsyncCallerConnection, result: Json = None
    ) -> FinalizationReceipt | Coroutine[Any, Any, FinalizationReceipt]:
        """Complete the job in the transaction of this connection, which the caller commits.

        For tasks declared with completes_itself=True. StaleAttempt is raised when another worker
        owns the job: let it roll the transaction back.
        """
        if not self._dispatcher.worker.completes_itself(self.kind):
            raise RuntimeError(
                f'job.complete() needs a task declared with completes_itself=True, "{self.kind}" '
                "is not"
            )
        opts = None if result is None else {"result": result}
        schema = self._dispatcher.worker.schema
        if is_async(conn):
            return AsyncClient(conn, schema=schema).complete_job(*self.token, opts=opts)
        return Client(cast(CallerConnection, conn), schema=schema).complete_job(
            *self.token, opts=opts
        )

    def __repr__(self) -> str:
        return f"<awa.Job {self.id} {self.kind} attempt {self.attempt}/{self.max_attempts}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # What a process pool gets: the values, without the worker.
        worker = self._dispatcher.worker
        return _detached, (
            self._row,
            self.queue,
            worker.schema,
            worker.completes_itself(self.kind),
        )


class _Ready:
    """An answer that is there already, for code that awaits it all the same."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value

    def __await__(self) -> Generator[Any, None, bool]:
        return self.value
        yield


class _Detached:
    """Stands for dispatcher and worker in another process: completes, and does nothing else."""

    def __init__(self, queue: str, schema: str, completes_itself: bool) -> None:
        self.queue = queue
        self.schema = schema
        self._completes_itself = completes_itself
        self.worker = self

    def completes_itself(self, kind: str) -> bool:
        return self._completes_itself

    def send_progress(self, job: Job, value: Json) -> Any:
        raise RuntimeError("set_progress needs the worker's own process: use a thread for it")


def _detached(row: Row, queue: str, schema: str, completes_itself: bool) -> Job:
    stand_in = _Detached(queue, schema, completes_itself)
    return Job(row, None, stand_in)  # type: ignore[arg-type]
