"""When a failed attempt runs again: policies per kind, evaluated where the exception is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .outcomes import Outcome, Seconds, as_seconds

MAX_DELAY_SECONDS = 86_400.0
_MAX_EXPONENT = 64

# None leaves the delay to the database: the job's own backoff, or 2^attempt seconds.
Decision = Seconds | Outcome | None


class Policy(Protocol):
    """Decides about an exception of attempt number `attempt` (the first is 1)."""

    def __call__(self, attempt: int, error: Exception, /) -> Decision:
        """The delay, an outcome such as Fail, or None for the database's own backoff."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """base_seconds * factor^(attempt - 1), capped, plus up to `jitter` of itself."""

    base_seconds: float = 2.0
    factor: float = 2.0
    cap_seconds: float = MAX_DELAY_SECONDS
    jitter: float = 0.25

    def __post_init__(self) -> None:
        as_seconds(self.base_seconds, "base_seconds")
        as_seconds(self.cap_seconds, "cap_seconds")
        if not 1 <= self.factor <= 1000:
            raise ValueError(f"factor must be between 1 and 1000, not {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, not {self.jitter}")

    def __call__(self, attempt: int, error: Exception, /) -> float:
        exponent = min(max(attempt - 1, 0), _MAX_EXPONENT)
        delay = min(self.base_seconds * self.factor**exponent, self.cap_seconds)
        # Jitter before the cap: the cap holds for what is sent.
        return min(delay * (1 + self.jitter * random.random()), self.cap_seconds)


@dataclass(frozen=True, slots=True, init=False)
class Fixed:
    """The given delays in order; the last one repeats."""

    delays: tuple[float, ...]

    def __init__(self, delays: Sequence[Seconds]) -> None:
        if not delays:
            raise ValueError("Fixed needs at least one delay")
        object.__setattr__(self, "delays", tuple(as_seconds(d, "Fixed") for d in delays))

    def __call__(self, attempt: int, error: Exception, /) -> float:
        return self.delays[min(max(attempt, 1), len(self.delays)) - 1]


Retry = Policy | Sequence[Seconds] | Callable[[int, Exception], Decision]


def as_policy(retry: Retry | None) -> Policy | None:
    """The policy for what a task was given."""
    if retry is None or callable(retry):
        return retry
    return Fixed(retry)
