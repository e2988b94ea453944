"""What every system under test can be asked to do, as lines of JSON on stdin and stdout.

It runs in the environment of the system, so it needs nothing but the standard library. A request
is an object whose `do` names one of the methods of `Service`, the other keys being its arguments;
the answer is `{"ok": ...}`, or `{"error": ...}`. protocol.mjs is the same for Node.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from bench.jobs import args_text

Args = dict[str, Any]
Handler = Callable[[Any], Awaitable[None]]

POOL = 1_000  # different jobs that a producer makes before it is timed
SETTLE_POLL_SECONDS = 0.005
WARM_UP_JOBS = 20

now = time.monotonic_ns  # one clock for all processes of the machine


class Adapter(ABC):
    """One system: its schema, a producer on one connection, and a worker."""

    name: ClassVar[str]

    @abstractmethod
    def settings(self) -> dict[str, str | int | float]:
        """The version, and the settings of the worker that differ from the defaults."""

    @abstractmethod
    async def install(self, dsn: str) -> None:
        """Make the system's schema in an empty database."""

    @abstractmethod
    async def connect(self, dsn: str) -> None:
        """Open the producer's connection."""

    @abstractmethod
    async def insert(self, jobs: Sequence[Args]) -> None:
        """Enqueue by one call and commit: one job, or many in the fastest documented way."""

    @abstractmethod
    async def start(self, dsn: str, handler: Handler, concurrency: int) -> None:
        """Start a worker that runs `handler` for each job; 0 stands for the best concurrency."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop the worker in order, so that no result is lost; nothing when there is none."""

    @abstractmethod
    def args(self, job: Any) -> Args:
        """The arguments of a job that the handler was given."""

    def attempt(self, job: Any) -> int:
        """The number of the attempt, from 1."""
        return 1

    def claim_times(self) -> list[float]:
        """Milliseconds of each claim that found jobs since the last call, where that is known."""
        return []

    async def settle(self) -> None:
        """Return when the results of all jobs whose handlers ended are committed."""
        await self.stop()

    async def backlog(self, jobs: Sequence[Args]) -> None:
        """Enqueue jobs into a second queue that no worker may run."""
        raise NotImplementedError(f"{self.name} has no second queue here")


