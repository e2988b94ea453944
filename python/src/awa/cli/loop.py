"""Repeat until a signal says stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator


def rounds(every: float | None) -> Iterator[None]:
    """One round, or with `every` one in so many seconds until SIGTERM or SIGINT.

    A second signal ends the process in the middle of a round: the server may not answer.
    """
    stop = threading.Event()

    def received(number: int, frame: object) -> None:
        stop.set()
        # Not what was there before: a shell starts its background jobs with SIGINT ignored.
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

    if every is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, received)
    while True:
        yield
        if every is None or stop.wait(every):
            return
