"""The asyncio client: the same methods as the blocking one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from uuid import UUID

from psycopg import AsyncConnection, IsolationLevel
from psycopg_pool import AsyncConnectionPool

from . import _calls, _loads, models
from ._adapters import AsyncCallerConnection, fetch_async, is_async_foreign, portion_size
from ._calls import NO_ARGS, Call, Options
from ._codec import JsonLoader
from ._pooler import PREPARED_ELSEWHERE, Preparing, is_pooled
from .client import (
    ASK_CONNECTION,
    READ_COMMITTED,
    WAIT_FIRST,
    WAIT_GROWTH,
    WAIT_MOST,
    row_factory,
)
from .errors import SerializationFailure, translated
from .models import Json
from .outcomes import as_seconds

T = TypeVar("T")
AsyncTarget = str | AsyncConnectionPool[Any] | AsyncCallerConnection


class AsyncClient:
    """Calls the SQL functions over a DSN, a psycopg_pool pool, or the caller's own connection.

    The connection may be one of psycopg or asyncpg, or an AsyncConnection or AsyncSession of
    SQLAlchemy. A connection that was handed in, here or as `conn=`, is never committed nor rolled
    back: the call joins the caller's transaction. With a DSN the client opens connections when
    first used and closes them in `close()`.
    """

    def __init__(self, target: AsyncTarget, *, schema: str = _calls.DEFAULT_SCHEMA) -> None:
        self.schema = schema
        self._preparing = Preparing()
        self._own: AsyncConnectionPool[Any] | None = None
        self._pool: AsyncConnectionPool[Any] | None = None
        self._conn: AsyncCallerConnection | None = None
        if isinstance(target, str):
            self._own = self._pool = AsyncConnectionPool(
                target, min_size=0, max_size=4, open=False, configure=_configure
            )
        elif isinstance(target, AsyncConnectionPool):
            self._pool = target
        elif isinstance(target, AsyncConnection) or is_async_foreign(target):
            self._conn = target
        else:
            raise TypeError(
                "a DSN, an AsyncConnectionPool or an asyncio connection of psycopg, SQLAlchemy or "
                f"asyncpg is needed, not {type(target).__name__}"
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that the client opened itself."""
        if self._own is not None and not self._own.closed:
            await self._own.close()

    @property
    def joins_a_transaction(self) -> bool:
        """Whether the client works on a connection of the caller's."""
        return self._conn is not None

    # Producers

    async def insert_job(
        self,
        kind: str,
        args: Json = NO_ARGS,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
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
        return await self._one(call, conn)

    async def insert_jobs(
        self,
        jobs: Sequence[Mapping[str, Json]],
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> list[models.InsertResult]:
        """Enqueue jobs of any kinds, all or nothing, one result each in order."""
        return await self._all(_calls.insert_jobs(jobs, opts=opts, schema=self.schema), conn)

    async def load_jobs(
        self, jobs: Iterable[Mapping[str, Json]], *, conn: AsyncCallerConnection | None = None
    ) -> int:
        """Enqueue any number of jobs as they come, all or nothing; how many were given.

        A job is what insert_jobs takes. By COPY, where the library of the connection can do that.
        """
        given = self._conn if conn is None else conn
        count = 0
        if given is not None and not isinstance(given, AsyncConnection):
            for portion in _loads.portions(jobs, portion_size(given, _loads.PORTION)):
                count += len(await self.insert_jobs(portion, conn=given))
            return count
        with translated():
            async with (
                self._connection(given) as connection,
                connection.cursor() as cursor,
                cursor.copy(_loads.statement(self.schema)) as copy,
            ):
                for row in _loads.rows(jobs):
                    await copy.write_row(row)
                    count += 1
        return count

    async def insert_many(
        self,
        kind: str,
        args: Sequence[Json],
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
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
        return await self._all(call, conn)

    async def ordering_shard(
        self, key: str, shards: int, *, conn: AsyncCallerConnection | None = None
    ) -> int:
        """The shard that an ordering key maps to."""
        return await self._one(_calls.ordering_shard(key, shards, schema=self.schema), conn)

    async def unique_key(
        self,
        kind: str,
        queue: str | None,
        args: Json,
        period_bucket: int | None,
        *,
        conn: AsyncCallerConnection | None = None,
    ) -> bytes:
        """The key of a unique job; what is None is left out of it."""
        call = _calls.unique_key(kind, queue, args, period_bucket, schema=self.schema)
        return await self._one(call, conn)

    async def concurrency_digest(
        self, key: str, *, conn: AsyncCallerConnection | None = None
    ) -> bytes:
        """The digest of a concurrency key."""
        return await self._one(_calls.concurrency_digest(key, schema=self.schema), conn)

    async def cancel_by_unique_key(
        self, key: bytes, *, conn: AsyncCallerConnection | None = None
    ) -> int | None:
        """Cancel the job that holds a key; its id, None when none waits or runs."""
        return await self._one(_calls.cancel_by_unique_key(key, schema=self.schema), conn)

    # Workers

    async def register_instance(
        self,
        instance_id: UUID,
        *,
        info: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> None:
        """Make a worker process known."""
        await self._one(_calls.register_instance(instance_id, info=info, schema=self.schema), conn)

    async def heartbeat(
        self,
        instance_id: UUID,
        *,
        holds: Json = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.HeartbeatResult:
        """Say that a process lives and what it holds; None means all it ever claimed."""
        return await self._one(_calls.heartbeat(instance_id, holds=holds, schema=self.schema), conn)

    async def claim_ready_runtime(
        self,
        queue: str,
        max_batch: int,
        instance_id: UUID,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> list[models.ClaimedJob]:
        """Claim up to max_batch jobs."""
        call = _calls.claim_ready_runtime(
            queue, max_batch, instance_id, opts=opts, schema=self.schema
        )
        return await self._all(call, conn)

    async def claim_status(
        self, queue: str, *, arm: bool | None = None, conn: AsyncCallerConnection | None = None
    ) -> models.ClaimStatus:
        """Why nothing was claimed; with arm, the next insert wakes the channel."""
        return await self._one(_calls.claim_status(queue, arm=arm, schema=self.schema), conn)

    async def complete_jobs(
        self,
        instance_id: UUID,
        claim_slot: int,
        batch_id: int,
        positions: Sequence[int],
        *,
        conn: AsyncCallerConnection | None = None,
    ) -> list[models.FinishResult]:
        """Close plain successes of one claimed batch."""
        call = _calls.complete_jobs(
            instance_id, claim_slot, batch_id, positions, schema=self.schema
        )
        return await self._all(call, conn)

    async def finish_jobs(
        self,
        instance_id: UUID,
        outcomes: Sequence[Mapping[str, Json]],
        *,
        conn: AsyncCallerConnection | None = None,
    ) -> list[models.FinishResult]:
        """Close many attempts with mixed outcomes."""
        return await self._all(_calls.finish_jobs(instance_id, outcomes, schema=self.schema), conn)

    async def complete_job(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.FinalizationReceipt:
        """Close one attempt inside the caller's own transaction."""
        call = _calls.complete_job(
            job_id, run_lease, claim_slot, batch_id, position, opts=opts, schema=self.schema
        )
        return await self._one(call, conn)

    async def attempt_status(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        *,
        conn: AsyncCallerConnection | None = None,
    ) -> str:
        """What became of one attempt."""
        call = _calls.attempt_status(
            job_id, run_lease, claim_slot, batch_id, position, schema=self.schema
        )
        return await self._one(call, conn)

    async def set_progress(
        self,
        job_id: int,
        run_lease: int,
        claim_slot: int,
        batch_id: int,
        position: int,
        progress: Json,
        *,
        conn: AsyncCallerConnection | None = None,
    ) -> bool:
        """Store progress that survives a retry; false when the attempt is stale."""
        call = _calls.set_progress(
            job_id, run_lease, claim_slot, batch_id, position, progress, schema=self.schema
        )
        return await self._one(call, conn)

    async def tick(
        self, *, budget: Options | None = None, conn: AsyncCallerConnection | None = None
    ) -> list[models.TickReport]:
        """One bounded round of maintenance."""
        return await self._all(_calls.tick(budget=budget, schema=self.schema), conn)

    async def work(
        self,
        queue: str,
        *,
        max_jobs: int | None = None,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.WorkReport:
        """Run jobs whose kind is bound to a function of the database, in one transaction."""
        call = _calls.work(queue, max_jobs=max_jobs, opts=opts, schema=self.schema)
        return await self._one(call, conn)

    # Operators

    async def declare_queue(
        self,
        queue: str,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> None:
        """Make a queue, or change its options."""
        await self._one(_calls.declare_queue(queue, opts=opts, schema=self.schema), conn)

    async def pause_queue(self, queue: str, *, conn: AsyncCallerConnection | None = None) -> bool:
        """Stop claims of a queue; false when it was paused."""
        return await self._one(_calls.pause_queue(queue, schema=self.schema), conn)

    async def resume_queue(self, queue: str, *, conn: AsyncCallerConnection | None = None) -> bool:
        """Let claims of a queue go on; false when it was not paused."""
        return await self._one(_calls.resume_queue(queue, schema=self.schema), conn)

    async def cancel_job(
        self,
        job_id: int,
        *,
        reason: str | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> str:
        """Cancel a job in whatever state it is; the answer says what it was."""
        return await self._one(_calls.cancel_job(job_id, reason=reason, schema=self.schema), conn)

    async def drain_queue(
        self,
        queue: str,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> int:
        """Cancel waiting jobs of a queue, a portion a call; 0 when none is left."""
        return await self._one(_calls.drain_queue(queue, opts=opts, schema=self.schema), conn)

    async def retry_job(
        self,
        job_id: int,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.InsertResult:
        """Make a job that failed, was cancelled or waits run now."""
        return await self._one(_calls.retry_job(job_id, opts=opts, schema=self.schema), conn)

    async def update_job(
        self, job_id: int, changes: Options, *, conn: AsyncCallerConnection | None = None
    ) -> str:
        """Change a job that waits; its state afterwards."""
        return await self._one(_calls.update_job(job_id, changes, schema=self.schema), conn)

    async def retry_dlq(
        self,
        job_id: int,
        *,
        opts: Options | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.InsertResult:
        """Enqueue a dead letter again."""
        return await self._one(_calls.retry_dlq(job_id, opts=opts, schema=self.schema), conn)

    async def purge_dlq(self, job_id: int, *, conn: AsyncCallerConnection | None = None) -> bool:
        """Delete a dead letter."""
        return await self._one(_calls.purge_dlq(job_id, schema=self.schema), conn)

    async def queue_counts(
        self, queue: str, *, conn: AsyncCallerConnection | None = None
    ) -> models.QueueCount:
        """Exact job counts per state."""
        return await self._one(_calls.queue_counts(queue, schema=self.schema), conn)

    async def queue_depths(
        self, *, conn: AsyncCallerConnection | None = None
    ) -> list[models.QueueDepth]:
        """Waiting jobs per lane, without a scan."""
        return await self._all(_calls.queue_depths(schema=self.schema), conn)

    async def ring_status(
        self, *, conn: AsyncCallerConnection | None = None
    ) -> list[models.RingSlotStatus]:
        """Each slot of each ring, and what blocks its reuse."""
        return await self._all(_calls.ring_status(schema=self.schema), conn)

    async def job(
        self, job_id: int, *, conn: AsyncCallerConnection | None = None
    ) -> models.JobInfo:
        """Everything known about a job."""
        return await self._one(_calls.job(job_id, schema=self.schema), conn)

    async def explain_job(
        self, job_id: int, *, conn: AsyncCallerConnection | None = None
    ) -> models.JobExplanation:
        """Why a job is where it is: one sentence, and the facts."""
        return await self._one(_calls.explain_job(job_id, schema=self.schema), conn)

    async def register_sql_handler(
        self, kind: str, handler: str | None, *, conn: AsyncCallerConnection | None = None
    ) -> None:
        """Bind a kind to a function, such as 'app.send(jsonb)', that work() runs."""
        await self._one(_calls.register_sql_handler(kind, handler, schema=self.schema), conn)

    async def api(self, *, conn: AsyncCallerConnection | None = None) -> list[models.ApiFunction]:
        """The public functions, from the catalog."""
        return await self._all(_calls.api(schema=self.schema), conn)

    async def settings(self, *, conn: AsyncCallerConnection | None = None) -> list[models.Setting]:
        """The settings, their defaults and units."""
        return await self._all(_calls.settings(schema=self.schema), conn)

    async def set_setting(
        self, name: str, value: str, *, conn: AsyncCallerConnection | None = None
    ) -> None:
        """Change a setting."""
        await self._one(_calls.set_setting(name, value, schema=self.schema), conn)

    async def error_codes(
        self, *, conn: AsyncCallerConnection | None = None
    ) -> list[models.ErrorCode]:
        """The SQLSTATEs that the interface raises."""
        return await self._all(_calls.error_codes(schema=self.schema), conn)

    async def version(self, *, conn: AsyncCallerConnection | None = None) -> str:
        """Version of the installed schema's release."""
        return await self._one(_calls.version(schema=self.schema), conn)

    async def schema_version(self, *, conn: AsyncCallerConnection | None = None) -> int:
        """Number of the installed schema."""
        return await self._one(_calls.schema_version(schema=self.schema), conn)

    async def verify(self, *, conn: AsyncCallerConnection | None = None) -> list[models.TickReport]:
        """Check and repair what a restore or failover may have left behind."""
        return await self._all(_calls.verify(schema=self.schema), conn)

    async def wait(
        self,
        job_id: int,
        *,
        timeout: float | None = None,
        conn: AsyncCallerConnection | None = None,
    ) -> models.JobInfo:
        """Poll until the job is completed, failed, cancelled or pruned; TimeoutError after timeout.

        A connection in a REPEATABLE READ transaction never sees the end.
        """
        deadline = None if timeout is None else time.monotonic() + as_seconds(timeout, "timeout")
        pause = WAIT_FIRST
        while True:
            try:
                info = await self.job(job_id, conn=conn)
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
            await asyncio.sleep(pause)
            pause = min(pause * WAIT_GROWTH, WAIT_MOST)

    # Machinery

    @asynccontextmanager
    async def _connection(
        self, given: AsyncConnection[Any] | None
    ) -> AsyncIterator[AsyncConnection[Any]]:
        if given is not None:
            yield given
            return
        assert self._pool is not None
        if self._own is not None:
            await self._own.open()
        async with self._pool.connection() as connection:
            yield connection

    async def _all(self, call: Call[T], conn: AsyncCallerConnection | None) -> list[T]:
        given = self._conn if conn is None else conn
        if given is not None and not isinstance(given, AsyncConnection):
            return await fetch_async(given, call)
        with translated():
            async with (
                self._connection(given) as connection,
                connection.cursor(row_factory=row_factory(call)) as cursor,
            ):
                cursor.adapters.register_loader("jsonb", JsonLoader)
                try:
                    await cursor.execute(call.sql.encode(), call.params)
                except PREPARED_ELSEWHERE as error:
                    if given is not None:
                        raise
                    # Its transaction held nothing else. Each connection of a pool learns it anew.
                    self._preparing.stop(error)
                    await connection.rollback()
                    connection.prepare_threshold = None
                    await cursor.execute(call.sql.encode(), call.params)
                return cast("list[T]", await cursor.fetchall())

    async def _one(self, call: Call[T], conn: AsyncCallerConnection | None) -> T:
        return (await self._all(call, conn))[0]


async def _configure(connection: AsyncConnection[Any]) -> None:
    await connection.set_autocommit(True)
    row = await (await connection.execute(ASK_CONNECTION)).fetchone()
    assert row is not None
    if is_pooled(connection, row[0]):
        connection.prepare_threshold = None
    if row[1] != READ_COMMITTED:
        await connection.set_autocommit(False)
        await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
