"""Tests of applications: run due jobs, let time pass, look at what was enqueued.

Everything happens in a real database with the real worker; docs/testing-your-app.md has examples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from .. import _calls
from ..client import Client
from ..handlers import CallNext, Handlers, Middleware
from ..job import Job
from ..models import JobInfo, Json
from ..outcomes import Outcome, Seconds, as_seconds
from ..worker import Worker

__all__ = ["Database", "Run"]

LOOK_SECONDS = 0.005
NOT_ENDED = ("available", "scheduled", "retryable", "running", "waiting_external")


@dataclass(frozen=True, slots=True)
class Run:
    """One handler that `drain` ran: what it returned, or raised."""

    job_id: int
    kind: str
    attempt: int
    result: Any = None
    error: BaseException | None = None


class Database:
    """A database with awa in it, which no other worker uses at the moment.

    Only a superuser or the owner of awa's tables can `advance`.
    """

    def __init__(self, dsn: str, *, schema: str = _calls.DEFAULT_SCHEMA) -> None:
        self.dsn = dsn
        self.schema = schema

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Open a connection, which the caller closes."""
        return psycopg.connect(self.dsn, autocommit=autocommit)

    # Running jobs

    def drain(
        self,
        handlers: Handlers | Mapping[str, Callable[..., Any]],
        *,
        queues: Sequence[str] | None = None,
        middleware: Sequence[Middleware] = (),
        executor: Executor | None = None,
        raise_errors: bool = True,
        timeout: float = 30,
    ) -> list[Run]:
        """Run the jobs that are due, one at a time, and those that they enqueue; then return.

        By default these are the queues that the handlers name. What a handler raised is raised
        here once nothing is due any more, unless `raise_errors` is false; the job is retried or
        failed as ever. In a running event loop, await `drain_async`.
        """
        return asyncio.run(
            self.drain_async(
                handlers,
                queues=queues,
                middleware=middleware,
                executor=executor,
                raise_errors=raise_errors,
                timeout=timeout,
            )
        )

    async def drain_async(
        self,
        handlers: Handlers | Mapping[str, Callable[..., Any]],
        *,
        queues: Sequence[str] | None = None,
        middleware: Sequence[Middleware] = (),
        executor: Executor | None = None,
        raise_errors: bool = True,
        timeout: float = 30,
    ) -> list[Run]:
        """Run the jobs that are due, as `drain` does, in the running event loop."""
        registry = handlers if isinstance(handlers, Handlers) else Handlers(handlers)
        runs: list[Run] = []

        async def record(job: Job, call_next: CallNext) -> Any:
            try:
                result = await call_next(job)
            except BaseException as error:
                runs.append(Run(job.id, job.kind, job.attempt, error=error))
                raise
            runs.append(Run(job.id, job.kind, job.attempt, result))
            return result

        worker = Worker(
            self.dsn,
            registry,
            queues=dict.fromkeys(queues or registry.queues, 1),
            schema=self.schema,
            middleware=[record, *middleware],
            executor=executor,
            maintenance=False,
            listen=False,
            poll_interval=LOOK_SECONDS,
            prefetch=0,
            application_name="awa drain",
        )
        with self.connect() as conn:
            async with worker:
                await self._until_nothing_is_due(worker, Client(conn, schema=self.schema), timeout)
        unknown = sorted(kind for d in worker.dispatchers for kind in d.unknown)
        if raise_errors:
            for run in runs:
                if run.error is not None and not isinstance(run.error, Outcome):
                    raise run.error
            if unknown:
                raise LookupError(f"there are jobs without a handler: {', '.join(unknown)}")
        return runs

    async def _until_nothing_is_due(self, worker: Worker, client: Client, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            # The worker shares this event loop, so it stands still while the database is asked.
            promoted = client.tick(budget={"steps": ["refill", "promote"]})
            waiting = {q: client.queue_counts(q).available for q in worker.queues}
            if (
                not any(waiting.values())
                and not any(report.rows for report in promoted)
                and worker.holds.is_empty()
            ):
                return
            if time.monotonic() > end:
                stuck = [queue for queue, count in waiting.items() if count]
                raise TimeoutError(
                    f"jobs still run or are due after {timeout:g} s"
                    + (f" in {', '.join(stuck)}: is a queue paused?" if stuck else "")
                )
            await asyncio.sleep(LOOK_SECONDS)

    # Time

    def advance(self, seconds: Seconds) -> None:
        """Let time pass: everything that was stored happened that much earlier.

        Due times come nearer, deadlines, retentions and heartbeats run out. No clock is changed:
        the times in the application's own tables and inside JSON stay as they are.
        """
        step = timedelta(seconds=as_seconds(seconds, "advance"))
        # Partitions are moved through their table.
        query = """
            SELECT c.relname, array_agg(a.attname ORDER BY a.attnum)
            FROM pg_class c
            JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            WHERE c.relnamespace = %s::regnamespace AND c.relkind IN ('r', 'p')
              AND NOT c.relispartition AND a.atttypid = 'timestamptz'::regtype
              AND a.attgenerated = ''
            GROUP BY c.relname ORDER BY c.relname
        """
        with self.connect(autocommit=False) as conn:
            schema = sql.Identifier(self.schema).as_string(conn)
            for table, columns in conn.execute(query, [schema]).fetchall():
                earlier = [
                    sql.SQL("{0} = {0} - {1}").format(sql.Identifier(c), sql.Literal(step))
                    for c in columns
                ]
                update = sql.SQL("UPDATE {} SET {}").format(
                    sql.Identifier(self.schema, table), sql.SQL(", ").join(earlier)
                )
                conn.execute(update)
            # Moments that the engine keeps in sequences: forgotten.
            conn.execute(
                """
                SELECT setval(s.seqrelid::regclass, s.seqstart, false)
                FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
                WHERE c.relnamespace = %s::regnamespace
                  AND s.seqstart = 0 AND c.relname NOT IN ('queue_ring', 'claim_ring')
                """,
                [schema],
            )

    # Looking

    def enqueued(
        self,
        kind: str | None = None,
        *,
        queue: str | None = None,
        args: Json = None,
        states: Iterable[str] = NOT_ENDED,
    ) -> list[JobInfo]:
        """The jobs that have not ended and fit: an object `args` may have more keys than given."""
        with self.connect() as conn, conn.cursor(row_factory=class_row(JobInfo)) as cursor:
            view = sql.Identifier(self.schema, "jobs")
            columns = sql.SQL(", ").join(sql.Identifier(f.name) for f in fields(JobInfo))
            query = sql.SQL("SELECT {} FROM {} WHERE state = ANY (%s) ORDER BY created_at, job_id")
            cursor.execute(query.format(columns, view), [list(states)])
            jobs = cursor.fetchall()
        return [
            job
            for job in jobs
            if kind in (None, job.kind)
            and queue in (None, job.queue)
            and (args is None or _fits(args, job.args))
        ]

    def assert_enqueued(
        self, kind: str, *, queue: str | None = None, args: Json = None, count: int | None = None
    ) -> list[JobInfo]:
        """Fail unless such jobs wait or run: at least one, or exactly `count`."""
        found = self.enqueued(kind, queue=queue, args=args)
        if len(found) == count or (count is None and found):
            return found
        wanted = f"{kind}" + ("" if queue is None else f" in queue {queue}")
        wanted += "" if args is None else f" with {args!r}"
        there = [f"  {job.kind} in queue {job.queue} with {job.args!r}" for job in self.enqueued()]
        number = "no job" if not found else f"{len(found)} jobs"
        expected = "" if count is None else f", {count} expected"
        raise AssertionError(
            "\n".join([f"{number} {wanted}{expected}; enqueued are:", *(there or ["  none"])])
        )

    def assert_not_enqueued(
        self, kind: str, *, queue: str | None = None, args: Json = None
    ) -> None:
        """Fail if such a job waits or runs."""
        self.assert_enqueued(kind, queue=queue, args=args, count=0)


def _fits(wanted: Json, given: Json) -> bool:
    if isinstance(wanted, Mapping) and isinstance(given, Mapping):
        return all(key in given and _fits(value, given[key]) for key, value in wanted.items())
    return bool(wanted == given)
