"""What a handler may return or raise instead of a plain value."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from .models import Json

Seconds = float | timedelta


def as_seconds(value: Seconds, name: str) -> float:
    """A finite, non-negative number of seconds."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} takes seconds or a timedelta, not {type(value).__name__}")
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} takes a finite number of seconds of at least 0, not {seconds}")
    return float(seconds)


class Outcome(Exception):
    """Base of the outcomes: return one from a handler, or raise it."""

    name = ""

    def item(self) -> dict[str, Json]:
        """The outcome's keys in a finish_jobs item."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are made anew from their message, which is not what these take.
        return _remade, (type(self), self.args), self.__dict__


def _remade(cls: type[Outcome], args: tuple[Any, ...]) -> Outcome:
    return cls.__new__(cls, *args)


class RetryAfter(Outcome):
    """Run the job again after so many seconds; the attempt counts."""

    name = "retry"

    def __init__(self, seconds: Seconds, reason: str | None = None) -> None:
        self.seconds = as_seconds(seconds, "RetryAfter")
        self.reason = reason
        super().__init__(f"retry after {self.seconds} s" + (f": {reason}" if reason else ""))

    def item(self) -> dict[str, Json]:
        return {
            "outcome": "retry",
            "delay_seconds": self.seconds,
            "error": {"error": self.reason or "the handler asked for a retry"},
        }


class Snooze(Outcome):
    """Run the job again after so many seconds; the attempt does not count."""

    name = "snooze"

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = as_seconds(seconds, "Snooze")
        super().__init__(f"snooze for {self.seconds} s")

    def item(self) -> dict[str, Json]:
        return {"outcome": "snooze", "delay_seconds": self.seconds}


class Cancel(Outcome):
    """End the job as cancelled."""

    name = "cancel"

    def __init__(self, reason: str = "cancelled by handler") -> None:
        self.reason = reason
        super().__init__(reason)

    def item(self) -> dict[str, Json]:
        return {"outcome": "cancel", "reason": self.reason}


class Fail(Outcome):
    """End the job as failed, whatever attempts are left."""

    name = "fail"

    def __init__(self, reason: str = "failed by handler") -> None:
        self.reason = reason
        super().__init__(reason)

    def item(self) -> dict[str, Json]:
        return {"outcome": "fail", "reason": self.reason, "error": {"error": self.reason}}
