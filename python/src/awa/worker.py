"""The worker: claims jobs, runs their handlers, tells the database what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
import unicodedata
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import psycopg

from . import _calls
from ._batches import Holds
from ._codec import dump_json
from ._dispatcher import Dispatcher
from ._executors import Executors, ExecutorSource
from ._finisher import Finisher
from ._invoke import compose
from ._maintenance import Maintenance
from ._session import AsyncSession, Backoff, Outage, SessionSettings, logger
from ._statements import Statements
from ._threads import DaemonThreads
from ._version import __version__, check_schema
from .errors import (
    AwaError,
    InvalidArgument,
    VersionMismatch,
    WrongState,
    is_refusal,
    is_transient,
    translated,
)
from .handlers import Handlers, Middleware
from .heartbeat import Heartbeat
from .job import Job, Row
from .listener import Listener
from .models import Json
from .outcomes import as_seconds
from .shutdown import shut_down, signals

DEFAULT_CONCURRENCY = 50
DEFAULT_GRACE = 30.0
# The most that one claim takes: larger ones gain nothing and delay the first job of the batch.
BATCH = 1000
NOT_READY_AFTER_SECONDS = 10.0
PROGRESS_TRIES = 5
LAST_WORDS_SECONDS = 0.5
# As many as asyncio has.
DEFAULT_THREADS = min(32, (os.cpu_count() or 1) + 4)

# What a worker calls, all of which grant_worker gives.
CALLED = (
    *("attempt_status", "claim_ready_runtime", "claim_status", "complete_jobs", "finish_jobs"),
    *("heartbeat", "register_instance", "set_progress", "tick"),
)
MISSING_RIGHTS = """
    SELECT p.proname::text, current_user::text
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE p.proname = ANY (%s) AND n.nspname = %s AND NOT has_function_privilege(p.oid, 'EXECUTE')
    ORDER BY 1
