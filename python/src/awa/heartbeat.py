"""The heartbeat: a thread with its own connection, so that no handler can starve it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ._batches import Holds
from ._pooler import PREPARED_ELSEWHERE
from ._session import Backoff, Outage, SessionSettings, connect_blocking, logger
from .client import Client
from .errors import NotFound
from .job import FINISHED, Job
from .models import HeartbeatResult, Json

if TYPE_CHECKING:
    from psycopg import Connection

# The database writes the instance's row only every few seconds; the call itself is cheap, and
# cancellations are learnt by it.
INTERVAL_SECONDS = 1.0


class Heartbeat:
    """Tells the database every second what this process holds, and jobs what it answers."""

    def __init__(
        self,
        settings: SessionSettings,
        schema: str,
        instance_id: UUID,
        info: dict[str, Json],
        holds: Holds,
        outage: Outage,
        *,
        closed: Callable[[Job], None],
        drain: Callable[[], None],
        drained: Callable[[frozenset[str]], None],
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._settings = settings
        self._schema = schema
        self._instance_id = instance_id
        self._info = info
        self._holds = holds
        self._outage = outage
        self._closed = closed
        self._drain = drain
        self._drained = drained
        self._interval = interval
        self._wake = threading.Event()
        self._is_stopping = False
        self._lingering: dict[Job, Callable[[Job, Future[Any]], dict[str, Json]]] = {}
        self._conn: Connection[Any] | None = None
        self._last_beat = -1e9
        self._thread = threading.Thread(target=self._run, name="awa heartbeat", daemon=True)

    def start(self) -> None:
        """Start beating."""
        self._thread.start()

    def now(self) -> None:
        """Beat at once: some attempt was cancelled."""
        self._wake.set()

    @property
    def is_connected(self) -> bool:
        """Whether the last beat found its connection good."""
        return self._conn is not None

    @property
    def age(self) -> float:
        """Seconds since the last beat that the database took."""
        return time.monotonic() - self._last_beat

    def stop(self) -> None:
        """Beat once more and end; may be called from the event loop, does not wait."""
        self._is_stopping = True
        self._wake.set()

    async def ended(self, seconds: float) -> None:
        """Wait for the end of the thread, without another one: handlers may have them all."""
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.01)

    def linger(
        self, jobs: list[Job], outcome: Callable[[Job, Future[Any]], dict[str, Json]]
    ) -> None:
        """Hold on to attempts whose threads cannot be stopped, and finish them when they end.

        Without their lease another worker would start them while they still run. The thread dies
        with the process.
        """
        self._lingering.update(dict.fromkeys(jobs, outcome))

    def _run(self) -> None:
        backoff = Backoff()
        while True:
            wait = self._interval * (0.9 + random.random() / 10)
            try:
                if self._conn is None:
                    self._conn = connect_blocking(self._settings, "heartbeat")
                self._finish_lingering(Client(self._conn, schema=self._schema))
                self._beat(Client(self._conn, schema=self._schema))
                if not self._conn.autocommit:
                    self._conn.commit()
            except Exception as error:  # noqa: BLE001 - the thread must go on
                if isinstance(error, PREPARED_ELSEWHERE):
                    self._settings.preparing.stop(error)
                self._outage.report("heartbeat", error)
                self._disconnect()
                wait = backoff.next()
            else:
                backoff.reset()
                self._last_beat = time.monotonic()
            if self._is_stopping and not self._lingering:
                break
            self._wake.wait(wait)
            self._wake.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _beat(self, client: Client) -> None:
        holds = self._holds.snapshot()
        try:
            answer = client.heartbeat(self._instance_id, holds=holds)
        except NotFound:
            # Removed as dead, or the database was restored from a backup.
            logger.warning("this worker is unknown to the database, registering again")
            client.register_instance(self._instance_id, info=self._info)
            answer = client.heartbeat(self._instance_id, holds=holds)
        self._tell(answer)

    def _tell(self, answer: HeartbeatResult) -> None:
        for closed in answer.cancelled or ():
            batch = self._holds.batches.get((closed["claim_slot"], closed["batch_id"]))
            job = batch.open.get(closed["position"]) if batch is not None else None
            # A finish of our own may be on its way, its answer decides. So may the handler's own
            # completion, whose commit it has not seen yet.
            outcome = closed["outcome"]
            if job is None or job._state == FINISHED or outcome == "completed":
                continue
            if job._cancelled or job.lease_lost:
                continue
            if outcome == "cancelled":
                job._cancelled = True
                logger.info("%r was cancelled", job)
            else:
                job.lease_lost = True
                logger.warning("%r lost its lease: %s", job, outcome)
            self._closed(job)
        self._drained(frozenset(answer.drained_queues))
        if answer.drain:
            self._drain()

    def _finish_lingering(self, client: Client) -> None:
        for job, outcome in list(self._lingering.items()):
            future = job._future
            if future is not None and not future.done():
                continue
            if future is not None and not (job._cancelled or job.lease_lost):
                token = dict(
                    zip(
                        ("job_id", "run_lease", "claim_slot", "batch_id", "position"),
                        job.token,
                        strict=True,
                    )
                )
                item = {**token, **outcome(job, future)}
                (answer,) = client.finish_jobs(self._instance_id, [item])
                if answer.result == "busy":
                    continue
            self._holds.drop(job._batch, [job.token[4]])
            del self._lingering[job]
