"""The blocking client: one short method per SQL function."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from uuid import UUID

from psycopg import Connection, IsolationLevel
from psycopg.rows import class_row, scalar_row
from psycopg_pool import ConnectionPool

from . import _calls, _loads, models
from ._adapters import CallerConnection, fetch, is_foreign, portion_size
from ._calls import NO_ARGS, Call, Options
from ._codec import JsonLoader
from ._pooler import PREPARED_ELSEWHERE, Preparing, is_pooled
from .errors import SerializationFailure, translated
from .models import Json
from .outcomes import as_seconds

T = TypeVar("T")
Target = str | ConnectionPool[Any] | CallerConnection

ASK_CONNECTION = "SELECT pg_backend_pid(), current_setting('default_transaction_isolation')"
READ_COMMITTED = "read committed"
WAIT_FIRST = 0.01
WAIT_GROWTH = 1.5
WAIT_MOST = 1.0


class Client:
    """Calls the SQL functions over a DSN, a psycopg_pool pool, or the caller's own connection.

    The connection may be one of psycopg, a Connection or Session of SQLAlchemy, or Django's. A
    connection that was handed in, here or as `conn=`, is never committed nor rolled back: the call
    joins the caller's transaction. With a DSN the client opens connections when first used and
    closes them in `close()`.
    """

    def __init__(self, target: Target, *, schema: str = _calls.DEFAULT_SCHEMA) -> None:
        self.schema = schema
        self._preparing = Preparing()
        self._own: ConnectionPool[Any] | None = None
        self._pool: ConnectionPool[Any] | None = None
        self._conn: CallerConnection | None = None
        if isinstance(target, str):
            self._own = self._pool = ConnectionPool(
                target, min_size=0, max_size=4, open=False, configure=_configure
            )
        elif isinstance(target, ConnectionPool):
            self._pool = target
        elif isinstance(target, Connection) or is_foreign(target):
            self._conn = target
        else:
            raise TypeError(
                "a DSN, a ConnectionPool or a connection of psycopg, SQLAlchemy or Django is "
                f"needed, not {type(target).__name__}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that the client opened itself."""
        if self._own is not None and not self._own.closed:
            self._own.close()

    @property
    def joins_a_transaction(self) -> bool:
        """Whether the client works on a connection of the caller's."""
        return self._conn is not None

    # Producers

    def insert_job(
        self,
        kind: str,
        args: Json = NO_ARGS,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> models.InsertResult:
        """Enqueue one job."""
        call = _calls.insert_job(
            kind,
            args,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            run_at=run_at,
            opts=opts,
            schema=self.schema,
        )
        return self._one(call, conn)

    def insert_jobs(
        self,
        jobs: Sequence[Mapping[str, Json]],
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> list[models.InsertResult]:
        """Enqueue jobs of any kinds, all or nothing, one result each in order."""
        return self._all(_calls.insert_jobs(jobs, opts=opts, schema=self.schema), conn)

    def load_jobs(
        self, jobs: Iterable[Mapping[str, Json]], *, conn: CallerConnection | None = None
    ) -> int:
        """Enqueue any number of jobs as they come, all or nothing; how many were given.

        A job is what insert_jobs takes. By COPY, where the library of the connection can do that.
        """
        given = self._conn if conn is None else conn
        if given is not None and not isinstance(given, Connection):
            portions = _loads.portions(jobs, portion_size(given, _loads.PORTION))
            return sum(len(self.insert_jobs(portion, conn=given)) for portion in portions)
        count = 0
        with (
            translated(),
            self._connection(given) as connection,
            connection.cursor() as cursor,
            cursor.copy(_loads.statement(self.schema)) as copy,
        ):
            for row in _loads.rows(jobs):
                copy.write_row(row)
                count += 1
        return count

    def insert_many(
        self,
        kind: str,
        args: Sequence[Json],
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> list[int]:
        """Enqueue many jobs of one kind; their ids in order."""
        call = _calls.insert_many(
            kind,
            args,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            run_at=run_at,
            opts=opts,
            schema=self.schema,
        )
        return self._all(call, conn)

    def ordering_shard(self, key: str, shards: int, *, conn: CallerConnection | None = None) -> int:
        """The shard that an ordering key maps to."""
        return self._one(_calls.ordering_shard(key, shards, schema=self.schema), conn)

    def unique_key(
        self,
        kind: str,
        queue: str | None,
        args: Json,
        period_bucket: int | None,
        *,
        conn: CallerConnection | None = None,
    ) -> bytes:
        """The key of a unique job; what is None is left out of it."""
        call = _calls.unique_key(kind, queue, args, period_bucket, schema=self.schema)
        return self._one(call, conn)

    def concurrency_digest(self, key: str, *, conn: CallerConnection | None = None) -> bytes:
        """The digest of a concurrency key."""
        return self._one(_calls.concurrency_digest(key, schema=self.schema), conn)

    def cancel_by_unique_key(
        self, key: bytes, *, conn: CallerConnection | None = None
    ) -> int | None:
        """Cancel the job that holds a key; its id, None when none waits or runs."""
        return self._one(_calls.cancel_by_unique_key(key, schema=self.schema), conn)

    # Workers

    def register_instance(
        self,
        instance_id: UUID,
        *,
        info: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> None:
        """Make a worker process known."""
        self._one(_calls.register_instance(instance_id, info=info, schema=self.schema), conn)

    def heartbeat(
        self,
        instance_id: UUID,
        *,
        holds: Json = None,
        conn: CallerConnection | None = None,
    ) -> models.HeartbeatResult:
        """Say that a process lives and what it holds; None means all it ever claimed."""
        return self._one(_calls.heartbeat(instance_id, holds=holds, schema=self.schema), conn)

    def claim_ready_runtime(
        self,
        queue: str,
        max_batch: int,
        instance_id: UUID,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> list[models.ClaimedJob]:
        """Claim up to max_batch jobs."""
        call = _calls.claim_ready_runtime(
            queue, max_batch, instance_id, opts=opts, schema=self.schema
        )
        return self._all(call, conn)

    def claim_status(
        self, queue: str, *, arm: bool | None = None, conn: CallerConnection | None = None
    ) -> models.ClaimStatus:
        """Why nothing was claimed; with arm, the next insert wakes the channel."""
        return self._one(_calls.claim_status(queue, arm=arm, schema=self.schema), conn)

    def complete_jobs(
        self,
        instance_id: UUID,
        claim_slot: int,
        batch_id: int,
        positions: Sequence[int],
        *,
        conn: CallerConnection | None = None,
    ) -> list[models.FinishResult]:
        """Close plain successes of one claimed batch."""
        call = _calls.complete_jobs(
            instance_id, claim_slot, batch_id, positions, schema=self.schema
        )
        return self._all(call, conn)

    def finish_jobs(
        self,
        instance_id: UUID,
        outcomes: Sequence[Mapping[str, Json]],
        *,
        conn: CallerConnection | None = None,
    ) -> list[models.FinishResult]:
        """Close many attempts with mixed outcomes."""
        return self._all(_calls.finish_jobs(instance_id, outcomes, schema=self.schema), conn)

    def complete_job(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> models.FinalizationReceipt:
        """Close one attempt inside the caller's own transaction."""
        call = _calls.complete_job(
            job_id, run_lease, claim_slot, batch_id, position, opts=opts, schema=self.schema
        )
        return self._one(call, conn)

    def attempt_status(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        *,
        conn: CallerConnection | None = None,
    ) -> str:
        """What became of one attempt."""
        call = _calls.attempt_status(
            job_id, run_lease, claim_slot, batch_id, position, schema=self.schema
        )
        return self._one(call, conn)

    def set_progress(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        progress: Json,
        *,
        conn: CallerConnection | None = None,
    ) -> bool:
        """Store progress that survives a retry; false when the attempt is stale."""
        call = _calls.set_progress(
            job_id, run_lease, claim_slot, batch_id, position, progress, schema=self.schema
        )
        return self._one(call, conn)

    def tick(
        self, *, budget: Options | None = None, conn: CallerConnection | None = None
    ) -> list[models.TickReport]:
        """One bounded round of maintenance."""
        return self._all(_calls.tick(budget=budget, schema=self.schema), conn)

    def work(
        self,
        queue: str,
        *,
        max_jobs: int | None = None,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> models.WorkReport:
        """Run jobs whose kind is bound to a function of the database, in one transaction."""
        call = _calls.work(queue, max_jobs=max_jobs, opts=opts, schema=self.schema)
        return self._one(call, conn)

    # Operators

    def declare_queue(
        self,
        queue: str,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> None:
        """Make a queue, or change its options."""
        self._one(_calls.declare_queue(queue, opts=opts, schema=self.schema), conn)

    def pause_queue(self, queue: str, *, conn: CallerConnection | None = None) -> bool:
        """Stop claims of a queue; false when it was paused."""
        return self._one(_calls.pause_queue(queue, schema=self.schema), conn)

    def resume_queue(self, queue: str, *, conn: CallerConnection | None = None) -> bool:
        """Let claims of a queue go on; false when it was not paused."""
        return self._one(_calls.resume_queue(queue, schema=self.schema), conn)

    def cancel_job(
        self,
        job_id: int,
        *,
        reason: str | None = None,
        conn: CallerConnection | None = None,
    ) -> str:
        """Cancel a job in whatever state it is; the answer says what it was."""
        return self._one(_calls.cancel_job(job_id, reason=reason, schema=self.schema), conn)

    def drain_queue(
        self,
        queue: str,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> int:
        """Cancel waiting jobs of a queue, a portion a call; 0 when none is left."""
        return self._one(_calls.drain_queue(queue, opts=opts, schema=self.schema), conn)

    def retry_job(
        self,
        job_id: int,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> models.InsertResult:
        """Make a job that failed, was cancelled or waits run now."""
        return self._one(_calls.retry_job(job_id, opts=opts, schema=self.schema), conn)

    def update_job(
        self, job_id: int, changes: Options, *, conn: CallerConnection | None = None
    ) -> str:
        """Change a job that waits; its state afterwards."""
        return self._one(_calls.update_job(job_id, changes, schema=self.schema), conn)

    def retry_dlq(
        self,
        job_id: int,
        *,
        opts: Options | None = None,
        conn: CallerConnection | None = None,
    ) -> models.InsertResult:
        """Enqueue a dead letter again."""
        return self._one(_calls.retry_dlq(job_id, opts=opts, schema=self.schema), conn)

    def purge_dlq(self, job_id: int, *, conn: CallerConnection | None = None) -> bool:
        """Delete a dead letter."""
        return self._one(_calls.purge_dlq(job_id, schema=self.schema), conn)

    def queue_counts(
        self, queue: str, *, conn: CallerConnection | None = None
    ) -> models.QueueCount:
        """Exact job counts per state."""
        return self._one(_calls.queue_counts(queue, schema=self.schema), conn)

    def queue_depths(self, *, conn: CallerConnection | None = None) -> list[models.QueueDepth]:
        """Waiting jobs per lane, without a scan."""
        return self._all(_calls.queue_depths(schema=self.schema), conn)

    def ring_status(self, *, conn: CallerConnection | None = None) -> list[models.RingSlotStatus]:
        """Each slot of each ring, and what blocks its reuse."""
        return self._all(_calls.ring_status(schema=self.schema), conn)

    def job(self, job_id: int, *, conn: CallerConnection | None = None) -> models.JobInfo:
        """Everything known about a job."""
        return self._one(_calls.job(job_id, schema=self.schema), conn)

    def explain_job(
        self, job_id: int, *, conn: CallerConnection | None = None
    ) -> models.JobExplanation:
        """Why a job is where it is: one sentence, and the facts."""
        return self._one(_calls.explain_job(job_id, schema=self.schema), conn)

    def register_sql_handler(
        self, kind: str, handler: str | None, *, conn: CallerConnection | None = None
    ) -> None:
        """Bind a kind to a function, such as 'app.send(jsonb)', that work() runs."""
        self._one(_calls.register_sql_handler(kind, handler, schema=self.schema), conn)

    def api(self, *, conn: CallerConnection | None = None) -> list[models.ApiFunction]:
        """The public functions, from the catalog."""
        return self._all(_calls.api(schema=self.schema), conn)

    def settings(self, *, conn: CallerConnection | None = None) -> list[models.Setting]:
        """The settings, their defaults and units."""
        return self._all(_calls.settings(schema=self.schema), conn)

    def set_setting(self, name: str, value: str, *, conn: CallerConnection | None = None) -> None:
        """Change a setting."""
        self._one(_calls.set_setting(name, value, schema=self.schema), conn)

    def error_codes(self, *, conn: CallerConnection | None = None) -> list[models.ErrorCode]:
        """The SQLSTATEs that the interface raises."""
        return self._all(_calls.error_codes(schema=self.schema), conn)

    def version(self, *, conn: CallerConnection | None = None) -> str:
        """Version of the installed schema's release."""
        return self._one(_calls.version(schema=self.schema), conn)

    def schema_version(self, *, conn: CallerConnection | None = None) -> int:
        """Number of the installed schema."""
        return self._one(_calls.schema_version(schema=self.schema), conn)

    def verify(self, *, conn: CallerConnection | None = None) -> list[models.TickReport]:
        """Check and repair what a restore or failover may have left behind."""
        return self._all(_calls.verify(schema=self.schema), conn)

    def wait(
        self,
        job_id: int,
        *,
        timeout: float | None = None,
        conn: CallerConnection | None = None,
    ) -> models.JobInfo:
        """Poll until the job is completed, failed, cancelled or pruned; TimeoutError after timeout.

        A connection in a REPEATABLE READ transaction never sees the end.
        """
        deadline = None if timeout is None else time.monotonic() + as_seconds(timeout, "timeout")
        pause = WAIT_FIRST
        while True:
            try:
                info = self.job(job_id, conn=conn)
            except SerializationFailure:
                state = "not committed"
            else:
                if info.is_terminal:
                    return info
                state = info.state
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"job {job_id} is still {state} after {timeout} s")
                pause = min(pause, left)
            time.sleep(pause)
            pause = min(pause * WAIT_GROWTH, WAIT_MOST)

    # Machinery

    def _connection(self, given: Connection[Any] | None) -> AbstractContextManager[Connection[Any]]:
        if given is not None:
            return nullcontext(given)
        assert self._pool is not None
        if self._own is not None:
            self._own.open()
        return self._pool.connection()

    def _all(self, call: Call[T], conn: CallerConnection | None) -> list[T]:
        given = self._conn if conn is None else conn
        if given is not None and not isinstance(given, Connection):
            return fetch(given, call)
        with (
            translated(),
            self._connection(given) as connection,
            connection.cursor(row_factory=row_factory(call)) as cursor,
        ):
            cursor.adapters.register_loader("jsonb", JsonLoader)
            try:
                cursor.execute(call.sql.encode(), call.params)
            except PREPARED_ELSEWHERE as error:
                if given is not None:
                    raise
                # Its transaction held nothing else. Each connection of a pool learns it anew.
                self._preparing.stop(error)
                connection.rollback()
                connection.prepare_threshold = None
                cursor.execute(call.sql.encode(), call.params)
            return cast("list[T]", cursor.fetchall())

    def _one(self, call: Call[T], conn: CallerConnection | None) -> T:
        return self._all(call, conn)[0]


def row_factory(call: Call[Any]) -> Any:
    """The psycopg row factory for a call's rows."""
    if hasattr(call.row_type, "__dataclass_fields__"):
        return class_row(call.row_type)
    return scalar_row


def _configure(connection: Connection[Any]) -> None:
    # Each call is one statement, which needs no BEGIN and COMMIT where it runs in READ COMMITTED
    # anyway. Elsewhere each BEGIN says so: behind a pooler a session setting would not do.
    connection.autocommit = True
    row = connection.execute(ASK_CONNECTION).fetchone()
    assert row is not None
    if is_pooled(connection, row[0]):
        connection.prepare_threshold = None
    if row[1] != READ_COMMITTED:
        connection.autocommit = False
        connection.isolation_level = IsolationLevel.READ_COMMITTED
