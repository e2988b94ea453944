"""Case b13: workers of an old and of a new release beside each other.

The delays of a job that nobody knows, one by one, are in tests/sql/execution/finish_jobs.sql, what
`explain_job` says of it in explain_job.sql, and each way in which arguments do not fit in
test_worker.py (test_arguments_that_do_not_fit_fail_the_job_at_once). A mismatch fails the job
without a retry: that is the contract, so new arguments get a default before producers send them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter

import psycopg
import pytest

import awa
from conftest import Database
from engine import claim, counts, set_settings, value

NEW_JOBS = 100
GONE = uuid.UUID(int=31, version=4)


async def until(condition: object, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


def charged(conn: psycopg.Connection) -> Counter[tuple[str, int]]:
    rows = conn.execute("SELECT state, attempt FROM awa.jobs WHERE kind = 'y'")
    return Counter(rows.fetchall())


class Release:
    """A worker process of one release: what it knows, and what it has run."""

    def __init__(self, database: Database, *kinds: str) -> None:
        self.ran: Counter[str] = Counter()
        self.attempts: Counter[int] = Counter()
        self.worker = awa.Worker(database.dsn, dict.fromkeys(kinds, self.run), queues=20)

    async def run(self, job: awa.Job) -> None:
        self.ran[job.kind] += 1
        self.attempts[job.attempt] += 1
        await asyncio.sleep(0)


# Broken by handing back with a charge, and by an old worker that fails what it does not know.
def test_b13_an_old_worker_leaves_new_kinds_to_the_new_one(
    database: Database, conn: psycopg.Connection, client: awa.Client
) -> None:
    set_settings(conn, heartbeat_seconds=0.3)

    async def scenario() -> None:
        old, new = Release(database, "x"), Release(database, "x", "y")
        async with old.worker, new.worker:
            await until(
                lambda: value(conn, "SELECT count(*) FROM awa.instances WHERE is_live") == 2
            )
            client.insert_many("y", [{}] * NEW_JOBS)
            known = client.insert_many("x", [{}] * NEW_JOBS)
            # Some have died with the worker that ran them. The maintenance may be the old one's.
            client.insert_many("y", [{}] * 5, queue="side", opts={"backoff": {"delays": [0]}})
            assert len(claim(conn, "side", instance=GONE)) == 5
            conn.execute("SELECT awa.heartbeat(%s)", [GONE])
            conn.execute(
                "UPDATE awa.runtime_instances SET heartbeat_at = now() - interval '1 hour',"
                " suspect_at = now() - interval '1 hour' WHERE instance_id = %s",
                [GONE],
            )
            await until(lambda: new.ran["y"] == NEW_JOBS)
            await until(lambda: old.ran["x"] + new.ran["x"] == len(known))
            await until(lambda: counts(conn, "side") == {"available": 5})
        assert set(old.ran) <= {"x"}
        assert new.attempts == {1: new.ran.total()}

    asyncio.run(scenario())
    assert counts(conn) == {"completed": 2 * NEW_JOBS}
    closures = "SELECT count(*) FROM awa.lease_claim_closures WHERE outcome = %s"
    assert value(conn, closures, "failed") == value(conn, closures, "retried") == 0


# Broken by a release without a delay: the same jobs come round as fast as they can be claimed.
def test_b13_without_the_new_worker_they_wait_ever_longer_and_block_nobody(
    database: Database,
    conn: psycopg.Connection,
    client: awa.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "awa")
    seconds = 3

    async def scenario() -> None:
        old = Release(database, "x")
        async with old.worker:
            client.insert_many("y", [{}] * NEW_JOBS)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                [known] = client.insert_many("x", [{}])
                await until(lambda job_id=known: client.job(job_id).state == "completed", 2)
            await until(lambda: client.queue_counts("default").running == 0)

    asyncio.run(scenario())
    # Handed back after 1, 2, 4 ... seconds: twice or three times by now, and no attempt is gone.
    states = charged(conn)
    assert states.total() == NEW_JOBS
    assert {attempt for _, attempt in states} == {0}
    assert {state for state, _ in states} <= {"scheduled", "available"}
    released = "SELECT coalesce(sum(awa._cardinality(c.closed)), 0)"
    released += " FROM awa.lease_claim_closures c WHERE c.outcome = 'released'"
    assert NEW_JOBS <= value(conn, released) <= 3 * NEW_JOBS
    [job_id] = conn.execute("SELECT min(job_id) FROM awa.jobs WHERE kind = 'y'").fetchone() or ()
    assert client.explain_job(job_id).facts["releases"] in (1, 2, 3)
    # One line says it, not one for each job.
    said = [r for r in caplog.records if 'jobs of kind "y"' in r.getMessage()]
    assert len(said) == 1

    # With a new worker all of them run, and have their first attempt.
    async def rollout() -> None:
        conn.execute("UPDATE awa.deferred_jobs SET run_at = now()")
        new = Release(database, "x", "y")
        async with new.worker:
            await until(lambda: new.ran["y"] == NEW_JOBS)
        assert new.attempts == {1: NEW_JOBS}

    asyncio.run(rollout())


def test_b13_arguments_of_another_release_fail_one_attempt_with_a_clear_error(
    database: Database, conn: psycopg.Connection, client: awa.Client
) -> None:
    handlers = awa.Handlers()
    seen: list[tuple[int, str]] = []

    @handlers.task()
    async def x(n: int, name: str = "none") -> None:
        seen.append((n, name))

    cases = {
        client.insert_job("x", {"n": 1, "extra": True}).job_id: "extra: unexpected field",
        client.insert_job("x", {"name": "a"}).job_id: "n: missing field",
        client.insert_job("x", {"number": 1}).job_id: "",
    }
    fits = client.insert_job("x", {"n": 2}).job_id

    async def scenario() -> None:
        async with awa.Worker(database.dsn, handlers):
            await until(lambda: counts(conn) == {"completed": 1, "failed": 3})

    asyncio.run(scenario())
    assert seen == [(2, "none")]
    assert client.job(fits).state == "completed"
    for job_id, message in cases.items():
        info = client.job(job_id)
        assert (info.state, info.attempt) == ("failed", 1)
        [entry] = info.errors
        assert entry["error"].startswith("arguments do not fit: ")
        assert message in entry["error"]
    # Nothing is lost: once a release fits they run again.
    assert client.retry_job(next(iter(cases))).state == "available"
