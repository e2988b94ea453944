"""A worker in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

READY_SECONDS = 30
STOP_SECONDS = 30


class Child:
    """Runs `target(pipe, *arguments)` in a fresh interpreter; `with` waits until it said ready.

    The child's first message means ready; the context then belongs to the two of them. At the
    end the pipe is closed, on which the child returns.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, self._far_end = context.Pipe()
        self._process = context.Process(
            target=target, args=(self._far_end, *arguments), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        self._far_end.close()
        self.receive(READY_SECONDS)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.pipe.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """End it without warning."""
        self._process.kill()
        self._process.join()

    def receive(self, seconds: float) -> Any:
        """The child's next message."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"the worker said nothing for {seconds} s")
        return self.pipe.recv()


def wait_for_end(pipe: Connection) -> None:
    """Block until the parent closes its end, whether it read everything or not."""
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()
