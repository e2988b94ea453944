"""Sends results to the database: everything that is pending in as few statements as possible."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg

from ._batches import Batch, Holds
from ._codec import dump_json
from ._results import failure, not_completed
from ._session import AsyncSession, Backoff, Outage
from ._statements import Statements, int_array
from .errors import InvalidArgument, LimitExceeded, is_transient
from .job import FINISHED, POSITION, Job
from .models import Json

logger = logging.getLogger("awa")

MAX_BATCHES = 64
MAX_ITEMS = 500
MAX_BYTES = 8 * 1024 * 1024
# More than any setting lets the database take; it would hold up other results to try.
MAX_ITEM_BYTES = 72 * 1024 * 1024
_BUSY_FIRST = 0.005
_BUSY_MOST = 0.25


class Item:
    """One attempt with an outcome other than plain success."""

    __slots__ = (
        "fallback",
        "is_check",
        "is_last_try",
        "is_outdated",
        "job",
        "outcome",
        "reconciles",
        "text",
        "tries",
    )

    def __init__(
        self,
        job: Job,
        outcome: dict[str, Json],
        *,
        is_check: bool = False,
        is_last_try: bool = False,
        fallback: dict[str, Json] | None = None,
    ) -> None:
        self.job = job
        self.text = outcome_json(job, outcome)
        self.outcome = outcome
        # What to send when the outcome is refused; by default a failure.
        self.fallback = fallback
        # Of a kind that completes itself: ask what became of the attempt first, and send the
        # outcome only if it is still open.
        self.reconciles = self.is_check = is_check
        # Was open when asked, and closed when the outcome was sent.
        self.is_outdated = False
        # The failure that stands for a refused outcome.
        self.is_last_try = is_last_try
        self.tries = 0


def outcome_json(job: Job, outcome: dict[str, Json]) -> str:
    """The finish_jobs item of an outcome."""
    job_id, run_lease, claim_slot, batch_id, position = job.token
    return dump_json(
        {
            "job_id": job_id,
            "run_lease": run_lease,
            "claim_slot": claim_slot,
            "batch_id": batch_id,
            "position": position,
            **outcome,
        },
        "outcome",
        MAX_ITEM_BYTES,
    )


class Finisher:
    """One flush at a time; what finishes meanwhile goes with the next one.

    Jobs stay in `holds` until the database answered, and answers that ask for another try are
    tried again for as long as it takes.
    """

    def __init__(
        self,
        session: AsyncSession,
        statements: Statements,
        holds: Holds,
        instance_id: UUID,
        outage: Outage,
        *,
        broken: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._statements = statements
        self._holds = holds
        self._instance_id = instance_id
        self._outage = outage
        self._broken = broken
        # Batches with plain successes, and everything else.
        self.dirty: list[Batch] = []
        self._items: deque[Item] = deque()
        self._sleeper: asyncio.Future[None] | None = None
        self._flushing = 0
        self._delayed = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        # How the attempts of kinds that complete themselves turned out: committed, rolled_back,
        # taken_away; and how often the answer was in_doubt at first, their transaction being open.
        self.reconciled: Counter[str] = Counter()

    def start(self) -> None:
        """Start flushing."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="awa finisher")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    # What handlers report. The hot path in the dispatcher does the same as `complete`, inlined.

    def complete(self, job: Job) -> None:
        """A plain success."""
        batch = job._batch
        if not batch.done:
            self.dirty.append(batch)
        batch.done.append(job._row[POSITION])
        self.wake()

    def put(
        self,
        job: Job,
        outcome: dict[str, Json],
        *,
        check: bool = False,
        fallback: dict[str, Json] | None = None,
    ) -> None:
        """Any other outcome; with check only if the attempt turns out to be still open.

        If the outcome is refused, the fallback is sent, or else a failure.
        """
        job._state = FINISHED
        try:
            item = Item(job, outcome, is_check=check, fallback=fallback)
        except (InvalidArgument, LimitExceeded) as error:
            logger.error("the outcome of %r was refused: %s", job, error)
            outcome = fallback or failure(str(error), "invalid_outcome")
            item = Item(job, outcome, is_check=check)
        self._items.append(item)
        self.wake()

    def drop(self, job: Job) -> None:
        """Nothing to tell: the database closed the attempt already."""
        job._state = FINISHED
        self._holds.drop(job._batch, [job._row[POSITION]])

    def wake(self) -> None:
        """Start a flush unless one is under way."""
        sleeper = self._sleeper
        if sleeper is not None:
            self._sleeper = None
            if not sleeper.done():
                sleeper.set_result(None)

    @property
    def backlog(self) -> int:
        """Results that were not answered yet."""
        pending = sum(len(batch.done) for batch in self.dirty)
        return pending + len(self._items) + self._flushing + self._delayed

    async def close(self, timeout: float) -> bool:
        """Send what is left; false when the database did not take it in time."""
        self._closing = True
        self.wake()
        if self._task is None:
            return True
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if done:
            return self.backlog == 0
        self._task.cancel()
        await asyncio.wait([self._task])
        return False

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.dirty and not self._items:
                if self._closing and not self._delayed:
                    return
                self._sleeper = loop.create_future()
                await self._sleeper
                continue
            if self.dirty:
                await self._flush_completions()
            if self._items:
                await self._flush_items()

    # Plain successes

    async def _flush_completions(self) -> None:
        batches = self.dirty[:MAX_BATCHES]
        del self.dirty[:MAX_BATCHES]
        # Ascending, as the database locks them.
        batches.sort(key=lambda batch: (batch.claim_slot, batch.batch_id))
        work = [(batch, batch.done) for batch in batches]
        for batch in batches:
            batch.done = []
        self._flushing = sum(len(positions) for _, positions in work)
        try:
            await self._complete(work)
        finally:
            self._flushing = 0

    async def _complete(self, work: list[tuple[Batch, list[int]]]) -> None:
        backoff = Backoff()
        while True:
            try:
                rows = await self._send_completions(work)
                break
            except psycopg.Error as error:
                if not is_transient(error):
                    if len(work) > 1:
                        middle = len(work) // 2
                        await self._complete(work[:middle])
                        await self._complete(work[middle:])
                        return
                    logger.error("completing jobs failed, will be tried again: %s", error)
                    self._complete_later(*work[0])
                    return
                self._outage.report("completing jobs", error)
            await asyncio.sleep(backoff.next())
        if not rows:
            for batch, positions in work:
                batch.tries = 0
                self._holds.drop(batch, positions)
            return
        self._sort_answers(work, rows)

    async def _send_completions(self, work: list[tuple[Batch, list[int]]]) -> list[tuple[Any, ...]]:
        if len(work) == 1:
            batch, positions = work[0]
            return await self._session.fetch(
                self._statements.complete_one,
                (self._instance_id, batch.claim_slot, batch.batch_id, int_array(positions)),
            )
        first: list[int] = []
        last: list[int] = []
        everything: list[int] = []
        for _, positions in work:
            first.append(len(everything) + 1)
            everything += positions
            last.append(len(everything))
        return await self._session.fetch(
            self._statements.complete,
            (
                int_array([batch.claim_slot for batch, _ in work]),
                int_array([batch.batch_id for batch, _ in work]),
                int_array(first),
                int_array(last),
                self._instance_id,
                int_array(everything),
            ),
        )

    def _sort_answers(
        self, work: list[tuple[Batch, list[int]]], rows: list[tuple[Any, ...]]
    ) -> None:
        answers = {number: (result, reason) for number, result, reason in rows}
        number = -1
        for batch, positions in work:
            settled = []
            busy = []
            for position in positions:
                number += 1
                job = batch.open[position]
                result, reason = answers.get(number, ("done", None))
                if result == "busy":
                    busy.append(position)
                elif result == "invalid":
                    self._refused(job, reason)
                else:
                    settled.append(position)
                    if result == "stale":
                        self._lost(job)
            self._holds.drop(batch, settled)
            if busy:
                self._complete_later(batch, busy)
            else:
                batch.tries = 0

    def _complete_later(self, batch: Batch, positions: list[int]) -> None:
        def again() -> None:
            self._delayed -= len(positions)
            if not batch.done:
                self.dirty.append(batch)
            batch.done += positions
            self.wake()

        self._delayed += len(positions)
        asyncio.get_running_loop().call_later(_busy_delay(batch.tries), again)
        batch.tries += 1

    # Other outcomes

    async def _flush_items(self) -> None:
        items: list[Item] = []
        batches: set[Batch] = set()
        size = 0
        while self._items and len(items) < MAX_ITEMS and size < MAX_BYTES:
            item = self._items[0]
            batch = item.job._batch
            if batch not in batches and len(batches) == MAX_BATCHES:
                break
            size += len(item.text)
            if items and size > MAX_BYTES:
                break
            batches.add(batch)
            items.append(self._items.popleft())
        self._flushing = len(items)
        try:
            checks = [item for item in items if item.is_check]
            if checks:
                items = [item for item in items if not item.is_check]
                items += await self._check(checks)
            if items:
                await self._finish(items)
        finally:
            self._flushing = 0

    async def _check(self, items: list[Item]) -> list[Item]:
        columns = [list(column) for column in zip(*(i.job.token for i in items), strict=True)]
        params = [int_array(column) for column in columns]
        backoff = Backoff()
        while True:
            try:
                rows = await self._session.fetch(self._statements.attempt_status, params)
                break
            except psycopg.Error as error:
                self._outage.report("asking what became of attempts", error)
                if not is_transient(error):
                    for item in items:
                        self._item_later(item)
                    return []
            await asyncio.sleep(backoff.next())
        still_open = []
        for item, (status,) in zip(items, rows, strict=True):
            if status == "open":
                # Or so it looks: the transaction that closes it may be about to commit. It holds
                # the lock of the batch, so what is sent now finds that out.
                item.is_check = False
                still_open.append(item)
            else:
                self._closed_itself(item, status)
        return still_open

    def _closed_itself(self, item: Item, status: str) -> None:
        if status == "completed":
            self.reconciled["committed"] += 1
            if item.outcome != not_completed():
                logger.warning(
                    "%r completed itself; what its handler reported afterwards is dropped: %s",
                    item.job,
                    item.outcome["outcome"],
                )
        else:
            self.reconciled["taken_away"] += 1
            self._lost(item.job)
        self.drop(item.job)

    async def _finish(self, items: list[Item]) -> None:
        backoff = Backoff()
        while True:
            text = "[" + ",".join(item.text for item in items) + "]"
            try:
                rows = await self._session.fetch(self._statements.finish, (self._instance_id, text))
                break
            except psycopg.Error as error:
                if not is_transient(error):
                    if len(items) > 1:
                        middle = len(items) // 2
                        await self._finish(items[:middle])
                        await self._finish(items[middle:])
                        return
                    logger.error("finishing %r failed: %s", items[0].job, error)
                    if (error.sqlstate or "")[:2] in ("22", "23", "54"):
                        self._refused(items[0].job, str(error), items[0])
                    else:
                        self._item_later(items[0])
                    return
                self._outage.report("finishing jobs", error)
            await asyncio.sleep(backoff.next())
        for item, row in zip(items, rows, strict=True):
            self._answered(item, row[2], row[3])

    def _answered(self, item: Item, result: str, reason: str | None) -> None:
        if item.reconciles and not item.is_outdated and result != "invalid":
            if result == "done":
                self.reconciled["rolled_back"] += 1
                self.drop(item.job)
                return
            self.reconciled["in_doubt"] += 1
            item.is_outdated = result != "busy"
            item.is_check = True
            self._item_later(item)
        elif result == "busy":
            self._item_later(item)
        elif result == "invalid":
            self._refused(item.job, reason, item)
        else:
            if result == "stale":
                self._lost(item.job)
            self.drop(item.job)

    def _item_later(self, item: Item) -> None:
        def again() -> None:
            self._delayed -= 1
            self._items.append(item)
            self.wake()

        self._delayed += 1
        asyncio.get_running_loop().call_later(_busy_delay(item.tries), again)
        item.tries += 1

    def _refused(self, job: Job, reason: str | None, item: Item | None = None) -> None:
        logger.error("the outcome of %r was refused: %s", job, reason)
        if item is not None and item.is_last_try:
            # Even the plain failure was refused: the rescue is what is left.
            self.drop(job)
            return
        if item is not None and item.fallback is not None:
            self._items.append(Item(job, item.fallback))
            return
        outcome = failure(f"outcome refused: {reason}", "invalid_outcome")
        self._items.append(Item(job, outcome, is_last_try=True))

    def _lost(self, job: Job) -> None:
        if job._cancelled:
            logger.info("%r was cancelled, its result is dropped", job)
            return
        job.lease_lost = True
        logger.warning("%r was taken away before it finished, its result is dropped", job)


def _busy_delay(tries: int) -> float:
    return Backoff(min(_BUSY_FIRST * 2.0 ** min(tries, 30), _BUSY_MOST), _BUSY_MOST).next()
