"""How a handler is called: its arguments, time limit, executor and middleware."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from ._executors import Executors, Pool, call_elsewhere, call_handler
from .handlers import Middleware, Task
from .job import Job

Run = Callable[[Job], Coroutine[Any, Any, Any]]

# Not to be taken for the end of the runner, which is closed by the same exception.
RAISED_GENERATOR_EXIT = "the handler raised GeneratorExit"


def compose(task: Task[..., Any], executors: Executors, outer: Sequence[Middleware]) -> Run:
    """The coroutine function that runs a job of this task."""
    run = _async_run(task) if task.is_async else _executor_run(task, executors.get(task.executor))
    for middleware in reversed((*outer, *task.middleware)):
        run = _wrapped(middleware, run)
    return run


def _wrapped(middleware: Middleware, inner: Run) -> Run:
    async def run(job: Job) -> Any:
        return await middleware(job, inner)

    return run


def _async_run(task: Task[..., Any]) -> Run:
    function = task.function
    decode = task.parameters.decode

    def with_arguments(job: Job) -> Coroutine[Any, Any, Any]:
        args, kwargs = decode(job)
        coroutine: Coroutine[Any, Any, Any] = function(*args, **kwargs)
        return coroutine

    run: Run = function if task.parameters.job_only else with_arguments
    if task.timeout is None:
        return run
    seconds = task.timeout

    async def with_timeout(job: Job) -> Any:
        try:
            async with asyncio.timeout(seconds) as timeout:
                return await run(job)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise TimeoutError(f"the handler took longer than {seconds:g} s") from None

    return with_timeout


def _executor_run(task: Task[..., Any], pool: Pool) -> Run:
    decode = task.parameters.decode
    function = task.function if pool.is_local else _importable(task)
    pool.check(function, task.kind)

    async def run(job: Job) -> Any:
        args, kwargs = decode(job)
        if pool.is_local:
            context = contextvars.copy_context()
            future = pool.submit(context.run, call_handler, function, args, kwargs)
        else:
            future = pool.submit(call_elsewhere, function, args, kwargs)
        job._future, job._pool = future, pool
        return await asyncio.wrap_future(future)

    return run


def _importable(task: Task[..., Any]) -> Callable[..., Any]:
    # A decorated function's name leads to its task.
    module = sys.modules.get(getattr(task.function, "__module__", ""))
    name = getattr(task.function, "__qualname__", "")
    return task if getattr(module, name, None) is task else task.function


@types.coroutine
def rest_of(coroutine: Coroutine[Any, Any, Any], first: Any) -> Generator[Any, Any, Any]:
    """Awaits a coroutine that was already stepped once and waits for `first`."""
    waiting_for = first
    while True:
        error: BaseException | None = None
        sent = None
        try:
            sent = yield waiting_for
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - belongs to the handler
            error = thrown
        try:
            waiting_for = coroutine.send(sent) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        except GeneratorExit as exit_:
            raise RuntimeError(RAISED_GENERATOR_EXIT) from exit_