class Service:
    """Serves the requests of one process."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._made = 0
        self._handled = 0
        self._expected = 0
        self._last = 0
        self._began: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._all_done = asyncio.Event()
        self._let_go = asyncio.Event()

    # Producer

    async def settings(self) -> dict[str, str | int | float]:
        """What is recorded with each figure."""
        return self._adapter.settings()

    async def install(self, dsn: str) -> None:
        """Make the schema."""
        await self._adapter.install(dsn)

    async def connect(self, dsn: str) -> None:
        """Become a producer."""
        await self._adapter.connect(dsn)

    async def load(self, jobs: int, batch: int) -> dict[str, int]:
        """Enqueue so many jobs; when it began and ended."""
        pool = self._pool()
        first = now()
        for done in range(0, jobs, batch):
            await self._adapter.insert(slice_of(pool, done, min(batch, jobs - done)))
        return {"jobs": jobs, "first": first, "last": now()}

    async def produce(self, seconds: float, batch: int, at: int) -> dict[str, int]:
        """Enqueue from the moment `at` for so many seconds; how many, and when it ended."""
        pool = self._pool()
        await self._adapter.insert(slice_of(pool, 0, batch))
        sleep_until(at)
        jobs, first, end = 0, now(), at + int(seconds * 1e9)
        while now() < end:
            await self._adapter.insert(slice_of(pool, jobs, batch))
            jobs += batch
        return {"jobs": jobs, "first": first, "last": now()}

    async def steady(
        self, jobs: int, rate: float, batch: int = 1, fail_every: int = 0
    ) -> dict[str, int]:
        """Enqueue jobs that say when, at a constant rate; a producer that falls behind catches up.

        Every so many jobs one tells its handler to fail at the first attempt.
        """
        first = now()
        for done in range(0, jobs, batch):
            sleep_until(first + int(done / rate * 1e9))
            start = now()
            numbers = range(done, min(done + batch, jobs))
            fails = [bool(fail_every) and i % fail_every == 0 for i in numbers]
            await self._adapter.insert(
                [self._args(start=start, **({"fail": 1} if fail else {})) for fail in fails]
            )
        return {"jobs": jobs, "first": first, "last": now()}

    async def warm_up(self, rate: float) -> None:
        """Enqueue a few jobs that no figure counts."""
        await self.steady(WARM_UP_JOBS, rate)

    async def hold(self) -> None:
        """Enqueue a job that runs until the worker is stopped."""
        await self._adapter.insert([self._args(start=now(), hold=1)])

    async def backlog(self, jobs: int) -> None:
        """Fill the queue that nobody may run."""
        pool = self._pool()
        for done in range(0, jobs, POOL):
            await self._adapter.backlog(slice_of(pool, 0, min(POOL, jobs - done)))

    # Worker

    async def drain(
        self, dsn: str, jobs: int, concurrency: int = 0, wait_ms: float = 0
    ) -> dict[str, int]:
        """Run all jobs; from before the worker connects until every result is committed."""
        self._expect(jobs)
        first = now()
        await self._adapter.start(dsn, self._handler(wait_ms), concurrency)
        await self._all_done.wait()
        await self._adapter.settle()
        last = now()
        await self._adapter.stop()
        return {"jobs": self._handled, "first": first, "last": last}

    async def work(self, dsn: str, concurrency: int = 0, wait_ms: float = 0) -> None:
        """Start a worker that counts what it runs."""
        self._expect(0)
        await self._adapter.start(dsn, self._handler(wait_ms), concurrency)

    async def record(self, dsn: str, concurrency: int = 0) -> None:
        """Start a worker that remembers when each handler began."""
        self._expect(0)
        await self._adapter.start(dsn, self._recorder(), concurrency)

    async def handled(self) -> dict[str, int]:
        """How many jobs were run so far, and when the last of them."""
        return {"jobs": self._handled, "last": self._last}

    async def next_began(self) -> tuple[int, int]:
        """Wait for one job: when its enqueueing and its handler began."""
        return await self._began.get()

    async def all_began(self) -> list[tuple[int, int]]:
        """The same of all jobs since the last such call."""
        return [self._began.get_nowait() for _ in range(self._began.qsize())]

    async def claim_times(self) -> list[float]:
        """Milliseconds of each claim that found jobs since the last such call."""
        return self._adapter.claim_times()

    async def stop(self) -> dict[str, int]:
        """Stop the worker in order."""
        self._let_go.set()
        await self._adapter.stop()
        return await self.handled()

    # Handlers

    def _expect(self, jobs: int) -> None:
        self._handled, self._expected, self._last = 0, jobs, 0
        self._all_done.clear()
        self._let_go.clear()

    def _count(self) -> None:
        self._handled += 1
        if self._handled == self._expected:
            self._all_done.set()

    def _handler(self, wait_ms: float) -> Handler:
        async def noop(job: Any) -> None:
            self._count()

        async def wait(job: Any) -> None:
            await asyncio.sleep(wait_ms / 1e3)
            self._last = now()
            self._count()

        return wait if wait_ms else noop

    def _recorder(self) -> Handler:
        async def record(job: Any) -> None:
            at = now()
            args = self._adapter.args(job)
            is_repeated = "fail" in args and self._adapter.attempt(job) > 1
            if not is_repeated:
                self._began.put_nowait((args["start"], at))
            if "hold" in args:
                await self._let_go.wait()
            if "fail" in args and not is_repeated:
                raise RuntimeError("the first attempt of this job fails")
            self._count()

        return record

    def _args(self, **more: int) -> Args:
        self._made += 1
        value: Args = json.loads(args_text(self._made, **more))
        return value

    def _pool(self) -> list[Args]:
        return [self._args() for _ in range(POOL)]


def slice_of(pool: Sequence[Args], first: int, jobs: int) -> Sequence[Args]:
    """So many jobs of the pool, from any place on, the pool being a ring of batches."""
    start = first % POOL
    return pool[start : start + jobs] if start + jobs <= POOL else pool[:jobs]


def sleep_until(at: int) -> None:
    """Block, which is more exact than the event loop and stops nothing: a producer has no tasks."""
    time.sleep(max(0.0, (at - now()) / 1e9))


def serve(adapter: Adapter) -> None:
    """Answer requests until stdin ends; what the system prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    service = Service(adapter)

    async def loop() -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            try:
                answer = {"ok": await getattr(service, request.pop("do"))(**request)}
            except Exception as error:  # noqa: BLE001 - told to the one who asked
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
        await adapter.stop()

    asyncio.run(loop())


async def wait_until_empty(is_busy: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again whether unfinished jobs are left."""
    while await is_busy():  # noqa: ASYNC110 - the database is asked, there is no event
        await asyncio.sleep(SETTLE_POLL_SECONDS)
