"""Maintenance in the background: one step of tick() per transaction, on its own connection."""

from __future__ import annotations

import asyncio
import random

import psycopg

from . import _calls
from ._session import AsyncSession, Backoff, Outage, SessionSettings, logger
from .errors import is_transient

PROMOTE_SECONDS = 0.25
ROUND_SECONDS = 1.0
# A promotion that moved this many probably left more.
MANY_ROWS = 100
# One round, in the order of tick(); due jobs have a rhythm of their own.
STEPS = (
    "verify",
    "publish_queue",
    "publish_claim",
    "plan_queue",
    "plan_claim",
    "refill",
    "rescue",
    "expire",
    "unique_keys",
    "instances",
    "hints",
    "evacuate",
    "prune_attempts",
    "prune_claim",
    "prune_queue",
    "prune_deferred",
)
# These read all receipts, instances or lanes, or a file, and nothing waits for them by the second.
RARE_STEPS = frozenset({"verify", "rescue", "expire", "unique_keys", "instances", "hints"})
ROUNDS_PER_RARE_STEP = 2
LAST_STEP_SECONDS = 2.0
# Far above what a step takes, which is bounded; whatever the limits of the role are.
STATEMENT_SECONDS = 60


class Maintenance:
    """Any number of workers may do this at once: each step takes its own lock or does nothing."""

    def __init__(self, settings: SessionSettings, schema: str, outage: Outage) -> None:
        self._session = AsyncSession(settings, "maintenance", statement_seconds=STATEMENT_SECONDS)
        self._schema = schema
        self._outage = outage
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failing: set[str] = set()

    def start(self) -> None:
        """Start the rounds."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="awa maintenance")

    async def close(self) -> None:
        """End after the step under way, but wait only a moment for it."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=LAST_STEP_SECONDS)
            # Nothing to do if it ended; else the server does not answer.
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._session.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        rounds = 0
        next_round = loop.time() + random.random() * ROUND_SECONDS
        while not self._stopping.is_set():
            try:
                promoted = await self._step("promote")
                if loop.time() >= next_round:
                    next_round = loop.time() + ROUND_SECONDS * (0.75 + random.random() / 2)
                    rounds += 1
                    for step in STEPS:
                        if self._stopping.is_set():
                            return
                        if step not in RARE_STEPS or rounds % ROUNDS_PER_RARE_STEP == 0:
                            await self._step(step)
                wait = (
                    0.0 if promoted >= MANY_ROWS else PROMOTE_SECONDS * (0.75 + random.random() / 2)
                )
                backoff.reset()
            except (psycopg.Error, OSError) as error:
                self._outage.report("maintenance", error)
                wait = backoff.next()
            await self._sleep(wait)

    async def _step(self, step: str) -> int:
        """Rows that the step moved; an error of one step does not keep the others from running."""
        call = _calls.tick(budget={"steps": [step]}, schema=self._schema)
        try:
            reports = await self._session.fetch(call.sql, call.params)
        except psycopg.Error as error:
            if is_transient(error):
                raise
            self._failed(step, str(error))
            return 0
        moved = 0
        for _, outcome, rows, _, detail in reports:
            if outcome == "failed":
                self._failed(step, detail[1:] if isinstance(detail, bytes) else detail)
            else:
                self._failing.discard(step)
            moved += rows or 0
        return moved

    def _failed(self, step: str, why: object) -> None:
        # It will fail again in a second.
        if step not in self._failing:
            self._failing.add(step)
            logger.error("maintenance step %s fails: %s", step, why)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
