"""An executor whose threads do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonThreads(ThreadPoolExecutor):
    """Threads for handlers.

    The standard pool makes the interpreter wait for its threads at exit, so a handler that hangs
    would keep a worker from ever stopping. These end with the process. Only the type is that of the
    standard pool, since an event loop takes no other for asyncio.to_thread().
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in a thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the worker's threads were shut down")
            self._work.put((future, fn, args, kwargs))
            if not self._free.acquire(blocking=False) and len(self._started) < self._most:
                name = f"awa handler {len(self._started) + 1}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._started.append(thread)
                thread.start()
        return future

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - carried by the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del work, future, fn, args, kwargs
            self._free.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are idle."""
        with self._lock:
            self._is_shut = True
            for _ in self._started:
                self._work.put(None)
        if wait:
            for thread in self._started:
                thread.join()
