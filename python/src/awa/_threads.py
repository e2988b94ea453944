"""An executor whose threads do not keep the process alive."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonThreads(ThreadPoolExecutor):
    """Threads for handlers.

    The standard pool makes the interpreter wait for its threads at exit, so a handler that hangs
    would keep a worker from ever stopping. These end with the process. Nor do these keep calls that
    were cancelled while they waited for a thread: where threads hang and handlers time out, that
    would be all that is ever called. A call that hangs can be lost, and another thread takes the
    place of its own; as many as there are threads. Only the type is that of the standard pool,
    since an event loop takes no other for asyncio.to_thread().
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: OrderedDict[Future[Any], _Call] = OrderedDict()
        # One token per call, and one per thread at the end.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._lost: set[Future[Any]] = set()
        self._free = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call in a thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the worker's threads were shut down")
            self._calls[future] = fn, args, kwargs
            self._tokens.put(None)
            if not self._free.acquire(blocking=False):
                self._start()
        future.add_done_callback(self._forget)
        return future

    def _start(self) -> None:
        if len(self._started) < self._most + len(self._lost):
            name = f"awa handler {len(self._started) + 1}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._started.append(thread)
            thread.start()

    def lose(self, future: Future[Any]) -> bool:
        """Have another thread in place of the one that runs this call; whether that could be."""
        with self._lock:
            if not future.running() or len(self._lost) == self._most:
                return False
            self._lost.add(future)
            if self._calls:
                self._start()
            return True

    @property
    def lost(self) -> int:
        """How many of the calls that were lost still run."""
        return len(self._lost)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            if self._calls.pop(future, None) is not None:
                # Without a token left some thread is on its way, and finds nothing.
                with contextlib.suppress(Empty):
                    self._tokens.get_nowait()

    def _run(self) -> None:
        while True:
            self._tokens.get()
            with self._lock:
                if self._calls:
                    future, (fn, args, kwargs) = self._calls.popitem(last=False)
                elif self._is_shut:
                    return
                else:
                    self._free.release()
                    continue
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - carried by the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            with self._lock:
                self._lost.discard(future)
                if len(self._started) > self._most + len(self._lost):
                    self._started.remove(threading.current_thread())
                    return
            del future, fn, args, kwargs
            self._free.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they are idle."""
        with self._lock:
            self._is_shut = True
            for _ in self._started:
                self._tokens.put(None)
        if wait:
            for thread in list(self._started):
                thread.join()

    def ended(self, seconds: float) -> bool:
        """End the threads; whether all did in time."""
        self.shutdown(wait=False)
        deadline = time.monotonic() + seconds
        for thread in list(self._started):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._started)
