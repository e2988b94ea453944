"""Repeat until a signal says stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator


def rounds(every: float | None) -> Iterator[None]:
    """One round, or with `every` one in so many seconds until SIGTERM or SIGINT."""
    stop = threading.Event()
    if every is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    while True:
        yield
        if every is None or stop.wait(every):
            return
