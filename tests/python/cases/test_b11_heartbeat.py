"""Case b11: handlers that block the event loop, the interpreter, the pool, or the whole process.

Beats have a thread and a connection of their own, a second apart (docs/python.md says what that
bounds). What a handler sees of a lost lease while it runs is in test_worker.py
(test_a_rescued_attempt_learns_that_its_lease_is_lost).
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psycopg
import pytest

import awa
from conftest import Database
from engine import set_settings, value
from test_worker_process import client, marks, process, until  # noqa: F401 - a fixture

THREADS = 16
# Staleness, heartbeat_seconds, and how long handlers block.
SHORT = (2.0, 1.0, 4.5)
FULL = (6.0, 2.0, 20.0)


def events(conn: psycopg.Connection, job_id: int) -> set[tuple[str, int]]:
    rows = conn.execute("SELECT event, attempt FROM marks WHERE job_id = %s", [job_id])
    return set(rows.fetchall())


# Broken by beats from the event loop, and by beats over the connection that finishes jobs.
@pytest.mark.parametrize("times", [SHORT, pytest.param(FULL, marks=pytest.mark.long)])
def test_b11_a_handler_that_blocks_its_process_keeps_its_lease(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
    times: tuple[float, float, float],
) -> None:
    staleness, heartbeat, seconds = times
    set_settings(conn, staleness_seconds=staleness, heartbeat_seconds=heartbeat)
    counts = {"block_the_loop": 1, "compute": THREADS, "take_the_pool": 1}
    jobs = {
        job_id: kind
        for kind, count in counts.items()
        for job_id in client.insert_many(kind, [{"seconds": seconds}] * count, queue=kind)
    }
    # Claimed with the first ones, they wait in a process that is blocked.
    others = client.insert_many("quick", [{}] * 20, queue="block_the_loop")
    with contextlib.ExitStack() as stack:
        for kind, count in counts.items():
            queues = {kind: count + (20 if kind == "block_the_loop" else 0)}
            stack.enter_context(process(database, queues=queues))
        stack.enter_context(process(database, queues={"nothing": 1}))  # somebody to rescue them
        until(lambda: len(marks(conn, "end")) == len(jobs) + 20, 60)
    assert marks(conn, "start") == sorted((job_id, 1) for job_id in jobs)
    assert marks(conn, "end") == sorted((job_id, 1) for job_id in [*jobs, *others])
    rescued = "SELECT count(*) FROM awa.lease_claim_closures WHERE outcome = 'rescued'"
    assert value(conn, rescued) == 0
    assert {client.job(job_id).state for job_id in jobs} <= {"completed", "running"}


# Here nothing can beat. Broken by a worker that stops when it finds an attempt lost, by a finish
# that is taken for good, and by a flag that only the next beat sets.
def test_b11_a_process_that_could_not_beat_learns_it_and_goes_on(
    database: Database,
    client: awa.Client,  # noqa: F811
    conn: psycopg.Connection,
    tmp_path: Path,
) -> None:
    set_settings(conn, staleness_seconds=2, heartbeat_seconds=0.5)
    kinds = ("hold_the_gil", "wait_for_file")
    again = tmp_path / "again"
    backoff = {"backoff": {"delays": [0]}}
    jobs = {
        kind: client.insert_job(kind, {"until": str(again)}, queue=kind, opts=backoff).job_id
        for kind in kinds
    }
    with contextlib.ExitStack() as stack:
        workers = {
            kind: stack.enter_context(process(database, queues={kind: 1, "after": 1}))
            for kind in kinds
        }
        until(lambda: len(marks(conn, "start")) == 2)
        workers["wait_for_file"].send_signal(signal.SIGSTOP)
        # Another one gets the jobs, and finishes them.
        with process(database, queues=dict.fromkeys(kinds, 1)):
            until(lambda: all(client.job(j).state == "completed" for j in jobs.values()), 40)
        again.touch()
        workers["wait_for_file"].send_signal(signal.SIGCONT)
        until(lambda: all((job_id, 1) in marks(conn, "end") for job_id in jobs.values()), 40)
        for job_id in jobs.values():
            assert {("not current", 1), ("lease lost", 1)} <= events(conn, job_id)
        # Both of them go on.
        after = client.insert_many("async_sleep", [{"seconds": 0.5}] * 2, queue="after")
        until(lambda: all(client.job(job_id).state == "completed" for job_id in after))
        assert [worker.poll() for worker in workers.values()] == [None, None]
        for worker in workers.values():
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0
    for job_id in jobs.values():
        info = client.job(job_id)
        assert (info.state, info.attempt, info.run_lease) == ("completed", 2, 2)
        # It may have been stopped before its first heartbeat.
        [entry] = info.errors
        assert entry["error"] in (
            "heartbeat stale: worker presumed dead",
            "no heartbeat since the claim: worker presumed dead",
        )
