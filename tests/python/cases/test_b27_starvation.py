"""Case b27: what waits comes to run, whatever arrives or hangs beside it.

Shown elsewhere: one job of low priority among as many of the highest as can be claimed
(test_g4_a_low_priority_job_starts_within_three_aging_steps in test_guarantees.py); before its first
step a job keeps its priority (claim_ready.sql); a job that commits late comes first in its lane
(test_g4_claims_follow_the_lane_and_a_late_job_comes_first).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime

import psycopg
import pytest

import awa
from conftest import Database
from engine import (
    Attempt,
    claim,
    claim_all,
    complete,
    counts,
    finish,
    insert,
    insert_many,
    prune_all,
    rotate,
    set_settings,
    tick,
    value,
)


def insert_first_priority(conn: psycopg.Connection, count: int) -> None:
    conn.execute(
        "SELECT awa.insert_many('high', array_fill('{}'::jsonb, ARRAY[%s]), priority => 1)", [count]
    )


def run_times(conn: psycopg.Connection, attempts: list[Attempt]) -> list[datetime]:
    rows = conn.execute(
        "SELECT j.run_at FROM unnest(%s::bigint[]) WITH ORDINALITY i (id, o), awa.job(i.id) j"
        " ORDER BY o",
        [[a.job_id for a in attempts]],
    )
    return [run_at for (run_at,) in rows]


# Broken by leaving the age out of the order of lanes (_choose_lanes), and by an age that is that
# of the newest job.
@pytest.mark.parametrize("step", [0.2, pytest.param(10, marks=pytest.mark.long)])
def test_b27_low_priority_starts_in_time_although_more_of_the_first_comes_than_can_run(
    conn: psycopg.Connection, step: float
) -> None:
    """Twice as many arrive as are claimed, so that the backlog of priority 1 only grows."""
    set_settings(conn, aging_seconds=step)
    batch = 20
    low = {insert(conn, kind="low", priority=4) for _ in range(10)}
    began = time.monotonic()
    slowest = 0.0
    while low:
        round_began = time.monotonic()
        insert_first_priority(conn, 2 * batch)
        attempts = claim(conn, limit=batch)
        assert len(attempts) == batch
        complete(conn, attempts)
        low -= {attempt.job_id for attempt in attempts}
        slowest = max(slowest, time.monotonic() - round_began)
        # Three steps and one batch.
        assert not low or time.monotonic() - began < 3 * step + slowest
    assert counts(conn)["available"] > batch
    assert slowest < step, "this machine is too slow for the test"


# Broken likewise.
def test_b27_once_it_has_aged_a_job_waits_for_none_that_came_later(
    conn: psycopg.Connection,
) -> None:
    """With a backlog of priority 1 that was there before it, that is what is left to wait for."""
    set_settings(conn, aging_seconds=0.1)
    insert_first_priority(conn, 60)
    low = {insert(conn, kind="low", priority=4) for _ in range(10)}
    insert_first_priority(conn, 60)
    time.sleep(0.35)
    claimed = [claim(conn, limit=10) for _ in range(13)]
    kinds = ["".join(sorted({attempt.kind for attempt in batch})) for batch in claimed]
    assert kinds == ["high"] * 6 + ["low"] + ["high"] * 6
    assert {attempt.job_id for attempt in claimed[6]} == low
    times = [run_times(conn, batch)[0] for batch in claimed]
    assert times == sorted(times)


async def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# Broken by a rescue that hands the job to the head of its lane (its old run_at), and by a slot that
# is not free after its handler was stopped.
@pytest.mark.parametrize("deadline", [0.3, pytest.param(5, marks=pytest.mark.long)])
def test_b27_jobs_that_hang_come_back_behind_what_waits(
    database: Database, conn: psycopg.Connection, deadline: float
) -> None:
    slots = 4
    handlers = awa.Handlers()
    order: list[str] = []
    hangs: Counter[int] = Counter()

    @handlers.task()
    async def hang(job: awa.Job) -> None:
        hangs[job.id] += 1
        order.append("hang")
        await asyncio.sleep(3600)

    @handlers.task()
    async def normal() -> None:
        order.append("normal")
        await asyncio.sleep(0.005)

    client = awa.Client(conn)
    opts = {"backoff": {"delays": [0]}, "deadline_seconds": deadline}
    hanging = [client.insert_job("hang", max_attempts=1000, opts=opts).job_id for _ in range(slots)]
    for _ in range(100):
        normal.insert(client)

    async def scenario() -> None:
        async with awa.Worker(database.dsn, handlers, queues=slots, prefetch=0, grace=0):
            await wait_for(lambda: counts(conn).get("completed") == 100)
            # They go on hanging, one after the other attempt.
            await wait_for(lambda: min(hangs[job_id] for job_id in hanging) >= 2)

    asyncio.run(scenario())
    assert order[:slots] == ["hang"] * slots
    first_again = order.index("hang", slots)
    # What was rescued is behind what was waiting by then.
    assert order[slots:first_again].count("normal") == 100
    assert {value(conn, "SELECT (awa.job(%s)).state", job_id) for job_id in hanging} <= {
        *("running", "retryable", "available")
    }


# Broken by a worker whose busy queue takes the slots of all.
@pytest.mark.parametrize("many", [3_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_b27_a_busy_queue_does_not_keep_another_one_waiting(
    database: Database, conn: psycopg.Connection, many: int
) -> None:
    for start in range(0, many, 1000):
        insert_many(conn, min(1000, many - start), "busy")
    started = threading.Event()
    ran: Counter[str] = Counter()
    at: list[int] = []

    async def k(job: awa.Job) -> None:
        ran[job.queue] += 1
        if job.queue == "quiet":
            at.append(ran["busy"])
            started.set()
        await asyncio.sleep(0.002)

    async def scenario() -> None:
        queues = {"busy": 10, "quiet": 1}
        async with awa.Worker(database.dsn, {"k": k}, queues=queues, poll_interval=1, grace=0):
            await wait_for(lambda: ran["busy"] > 100)
            begin = time.monotonic()
            await asyncio.to_thread(insert, conn, "quiet")
            await wait_for(started.is_set)
            # One poll.
            assert time.monotonic() - begin < 1
            assert counts(conn, "busy")["available"] > 0

    asyncio.run(scenario())
    assert at[0] < many


# Broken by an age that begins anew in each slot of the ring (_head_run_at looks at one slot).
def test_b27_aging_goes_on_over_rotations_and_neither_doubles_nor_loses_a_job(
    database: Database, conn: psycopg.Connection
) -> None:
    low = [insert(conn, kind="low", priority=4) for _ in range(3)]
    claimed: list[Attempt] = []
    for _ in range(3):
        insert_first_priority(conn, 5)
        rotate(conn)
        claimed += claim(conn, limit=5)
        complete(conn, claimed[-5:])
        prune_all(conn)
        # A step passes.
        conn.execute("UPDATE awa.ready_entries SET run_at = run_at - interval '60.1 s'")
    assert {attempt.kind for attempt in claimed} == {"high"}
    # Three steps have passed, in four slots: they go before what has just come.
    insert_first_priority(conn, 5)
    with database.connect() as other:
        # Neither the time zone nor the clock of a client has a say.
        other.execute("SET timezone = 'Pacific/Kiritimati'")
        first = claim(other, limit=3)
    assert [attempt.job_id for attempt in first] == low
    assert value(conn, "SELECT priority FROM awa.job(%s)", low[0]) == 4
    everything = Counter(a.job_id for a in [*claimed, *first, *claim_all(conn)])
    assert set(everything.values()) == {1}
    assert len(everything) == 23


def test_b27_age_is_the_time_since_a_job_was_due(conn: psycopg.Connection) -> None:
    """A job that was scheduled long ago is as old as its run time, and so is one that came back."""
    set_settings(conn, aging_seconds=0.2)
    late = insert(conn, priority=4, opts={"delay_seconds": 0.01})
    again = insert(conn, "again", priority=3)
    [attempt] = claim(conn, "again")
    time.sleep(0.65)
    assert finish(conn, [attempt.item("retry", delay_seconds=0.01)]) == ["done"]
    time.sleep(0.02)
    tick(conn, "promote")
    insert(conn, priority=1)
    newest = insert(conn, "again", priority=2)
    # Due for three steps, although it became available only now.
    assert claim(conn, limit=1)[0].job_id == late
    # Waiting since it was due again, not since it was enqueued.
    assert [a.job_id for a in claim(conn, "again", limit=2)] == [newest, again]
