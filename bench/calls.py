"""The hot SQL calls, made on one connection, each a transaction of its own."""

from __future__ import annotations

import uuid
from typing import Any, LiteralString

from bench.cluster import Connection
from bench.jobs import KIND, QUEUE, args_text

# One column of one row: cheaper than a function in FROM, whose rows are stored first.
INSERT_JOB = "SELECT (awa.insert_job(kind => %s, args => %s::jsonb)).job_id"
INSERT_MANY = "SELECT count(*) FROM awa.insert_many(kind => %s, args => %s::jsonb[])"
CLAIM = """
    SELECT claim_slot, batch_id, position
    FROM awa.claim_ready_runtime(queue => %s, max_batch => %s, instance_id => %s)
"""
COMPLETE = """
    SELECT count(*) FILTER (WHERE result = 'done')
    FROM awa.complete_jobs(instance_id => %s, claim_slot => %s, batch_id => %s, positions => %s)
"""
CLAIM_STATUS = "SELECT reason FROM awa.claim_status(queue => %s, arm => true)"

Receipt = tuple[int, int, list[int]]


class Calls:
    """A producer and worker in one, without handlers."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._instance = uuid.uuid4()
        self._number = 0

    def enqueue(self, jobs: int) -> None:
        """Insert jobs by one call: insert_job for one, insert_many for more."""
        args = [args_text(self._number + i) for i in range(jobs)]
        self._number += jobs
        if jobs == 1:
            self._rows(INSERT_JOB, KIND, args[0])
        else:
            self._rows(INSERT_MANY, KIND, args)

    def claim(self, jobs: int, queue: str = QUEUE) -> Receipt:
        """Claim exactly so many jobs, which must come as one batch; the receipt."""
        rows = self._rows(CLAIM, queue, jobs, self._instance)
        if len(rows) != jobs or len({row[:2] for row in rows}) != 1:
            raise RuntimeError(f"{len(rows)} jobs claimed instead of one batch of {jobs}")
        return rows[0][0], rows[0][1], [position for _, _, position in rows]

    def run_some(self, jobs: int, queue: str = QUEUE) -> int:
        """Claim and complete what there is, up to so many jobs; how many."""
        rows = self._rows(CLAIM, queue, jobs, self._instance)
        batches: dict[tuple[int, int], list[int]] = {}
        for slot, batch, position in rows:
            batches.setdefault((slot, batch), []).append(position)
        for (slot, batch), positions in batches.items():
            self.complete((slot, batch, positions))
        return len(rows)

    def claim_nothing(self, queue: str) -> None:
        """Claim from a queue without jobs."""
        if self._rows(CLAIM, queue, 100, self._instance):
            raise RuntimeError(f"queue {queue} is not empty")

    def claim_status(self, queue: str) -> None:
        """Ask why nothing was claimed, with the doorbell armed."""
        self._rows(CLAIM_STATUS, queue)

    def complete(self, receipt: Receipt) -> None:
        """Complete all jobs of a claim."""
        ((done,),) = self._rows(COMPLETE, self._instance, *receipt)
        if done != len(receipt[2]):
            raise RuntimeError(f"{done} of {len(receipt[2])} jobs completed")

    def _rows(self, statement: LiteralString, *params: object) -> list[Any]:
        return self._conn.execute(statement, params).fetchall()
