"""How a worker stops: signals, and the steps from the last claim to the last connection."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ._results import error_outcome, not_completed, outcome_item
from ._session import logger
from .job import Job
from .models import Json
from .outcomes import Outcome

if TYPE_CHECKING:
    from .worker import Worker

# For what is left to tell the database once every handler is through.
FLUSH_SECONDS = 10.0
FORCED_FLUSH_SECONDS = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals(worker: Worker) -> Iterator[None]:
    """The first signal stops the worker, the second one stops waiting for its handlers."""
    loop = asyncio.get_running_loop()

    def received(number: signal.Signals) -> None:
        if worker.stopping.is_set():
            logger.warning("%s again: not waiting for running handlers", number.name)
            worker.stop(grace=0)
        else:
            logger.info("%s: stopping", number.name)
            worker.stop()

    installed = []
    for number in SIGNALS:
        # Not possible on Windows and outside of the main thread.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, received, number)
            installed.append(number)
    # So a KeyboardInterrupt in a handler is the handler's own, not a Ctrl-C.
    worker.handles_sigint = signal.SIGINT in installed
    try:
        yield
    finally:
        worker.handles_sigint = False
        for number in installed:
            loop.remove_signal_handler(number)


async def shut_down(worker: Worker) -> bool:
    """Stop a worker; whether every handler came to its end and every result was stored.

    Heartbeats, cancellations and flushes go on to the end. Handlers that are still running after
    the grace period are handed back: async ones are cancelled and retried at once, threads keep
    their lease for as long as the process lives.
    """
    dispatchers = worker.dispatchers
    await asyncio.gather(*(d.stop_claiming() for d in dispatchers))
    is_clean = await _wait_for_handlers(worker)
    if not is_clean:
        running = sum(d.running for d in dispatchers)
        logger.warning("%d handlers still run after the grace period", running)
        for dispatcher in dispatchers:
            dispatcher.interrupt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FORCED_FLUSH_SECONDS):
                await asyncio.gather(*(d.handlers_done() for d in dispatchers))
    await asyncio.gather(*(d.close() for d in dispatchers))
    seconds = FLUSH_SECONDS if is_clean else FORCED_FLUSH_SECONDS
    if not await worker.finisher.close(seconds):
        logger.error("results of %d jobs could not be stored", len(worker.holds))
        is_clean = False
    stragglers = [job for d in dispatchers for job in d.stragglers]
    if stragglers:
        for batch in list(worker.holds.batches.values()):
            gone = [p for p, job in batch.open.items() if job not in stragglers]
            worker.holds.drop(batch, gone)
        logger.warning("%d threads cannot be stopped and keep their jobs", len(stragglers))
        worker.heartbeat.linger(stragglers, straggler_outcome)
    return is_clean


async def _wait_for_handlers(worker: Worker) -> bool:
    """Whether all handlers ended before the grace period, which a second stop may cut short."""

    async def all_done() -> None:
        for dispatcher in worker.dispatchers:
            await dispatcher.handlers_done()

    async def told_to_hurry() -> None:
        await worker.hurry.wait()

    done = asyncio.create_task(all_done())
    hurry = asyncio.create_task(told_to_hurry())
    ended, others = await asyncio.wait(
        [done, hurry], timeout=worker.grace, return_when=asyncio.FIRST_COMPLETED
    )
    for other in others:
        other.cancel()
    return done in ended


def straggler_outcome(job: Job, future: Future[Any]) -> dict[str, Json]:
    """The finish_jobs keys for a thread that ended after its worker did."""
    task = job._dispatcher.task_of(job)
    error = future.exception()
    outcome = error or future.result()
    if isinstance(outcome, Outcome):
        return outcome_item(outcome)
    if error is not None:
        return error_outcome(task, job.attempt, error)
    return not_completed() if task.completes_itself else {"outcome": "completed"}
