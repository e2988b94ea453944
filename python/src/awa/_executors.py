"""Where def handlers run: the worker's threads, or any executor of `concurrent.futures`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import (
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from typing import Any, TypeAlias

from ._session import logger
from ._threads import DaemonThreads

# A function makes one, and makes it anew when it breaks.
ExecutorSource: TypeAlias = Executor | Callable[[], Executor]

KILL_SECONDS = 1.0


class NotStarted(Exception):
    """The executor did not take the call, and no other one can be had."""


class Pool:
    """One executor. What the worker made itself it also replaces, kills and shuts down."""

    def __init__(self, source: ExecutorSource) -> None:
        self._make = None if isinstance(source, Executor) else source
        self._executor = source if isinstance(source, Executor) else source()
        if not isinstance(self._executor, Executor):
            raise TypeError(
                f"executor takes a concurrent.futures.Executor or a function that makes one, not "
                f"{type(self._executor).__name__}"
            )

    @property
    def is_local(self) -> bool:
        """Whether calls run in this process, with its objects and context variables."""
        return isinstance(self._executor, ThreadPoolExecutor)

    def check(self, function: Callable[..., Any], kind: str) -> None:
        """Say now rather than with each job that a handler cannot be sent to a process."""
        if not isinstance(self._executor, ProcessPoolExecutor):
            return
        try:
            pickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f'"{kind}": the handler cannot be sent to another process: {error}; define it at '
                "the top level of a module"
            ) from error

    def submit(self, *call: Any) -> Future[Any]:
        """Hand a call to the executor, or to a new one if this one is broken."""
        try:
            return self._executor.submit(*call)
        except RuntimeError as error:  # broken, or shut down by somebody
            if self._make is None:
                raise NotStarted(str(error)) from error
            logger.warning("an executor is made anew: %s", error)
            self.close()
            self._executor = self._make()
            return self._executor.submit(*call)

    def kill(self) -> bool:
        """End running calls, if the worker made the processes that they run in."""
        executor = self._executor
        if self._make is None or not isinstance(executor, ProcessPoolExecutor):
            return False
        for process in list((executor._processes or {}).values()):
            process.kill()
            process.join(KILL_SECONDS)
        return True

    def lose(self, call: Future[Any]) -> bool:
        """Have room for another call in place of one that hangs; only the worker's threads can."""
        return isinstance(self._executor, DaemonThreads) and self._executor.lose(call)

    @property
    def lost(self) -> int:
        """How many calls were lost and still run."""
        return self._executor.lost if isinstance(self._executor, DaemonThreads) else 0

    def close(self) -> None:
        """Shut the executor down, if the worker made it."""
        if self._make is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class Executors:
    """The executors of a worker, one for each source that it or a handler names."""

    def __init__(self, default: ExecutorSource | None, threads: int) -> None:
        self._default = default or (lambda: DaemonThreads(threads))
        self._pools: dict[int, tuple[ExecutorSource, Pool]] = {}

    def get(self, source: ExecutorSource | None) -> Pool:
        """The pool of a source; without one, the worker's."""
        source = source or self._default
        if id(source) not in self._pools:
            self._pools[id(source)] = source, Pool(source)
        return self._pools[id(source)][1]

    @property
    def lost(self) -> int:
        """How many threads of handlers that outlived their deadline still run."""
        return sum(pool.lost for _, pool in self._pools.values())

    def close(self) -> None:
        """Shut down what the worker made."""
        for _, pool in self._pools.values():
            pool.close()


def call_handler(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a thread runs."""
    try:
        return function(*args, **kwargs)
    except (StopIteration, GeneratorExit, KeyboardInterrupt) as error:
        # A future cannot carry the first, the others would end whoever waits for it: Ctrl-C also
        # interrupts the processes of a pool.
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error


def call_elsewhere(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What another process runs; at module level, so that it can be imported there."""
    # What cannot be read again, result or exception, would break the whole pool.
    try:
        result = call_handler(function, args, kwargs)
        if result is not None:
            pickle.loads(pickle.dumps(result))
        return result
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - the exception's own code
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