"""

Queues = Mapping[str, int] | Sequence[str] | int
CLEAN, FORCED = 0, 1


class Worker:
    """Runs the jobs of some queues; an async context manager, so that an application can host it.

    `queues` gives the number of handlers that run at once: for each queue, or as one number for
    the queues that the handlers name. Def handlers run in `executor`, by default in threads; a
    function that makes one is called again when it breaks. Behind a pooler nothing is
    used that needs a session. Where notifications do not arrive, or with `listen` false, the worker
    polls: soon after a job, then ever more seldom, every `poll_interval` seconds at least. Each
    worker also takes part in the maintenance of the queue, unless `maintenance` is false.
    """

    def __init__(
        self,
        dsn: str,
        handlers: Handlers | Mapping[str, Callable[..., Any]],
        *,
        queues: Queues = DEFAULT_CONCURRENCY,
        schema: str = _calls.DEFAULT_SCHEMA,
        grace: float | None = None,
        executor: ExecutorSource | None = None,
        middleware: Sequence[Middleware] = (),
        maintenance: bool = True,
        listen: bool = True,
        poll_interval: float = 1.0,
        prefetch: int | None = None,
        application_name: str = "awa",
    ) -> None:
        self.handlers = handlers if isinstance(handlers, Handlers) else Handlers(handlers)
        self.queues = _queues(queues, self.handlers)
        self.schema = schema
        self.grace = as_seconds(DEFAULT_GRACE if grace is None else grace, "grace")
        self.middleware = tuple(middleware)
        self.poll_interval = as_seconds(poll_interval, "poll_interval")
        self.instance_id = uuid.uuid4()
        self.holds = Holds()
        self.dispatchers: list[Dispatcher] = []
        self.listener: Listener | None = None
        self._settings = SessionSettings(dsn, application_name)
        self._executors = Executors(executor, sum(self.queues.values()))
        self._with_maintenance = maintenance
        self._with_listener = listen
        self._prefetch = prefetch
        self._outage = Outage()
        self._statements = Statements(schema)
        self._warned: set[str] = set()
        self._drained: frozenset[str] = frozenset()
        self._is_started = False
        self._is_running = False
        self._is_clean = True
        self._is_broken = False
        self._maintenance: Maintenance | None = None
        self.handles_sigint = False
        self._stopped_at = 0.0
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self._claims = AsyncSession(self._settings, "claim")
        self._finishes = AsyncSession(self._settings, "finish")
        self.finisher = Finisher(
            self._finishes,
            self._statements,
            self.holds,
            self.instance_id,
            self._outage,
            broken=self.broken,
        )
        self.heartbeat = Heartbeat(
            self._settings,
            schema,
            self.instance_id,
            self._info(),
            self.holds,
            self._outage,
            closed=self._closed_elsewhere,
            drain=self._drain,
            drained=self._note_drained,
        )
        self._own_transaction = frozenset(t.kind for t in self.handlers if t.completes_itself)
        own = sorted(self._own_transaction)
        self._claim_opts = {
            wake: dump_json(
                ({"separate": own} if own else {}) | ({"wake_others": True} if wake else {}),
                "opts",
            )
            for wake in (False, True)
        }

    # Life cycle

    async def __aenter__(self) -> Self:
        if self._is_started:
            raise RuntimeError("a worker runs once: make a new one")
        self._is_started = True
        self.loop = asyncio.get_running_loop()
        try:
            runs = {task: compose(task, self._executors, self.middleware) for task in self.handlers}
            if not await self._register():
                return self
        except BaseException:
            self._executors.close()
            await self._claims.close()
            raise
        self._is_running = True
        self.finisher.start()
        self.heartbeat.start()
        if self._with_listener:
            self.listener = Listener(
                self._settings,
                self._outage,
                elsewhere=self._claims,
                heard=self._heard,
                connected=self._ring_all,
            )
            self.listener.start()
        if self._with_maintenance:
            self._maintenance = Maintenance(self._settings, self.schema, self._outage)
            self._maintenance.start()
        for queue, concurrency in self.queues.items():
            dispatcher = Dispatcher(self, queue, concurrency, self._prefetch, BATCH)
            self.dispatchers.append(dispatcher)
            dispatcher.start(runs)
        what = ", ".join(f"{queue}={n}" for queue, n in self.queues.items())
        logger.info("worker %s started: %s", self.instance_id, what)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()
        if not self._is_running:
            self._executors.close()
            await self._claims.close()
            return
        self._is_running = False
        self._is_clean = False
        try:
            self._is_clean = await self._shut_down() and not self._is_broken
            if lost := self._executors.lost:
                logger.warning("%d threads that outlived a deadline still run", lost)
                self._is_clean = False
        finally:
            await self._close()

    async def _shut_down(self) -> bool:
        closing = self.loop.create_task(shut_down(self), name="awa shutdown")
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            # The host does not want to wait, like somebody who sends a second signal.
            self.stop(grace=0)
            await closing
            raise

    async def _close(self) -> None:
        self.heartbeat.stop()
        if self._maintenance is not None:
            await self._maintenance.close()
        if self.listener is not None:
            await self.listener.close()
        self._executors.close()
        await self._finishes.close()
        await self._claims.close()
        await self.heartbeat.ended(1.0 if self._is_clean else 0.1)
        logger.info("worker stopped%s", "" if self._is_clean else ", some jobs were cut short")

    async def run(self) -> int:
        """Work until a signal or stop(); 0 after a clean stop, 1 when handlers were cut short."""
        with signals(self):
            async with self:
                await self.stopping.wait()
        return CLEAN if self._is_clean else FORCED

    def stop(self, *, grace: float | None = None) -> None:
        """Claim nothing more and end when the running handlers have; grace=0 does not wait."""
        if not self.stopping.is_set():
            self._stopped_at = time.monotonic()
        self.stopping.set()
        if grace == 0:
            self.hurry.set()
        elif grace is not None:
            self.grace = as_seconds(grace, "grace")

    @property
    def grace_left(self) -> float:
        """Seconds that are left of the grace period, and a moment at least."""
        if self.hurry.is_set():
            return LAST_WORDS_SECONDS
        return max(LAST_WORDS_SECONDS, self._stopped_at + self.grace - time.monotonic())

    @property
    def is_ready(self) -> bool:
        """Whether the worker claims and the database answers."""
        return (
            self._is_running
            and not self.stopping.is_set()
            and self._claims.is_connected
            and self.heartbeat.is_connected
            and self.heartbeat.age < NOT_READY_AFTER_SECONDS
        )

    @property
    def running(self) -> int:
        """How many handlers run."""
        return sum(dispatcher.running for dispatcher in self.dispatchers)

    async def _register(self) -> bool:
        """Wait for the database and make this process known; false when stopped before."""
        backoff = Backoff()
        register = _calls.register_instance(self.instance_id, info=self._info(), schema=self.schema)
        verify = _calls.tick(budget={"steps": ["verify"]}, schema=self.schema)
        while not self.stopping.is_set():
            try:
                with translated():
                    await self._check_server()
                    may_tick = await self._check_rights()
                    await self._claims.fetch(register.sql, register.params)
                    # Rows that came from another database are put in order before any is claimed.
                    if may_tick:
                        await self._claims.fetch(verify.sql, verify.params)
                return True
            except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName) as error:
                raise VersionMismatch(
                    f'there is no awa in schema "{self.schema}" of this database',
                    hint="Install it: awa install, or CREATE EXTENSION awa.",
                ) from error
            except Exception as error:
                # Once started, a worker sits out whatever comes; a wrong DSN shows at the start.
                if not is_transient(error) or is_refusal(error):
                    raise
                self._outage.report("connecting", error)
            await self.pause(backoff.next())
        return False

    async def _check_server(self) -> None:
        version = _calls.schema_version(schema=self.schema)
        ((installed,),) = await self._claims.fetch(version.sql, version.params)
        check_schema(self.schema, installed)
        ((is_standby,),) = await self._claims.fetch("SELECT pg_is_in_recovery()", ())
        # One of several may be promoted while we look.
        if is_standby and self._claims.knows_one_server:
            raise WrongState(
                "the server is a standby, where no worker can run",
                hint="Name the primary; or, to follow a failover, all servers and "
                "target_session_attrs=read-write.",
            )

    async def _check_rights(self) -> bool:
        """Say at once what would else show as a queue that never moves, or as lost results.

        Returns whether the role may call tick, which only maintenance must.
        """
        rows = await self._claims.fetch(MISSING_RIGHTS, ([*CALLED], self.schema))
        missing = [name for name, _ in rows]
        needed = [name for name in missing if self._with_maintenance or name != "tick"]
        if needed:
            schema = _calls.quote_schema(self.schema)
            raise AwaError(
                f'role "{rows[0][1]}" must not call {", ".join(needed)} of schema "{self.schema}"',
                hint=f"Grant it what a worker needs: SELECT {schema}.grant_worker('...').",
            )
        return "tick" not in missing

    def _info(self) -> dict[str, Json]:
        return {
            "hostname": platform.node(),
            "pid": os.getpid(),
            "version": __version__,
            "client": "python",
            "queues": self.queues,
            "kinds": sorted(task.kind for task in self.handlers),
        }

    # For the dispatchers and jobs

    async def claim(self, queue: str, most: int, wake_others: bool) -> list[Row]:
        """Rows of one claim."""
        return await self._claims.fetch(
            self._statements.claim,
            (queue, most, self.instance_id, self._claim_opts[wake_others]),
            binary=True,
        )

    async def claim_status(self, queue: str) -> tuple[str, str | None, int]:
        """Why there was nothing to claim; a wake-up is asked for where it would be heard."""
        is_armed = self.listener is not None and self.listener.works
        (row,) = await self._claims.fetch(self._statements.claim_status, (queue, is_armed))
        return row[0], row[1], row[2]

    def completes_itself(self, kind: str) -> bool:
        """Whether jobs of a kind are completed in the handler's own transaction."""
        return kind in self._own_transaction

    async def send_progress(self, job: Job, value: Json) -> bool:
        """Store a job's progress."""
        call = _calls.set_progress(*job.token, value, schema=self.schema)
        backoff = Backoff()
        for remaining in reversed(range(PROGRESS_TRIES)):
            try:
                with translated():
                    ((is_current,),) = await self._finishes.fetch(call.sql, call.params)
                break
            except Exception as error:
                if not remaining or not is_transient(error):
                    raise
                self._outage.report("setting progress", error)
            await asyncio.sleep(backoff.next())
        if is_current:
            job._progress = value
        elif not job._cancelled:
            job.lease_lost = True
        return bool(is_current)

    async def pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the worker is stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def trouble(self, what: str, error: BaseException) -> None:
        """Log an error after which the worker goes on."""
        if isinstance(error, psycopg.Error | OSError):
            self._outage.report(what, error)
        else:
            logger.error("%s failed", what, exc_info=error)

    def broken(self, error: BaseException) -> None:
        # Without it no result would be stored any more: better to end, and be started again.
        logger.critical("the worker is broken and stops", exc_info=error)
        self._is_broken = True
        self.stop()

    def warn_once(self, message: str) -> None:
        """Log a warning that would come with every job."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)

    # From the listener

    def _heard(self, channel: str, payload: str) -> None:
        if payload == "cancel":
            self.heartbeat.now()
            return
        for dispatcher in self.dispatchers:
            if dispatcher.channel == channel:
                dispatcher.ring()

    def _ring_all(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.ring()

    # From the heartbeat's thread

    def _closed_elsewhere(self, job: Job) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nothing runs any more
            self.loop.call_soon_threadsafe(job._dispatcher.closed_elsewhere, job)

    def _note_drained(self, queues: frozenset[str]) -> None:
        if queues != self._drained:
            self._drained = queues
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._tell_drained, queues)

    def _tell_drained(self, queues: frozenset[str]) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.drained(dispatcher.queue in queues)

    def _drain(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.stop)


class WorkerOptions(TypedDict, total=False):
    """Options of Worker."""

    queues: Queues
    schema: str
    grace: float | None
    executor: ExecutorSource | None
    middleware: Sequence[Middleware]
    maintenance: bool
    listen: bool
    poll_interval: float
    prefetch: int | None
    application_name: str


def run(
    handlers: Handlers | Mapping[str, Callable[..., Any]],
    *,
    dsn: str,
    **options: Unpack[WorkerOptions],
) -> int:
    """Work until SIGTERM or SIGINT; 0 after a clean stop, 1 when handlers were cut short.

    Then the process can end: neither def handlers nor asyncio.to_thread() keep it. Threads that
    handlers start themselves, and pools of their own, do.
    """
    runner = asyncio.Runner()
    # For asyncio.to_thread: threads of the loop would keep the process beyond the grace period.
    threads = DaemonThreads(DEFAULT_THREADS)
    runner.get_loop().set_default_executor(threads)
    code = CLEAN
    try:
        worker = Worker(dsn, handlers, **options)
        code = runner.run(worker.run())
        if code == CLEAN and not threads.ended(worker.grace_left):
            logger.warning(
                "threads of handlers that timed out still run, they end with the process"
            )
            code = FORCED
    finally:
        if code == CLEAN:
            runner.close()
        else:
            _close_without_waiting(runner.get_loop())
    return code


def _close_without_waiting(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that may have handlers which refuse to stop, or wait for threads that hang."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=LAST_WORDS_SECONDS))
    loop.close()


def _is_name(text: str) -> bool:
    """Whether the database takes it for the name of a queue: a worker would try for ever."""
    return 0 < len(text) <= 200 and not any(unicodedata.category(c) == "Cc" for c in text)


def _queues(queues: Queues, handlers: Handlers) -> dict[str, int]:
    if isinstance(queues, int):
        queues = dict.fromkeys(handlers.queues, queues)
    elif not isinstance(queues, Mapping):
        if isinstance(queues, str):
            raise TypeError(f"queues takes a mapping or a list, not the string {queues!r}")
        queues = dict.fromkeys(queues, DEFAULT_CONCURRENCY)
    for queue, concurrency in queues.items():
        if not _is_name(queue):
            raise InvalidArgument(
                f"queue {queue[:100]!r} is not a name",
                hint="A queue has a name of 1 to 200 printable characters.",
            )
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ValueError(f'queue "{queue}" needs at least one slot, not {concurrency!r}')
    if not queues:
        raise ValueError("a worker needs at least one queue")
    return dict(queues)
