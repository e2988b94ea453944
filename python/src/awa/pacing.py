"""Producers that wait while enough jobs wait already, so that a backlog stays short."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TypeVar

from ._calls import NO_ARGS
from .async_client import AsyncClient
from .client import Client
from .errors import Backpressure
from .models import InsertResult, Json

T = TypeVar("T")

_FIRST_PAUSE = 0.005
_PAUSE_GROWTH = 1.5
_LONGEST_PAUSE = 0.1
_PORTIONS = 8  # of the target: so many producers at once stay below twice the target


class _Pace:
    """What both producers share: the limit that the database checks, portions, and pauses."""

    def __init__(
        self,
        target: int,
        queue: str,
        priority: int,
        timeout: float | None,
        has_own_connection: bool,
    ) -> None:
        if target < 1:
            raise ValueError(f"target must be at least 1, not {target}")
        if has_own_connection:
            raise TypeError(
                "a paced producer needs a client over a DSN or a pool: "
                "a rejected insert would end the caller's transaction"
            )
        self.target = target
        self.queue = queue
        self.priority = priority
        self.timeout = timeout

    def _opts(self, opts: dict[str, Json] | None) -> dict[str, Json]:
        return {**(opts or {}), "backpressure": {"reject": self.target}}

    def _portions(self, args: Sequence[Json]) -> Iterator[Sequence[Json]]:
        size = max(1, self.target // _PORTIONS)
        return (args[start : start + size] for start in range(0, len(args), size))

    def _pauses(self) -> Iterator[float]:
        end = None if self.timeout is None else time.monotonic() + self.timeout
        pause = _FIRST_PAUSE
        while end is None or time.monotonic() < end:
            # Producers that were turned away together must not come back together.
            yield pause * random.uniform(0.5, 1)
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)


class PacedProducer(_Pace):
    """Enqueues into one queue and priority, and waits while `target` or more jobs wait there.

    The database counts what waits, other producers' jobs included, so any number of processes may
    pace themselves by the same target. After `timeout` seconds without room `Backpressure` is
    raised.
    """

    def __init__(
        self,
        client: Client,
        *,
        target: int,
        queue: str = "default",
        priority: int = 2,
        timeout: float | None = None,
    ) -> None:
        super().__init__(target, queue, priority, timeout, client.joins_a_transaction)
        self._client = client

    def insert_job(
        self,
        kind: str,
        args: Json = NO_ARGS,
        *,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: dict[str, Json] | None = None,
    ) -> InsertResult:
        """Enqueue one job as soon as there is room."""
        return self._when_there_is_room(
            lambda: self._client.insert_job(
                kind,
                args,
                queue=self.queue,
                priority=self.priority,
                max_attempts=max_attempts,
                run_at=run_at,
                opts=self._opts(opts),
            )
        )

    def insert_many(
        self,
        kind: str,
        args: Sequence[Json],
        *,
        max_attempts: int | None = None,
        opts: dict[str, Json] | None = None,
    ) -> list[int]:
        """Enqueue many jobs of one kind, in portions, each a transaction that waits for room."""
        ids: list[int] = []
        for portion in self._portions(args):
            ids += self._when_there_is_room(
                partial(
                    self._client.insert_many,
                    kind,
                    portion,
                    queue=self.queue,
                    priority=self.priority,
                    max_attempts=max_attempts,
                    opts=self._opts(opts),
                )
            )
        return ids

    def _when_there_is_room(self, insert: Callable[[], T]) -> T:
        pauses = self._pauses()
        while True:
            try:
                return insert()
            except Backpressure:
                pause = next(pauses, None)
                if pause is None:
                    raise
            time.sleep(pause)


class AsyncPacedProducer(_Pace):
    """The same for asyncio."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        target: int,
        queue: str = "default",
        priority: int = 2,
        timeout: float | None = None,
    ) -> None:
        super().__init__(target, queue, priority, timeout, client.joins_a_transaction)
        self._client = client

    async def insert_job(
        self,
        kind: str,
        args: Json = NO_ARGS,
        *,
        max_attempts: int | None = None,
        run_at: datetime | None = None,
        opts: dict[str, Json] | None = None,
    ) -> InsertResult:
        """Enqueue one job as soon as there is room."""
        return await self._when_there_is_room(
            lambda: self._client.insert_job(
                kind,
                args,
                queue=self.queue,
                priority=self.priority,
                max_attempts=max_attempts,
                run_at=run_at,
                opts=self._opts(opts),
            )
        )

    async def insert_many(
        self,
        kind: str,
        args: Sequence[Json],
        *,
        max_attempts: int | None = None,
        opts: dict[str, Json] | None = None,
    ) -> list[int]:
        """Enqueue many jobs of one kind, in portions, each a transaction that waits for room."""
        ids: list[int] = []
        for portion in self._portions(args):
            ids += await self._when_there_is_room(
                partial(
                    self._client.insert_many,
                    kind,
                    portion,
                    queue=self.queue,
                    priority=self.priority,
                    max_attempts=max_attempts,
                    opts=self._opts(opts),
                )
            )
        return ids

    async def _when_there_is_room(self, insert: Callable[[], Awaitable[T]]) -> T:
        pauses = self._pauses()
        while True:
            try:
                return await insert()
            except Backpressure:
                pause = next(pauses, None)
                if pause is None:
                    raise
            await asyncio.sleep(pause)
