"""Claims jobs of one queue as slots become free, and runs their handlers.

Handlers run in long-lived runner tasks rather than in a task per job. A runner steps a handler
itself until it first waits, so jobs that never wait cost no switch at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ._batches import Batch
from ._codec import dump_json
from ._decode import Mismatch
from ._executors import NotStarted
from ._invoke import RAISED_GENERATOR_EXIT, Run, rest_of
from ._results import (
    error_outcome,
    error_text,
    failure,
    not_completed,
    outcome_item,
    unfinished,
)
from ._session import Backoff, logger
from .errors import InvalidArgument, LimitExceeded
from .handlers import Task
from .job import ARGS, BATCH_ID, CLAIM_SLOT, FINISHED, KIND, POSITION, RUNNING, WAITING, Job, Row
from .models import Json
from .outcomes import Outcome

if TYPE_CHECKING:
    from .worker import Worker

# A runner gives the event loop a turn after this long without waiting.
TURN_SECONDS = 0.002
_SETTLING_MOST = 0.25
_POLL_FIRST = 0.05
# How long jobs that were claimed ahead may wait while no handler ends.
HOARD_SECONDS = 1.0
# Jobs are claimed ahead to cover this time, at the pace at which they end: about two claims.
AHEAD_SECONDS = 0.02
FLUSH_PAUSE_SECONDS = 0.005
# Least value of claim_max_bytes: a claim that brings less has brought what there was.
LARGE_BYTES = 65_536
LAST_CLAIM_SECONDS = 10.0
# How long a handler may go on that was told of the loss of its lease at its deadline.
OVERDUE_SECONDS = 1.0
REFUSAL_SECONDS = 1.0


class Pace:
    """How fast jobs end, and so how many to claim ahead: none of those that take long.

    One worker of 8 slots makes 1,420 jobs/s with handlers of 5 ms in 160 claims a second, four of
    them 5,000; with half a slot's worth ahead it took 400 claims, and four made 2,500.
    """

    def __init__(self, concurrency: int) -> None:
        self._most = 2 * concurrency
        self._since = time.monotonic()
        self._finished = 0
        self._per_second = 0.0

    def prefetch(self, finished: int) -> int:
        """How many to claim ahead, given how many have ended so far."""
        now = time.monotonic()
        elapsed = now - self._since
        if elapsed > 0.05:
            measured = (finished - self._finished) / elapsed
            self._per_second = (self._per_second + measured) / 2
            self._since, self._finished = now, finished
        return min(int(self._per_second * AHEAD_SECONDS), self._most)


class Dispatcher:
    """One queue of a worker."""

    def __init__(
        self,
        worker: Worker,
        queue: str,
        concurrency: int,
        prefetch: int | None,
        batch: int,
    ) -> None:
        self.worker = worker
        self.queue = queue
        self.concurrency = concurrency
        self.channel: str | None = None
        self._prefetch = prefetch
        self._pace = Pace(concurrency)
        self._batch = batch
        self._waiting: deque[Job] = deque()
        # Claimed and not yet through their handler: waiting or running.
        self._in_hand = 0
        self._runners: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._claimed = 0
        # How many had ended when jobs waited too long: nothing is claimed ahead until one ends.
        self._stuck_at = -1
        self._slot: asyncio.Future[None] | None = None
        # A claim is worth its round trip when no more than this is in hand.
        self._claim_at = concurrency - 1
        self._bell = asyncio.Event()
        # Pause between looks at positions that producers have not committed yet.
        self._settling = 0.0
        # Pause between looks where no notification arrives.
        self._polling = 0.0
        self._is_stopping = False
        self._is_drained = False
        self._claiming: asyncio.Task[None] | None = None
        self._all_done: asyncio.Future[None] | None = None
        # What runners start from; a handler's changes to context variables stay its own.
        self._context = contextvars.Context()
        self._runs: dict[str, Run] = {}
        self._tasks: dict[str, Task[..., Any]] = {}
        self._plain: frozenset[str] = frozenset()
        # Kinds without a handler that were logged already.
        self.unknown: set[str] = set()
        self.stragglers: list[Job] = []

    # Life cycle

    def start(self, runs: Mapping[Task[..., Any], Run]) -> None:
        """Start claiming."""
        self._tasks = {task.kind: task for task in runs}
        self._runs = {task.kind: run for task, run in runs.items()}
        self._plain = frozenset(
            kind for kind, task in self._tasks.items() if not task.completes_itself
        )
        self._claiming = self.worker.loop.create_task(
            self._claim_forever(), name=f"awa claim {self.queue}"
        )

    @property
    def running(self) -> int:
        """Jobs whose handler was started and has not returned."""
        return self._in_hand - len(self._waiting)

    def task_of(self, job: Job) -> Task[..., Any]:
        """The handler of a job that was started."""
        return self._tasks[job.kind]

    def ring(self) -> None:
        """There may be something to claim."""
        self._bell.set()

    def drained(self, is_drained: bool) -> None:
        """Somebody cancels what waits in the queue, or has done so: leave it alone meanwhile."""
        self._is_drained = is_drained
        if is_drained:
            self._release_waiting("drained")
        else:
            self._bell.set()

    async def stop_claiming(self) -> None:
        """Claim nothing more and give back what was not started."""
        self._is_stopping = True
        self._bell.set()
        self._slot_is_free()
        if self._claiming is not None:
            await asyncio.wait([self._claiming], timeout=LAST_CLAIM_SECONDS)
            if not self._claiming.done():
                # The database does not answer. What it may have claimed is missing from the
                # heartbeats, so others get it.
                self._claiming.cancel()
                await asyncio.wait([self._claiming])
        self._release_waiting("shutdown")

    def _release_waiting(self, reason: str) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            self._in_hand -= 1
            self._claimed -= 1
            self.worker.finisher.put(job, {"outcome": "released", "reason": reason})

    async def handlers_done(self) -> None:
        """Wait until no handler runs."""
        while self._in_hand:
            self._all_done = self.worker.loop.create_future()
            await self._all_done

    def interrupt(self) -> None:
        """Stop async handlers; note the def handlers, which cannot be stopped."""
        for batch in list(self.worker.holds.batches.values()):
            for job in list(batch.open.values()):
                if job._dispatcher is not self or job._state != RUNNING or job._task is None:
                    continue
                future = job._future
                runs_elsewhere = future is not None and not future.done() and not future.cancel()
                # A process is killed, a thread keeps its job.
                if runs_elsewhere and not (job._pool is not None and job._pool.kill()):
                    self.stragglers.append(job)
                self.stop_job(job, "shutdown")

    def closed_elsewhere(self, job: Job) -> None:
        """A job in hand was cancelled or taken away."""
        if job._state == WAITING:
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)
                self._in_hand -= 1
                self.worker.finisher.drop(job)
                self._slot_is_free()
        elif job._state == RUNNING:
            task = self._tasks[job.kind]
            if task.interrupt_on_cancel:
                self.stop_job(job, "closed")
            elif job.lease_lost and job.deadline_at is not None:
                self.worker.loop.call_later(OVERDUE_SECONDS, self._stop_overdue, job)

    def _stop_overdue(self, job: Job) -> None:
        """Free the slot of a handler that outlives its deadline: others wait for it."""
        if job._state == RUNNING and self._leaves_its_thread(job):
            self.stop_job(job, "closed")

    def _leaves_its_thread(self, job: Job) -> bool:
        future = job._future
        if future is None or future.done() or future.cancel():
            return True
        if job._pool is not None and job._pool.lose(future):
            logger.warning(
                "%r outlives its deadline: another thread takes the place of its own", job
            )
            return True
        logger.error("%r outlives its deadline and keeps its slot until it ends", job)
        return False

    def _note_unknown(self, kind: str) -> None:
        if kind not in self.unknown:
            self.unknown.add(kind)
            logger.warning(
                'queue "%s" has jobs of kind "%s", which has no handler here: they are handed back',
                self.queue,
                kind,
            )

    def stop_job(self, job: Job, why: str) -> None:
        """Cancel the runner of a job that waits in its handler."""
        if job._task is not None and job._stop is None:
            job._stop = why
            job._task.cancel()

    async def close(self) -> None:
        """End the runners."""
        for runner in self._runners:
            runner.cancel()
        if self._runners:
            # A handler may refuse to be cancelled; it is not worth more than a moment.
            await asyncio.wait(self._runners, timeout=REFUSAL_SECONDS)

    # Claiming

    async def _claim_forever(self) -> None:
        finisher = self.worker.finisher
        backoff = Backoff()
        limit = max(2 * self.concurrency, 4 * self._batch)
        while not self._is_stopping:
            if self._is_drained:
                self._bell.clear()
                await self._wait_for_bell(HOARD_SECONDS)
                continue
            finished = self._claimed - self._in_hand
            ahead = self._pace.prefetch(finished) if self._prefetch is None else self._prefetch
            if finished == self._stuck_at:
                ahead = 0
            # With jobs waiting here, a claim can wait until it brings more than a few.
            self._claim_at = self.concurrency - 1 + ahead // 2
            if self._in_hand > self._claim_at:
                await self._wait_for_slot()
                continue
            if finisher.backlog > limit:
                await self.worker.pause(FLUSH_PAUSE_SECONDS)
                continue
            free = self.concurrency + ahead - self._in_hand
            asked = min(free, self._batch)
            try:
                rows = await self._claim(asked, wake_others=asked == free)
                if rows:
                    self._settling = self._polling = 0.0
                # What is large comes in portions.
                is_all = len(rows) < asked and sum(len(row[ARGS]) for row in rows) < LARGE_BYTES
                if is_all and not self._is_stopping:
                    # The jobs start before the next call is written. That was all there is:
                    # asking for the state is cheaper than an empty claim.
                    await asyncio.sleep(0)
                    await self._sleep_until_work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker goes on
                self.worker.trouble(f'claiming from queue "{self.queue}"', error)
                await self.worker.pause(backoff.next())
            else:
                backoff.reset()

    async def _wait_for_slot(self) -> None:
        before = self._claimed - self._in_hand
        self._slot = self.worker.loop.create_future()
        await asyncio.wait([self._slot], timeout=HOARD_SECONDS)
        if self._waiting and self._claimed - self._in_hand == before:
            # Nothing ended for so long that another worker had better have what waits here.
            self._stuck_at = before
            self._release_waiting("not started")

    async def _claim(self, most: int, *, wake_others: bool) -> list[Row]:
        worker = self.worker
        worker.holds.claim_started(self)
        try:
            rows = await worker.claim(self.queue, most, wake_others)
            if rows:
                self._accept(rows)
        finally:
            worker.holds.claim_ended(self)
        return rows

    def _accept(self, rows: list[Row]) -> None:
        batches = self.worker.holds.batches
        waiting = self._waiting
        slot = batch_id = -1
        for row in rows:
            if row[BATCH_ID] != batch_id or row[CLAIM_SLOT] != slot:
                slot, batch_id = row[CLAIM_SLOT], row[BATCH_ID]
                found = batches.get((slot, batch_id))
                if found is None:
                    found = batches[slot, batch_id] = Batch(slot, batch_id)
                batch, opened = found, found.open
            job = Job(row, batch, self)
            opened[row[POSITION]] = job
            waiting.append(job)
        self._in_hand += len(rows)
        self._claimed += len(rows)
        if self._is_stopping or self._is_drained:
            self._release_waiting("shutdown" if self._is_stopping else "drained")
        else:
            self._wake_runner()

    async def _sleep_until_work(self) -> None:
        while not self._is_stopping:
            self._bell.clear()
            reason, channel, retry_after_ms = await self.worker.claim_status(self.queue)
            if reason == "ready":
                return
            wait = retry_after_ms / 1000
            if reason in ("in_flight", "contended"):
                # Nobody rings for these: look again soon, then less and less often.
                self._settling = min(self._settling * 2 or wait, _SETTLING_MOST)
                await self._wait_for_bell(self._settling * (0.75 + random.random() / 2))
                return
            self._settling = 0.0
            if channel is not None and self.worker.listener is not None:
                self.channel = channel
                if not self.worker.listener.hears(channel):
                    # Listen first and look again: what was rung before is lost.
                    if await self.worker.listener.listen(channel):
                        continue
                    wait = self._next_poll(wait)
            else:
                wait = self._next_poll(wait)
            # Not longer: producers ring until a little after that time, and no more.
            await self._wait_for_bell(wait * (0.8 + random.random() / 5))
            return

    def _next_poll(self, most: float) -> float:
        """Where one job came, the next may follow soon."""
        self._polling = min(self._polling * 2 or _POLL_FIRST, most, self.worker.poll_interval)
        return self._polling

    async def _wait_for_bell(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._bell.wait()

    # Running

    def _wake_runner(self) -> None:
        while self._idle:
            sleeper = self._idle.pop()
            if not sleeper.done():
                sleeper.set_result(None)
                return
        if len(self._runners) < self.concurrency:
            runner = self.worker.loop.create_task(
                self._run_jobs(), name=f"awa runner {self.queue}", context=self._context.copy()
            )
            self._runners.add(runner)
            runner.add_done_callback(self._runner_ended)

    def _runner_ended(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()):
            self.worker.trouble("a runner", error)
        if self._waiting and not self._is_stopping:
            self._wake_runner()

    def _slot_is_free(self) -> None:
        slot = self._slot
        if slot is not None:
            self._slot = None
            if not slot.done():
                slot.set_result(None)

    async def _run_jobs(self) -> None:
        """A runner: takes waiting jobs until its context is no longer the one it began with."""
        me = cast("asyncio.Task[None]", asyncio.current_task())
        waiting = self._waiting
        runs = self._runs
        plain = self._plain
        finisher = self.worker.finisher
        dirty = finisher.dirty
        clock = time.perf_counter
        snapshot = contextvars.copy_context
        baseline = snapshot()
        turn_ends = clock() + TURN_SECONDS
        while True:
            if not waiting:
                sleeper = self.worker.loop.create_future()
                self._idle.append(sleeper)
                await sleeper
                turn_ends = clock() + TURN_SECONDS
                continue
            job = waiting.popleft()
            job._state = RUNNING
            is_clean = True
            run = runs.get(job._row[KIND])
            if run is None:
                self._note_unknown(job.kind)
                finisher.put(job, {"outcome": "released", "reason": "unknown_kind"})
            else:
                try:
                    coroutine = run(job)
                    try:
                        first = coroutine.send(None)
                    except StopIteration as stop:
                        value = stop.value
                    except GeneratorExit as error:
                        raise RuntimeError(RAISED_GENERATOR_EXIT) from error
                    else:
                        job._task = me
                        if waiting:
                            # Two at a time, so that a large claim spreads fast.
                            self._wake_runner()
                            self._wake_runner()
                        value = await rest_of(coroutine, first)
                        turn_ends = clock() + TURN_SECONDS
                        # asyncio.timeout() of the next job would count an old cancellation.
                        is_clean = not me.cancelling()
                except GeneratorExit:
                    raise
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt) and not self.worker.handles_sigint:
                        raise
                    is_clean = not me.cancelling()
                    self._settle(job, self._failed, error)
                else:
                    if (
                        value is None
                        and not job._cancelled
                        and not job.lease_lost
                        and job._row[KIND] in plain
                    ):
                        job._state = FINISHED
                        batch = job._batch
                        if not batch.done:
                            dirty.append(batch)
                        batch.done.append(job._row[POSITION])
                        if finisher._sleeper is not None:
                            finisher.wake()
                    else:
                        self._settle(job, self._returned, value)
                    value = None
                job._task = None
            self._in_hand -= 1
            if self._slot is not None and self._in_hand <= self._claim_at:
                self._slot_is_free()
            if self._all_done is not None and not self._in_hand and not self._all_done.done():
                self._all_done.set_result(None)
            # A reused runner must not show one job what another one left behind.
            if not is_clean or snapshot() != baseline:
                return
            if clock() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = clock() + TURN_SECONDS

    # Results

    def _settle(self, job: Job, settle: Callable[[Job, Any], None], value: Any) -> None:
        """Report what a handler returned or raised; whatever that is, the slot becomes free."""
        try:
            settle(job, value)
        except Exception as error:  # noqa: BLE001 - code of the handler's own classes
            logger.error("the outcome of %r cannot be used", job, exc_info=error)
            why = f"the outcome cannot be used: {error_text(error)}"
            self.worker.finisher.put(
                job, failure(why, "invalid_outcome"), check=self._tasks[job.kind].completes_itself
            )

    def _returned(self, job: Job, value: Any) -> None:
        """A handler returned: anything but a plain success of a plain task."""
        finisher = self.worker.finisher
        task = self._tasks[job.kind]
        check = task.completes_itself
        if (job._cancelled or job.lease_lost) and not check:
            finisher.drop(job)
        elif isinstance(value, Outcome):
            finisher.put(job, outcome_item(value), check=check)
        elif (mistake := unfinished(value)) is not None:
            self._failed(job, mistake)
        elif check:
            finisher.put(job, not_completed(), check=True)
        elif value is None or task.defaults.keep_result is False:
            job._state = FINISHED
            finisher.complete(job)
        else:
            self._keep(job, task, value)

    def _keep(self, job: Job, task: Task[..., Any], value: Any) -> None:
        # Whether the job keeps its result is known in the database; it drops what was not asked.
        finisher = self.worker.finisher
        try:
            dump_json(value, "result")
        except (InvalidArgument, LimitExceeded) as error:
            if task.defaults.keep_result:
                finisher.put(job, failure(str(error), "invalid_result"))
                return
            self.worker.warn_once(
                f'results of "{job.kind}" are not kept: {error}; declare keep_result=False'
            )
            job._state = FINISHED
            finisher.complete(job)
            return
        # A job that succeeded does not fail for a result that nobody may have asked for.
        fallback: dict[str, Json] | None = (
            None if task.defaults.keep_result else {"outcome": "completed"}
        )
        finisher.put(job, {"outcome": "completed", "result": value}, fallback=fallback)

    def _failed(self, job: Job, error: BaseException) -> None:
        """A handler raised, its arguments did not fit, or the worker stopped it."""
        finisher = self.worker.finisher
        task = self._tasks[job.kind]
        check = task.completes_itself
        if isinstance(error, asyncio.CancelledError) and job._stop == "shutdown":
            if job in self.stragglers:
                return
            if job._future is not None and job._future.cancelled():
                finisher.put(job, {"outcome": "released", "reason": "shutdown"})
                return
            reason = {"error": "worker shut down"}
            finisher.put(
                job, {"outcome": "retry", "delay_seconds": 0, "error": reason}, check=check
            )
        elif (job._cancelled or job.lease_lost) and not check:
            finisher.drop(job)
        elif isinstance(error, Outcome):
            finisher.put(job, outcome_item(error), check=check)
        elif isinstance(error, NotStarted):
            # No fault of the job's: another worker gets it.
            finisher.put(job, {"outcome": "released", "reason": "executor"})
            self.worker.broken(error)
        elif isinstance(error, Mismatch):
            logger.error("%r: arguments do not fit: %s", job, error)
            finisher.put(job, failure(f"arguments do not fit: {error}", "invalid_arguments"))
        else:
            logger.warning("%r failed: %s", job, error_text(error))
            finisher.put(job, error_outcome(task, job.attempt, error), check=check)
