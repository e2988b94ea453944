"""Case b06: batches that share unique keys, in any order, do not lock each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import awa
from conftest import Database
from engine import (
    WAIT_SECONDS,
    claim,
    claim_all,
    counts,
    finish,
    tick,
    value,
    wait_until_blocked,
)

QUEUES = [f"q{number}" for number in range(5)]
STRICT = QUEUES[:2]  # there producers lock their lane, too
Batch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Volume:
    """How much a run does."""

    sessions: int
    rounds: int
    seconds: float
    size: int
    keys: int


SHORT = Volume(sessions=4, rounds=5, seconds=0, size=60, keys=80)
FULL = Volume(sessions=8, rounds=3, seconds=60, size=500, keys=600)


def batch_of(chance: random.Random, volume: Volume, repeats: bool) -> Batch:
    """Jobs in shuffled order of their keys; with repeats the same key may come twice."""
    keys = range(volume.keys)
    chosen = chance.choices if repeats else chance.sample
    return [
        {
            "kind": "k",
            "args": key,
            "queue": chance.choice(QUEUES),
            "priority": chance.randint(1, 4),
            "opts": {"unique": {}},
        }
        for key in chosen(keys, k=volume.size)
    ]


def by_insert_jobs(conn: psycopg.Connection, batch: Batch) -> int | None:
    """Insert, and compare the answers with the items, in their order; how many are new."""
    rows = conn.execute(
        "SELECT job_id, duplicate FROM awa.insert_jobs(%s)", [Jsonb(batch)]
    ).fetchall()
    ids: dict[int, int] = {}
    for job, (job_id, is_duplicate) in zip(batch, rows, strict=True):
        key = job["args"]
        assert is_duplicate or key not in ids  # of repeats the first is new
        assert ids.setdefault(key, job_id) == job_id
    assert len(set(ids.values())) == len(ids)
    for key in list(ids)[:3]:
        assert value(conn, "SELECT (awa.job(%s)).args", ids[key]) == key
    return sum(not is_duplicate for _, is_duplicate in rows)


def by_copy(conn: psycopg.Connection, batch: Batch) -> int | None:
    """Load; there is no answer."""
    assert awa.Client(conn).load_jobs(batch) == len(batch)
    return None


def collide(
    database: Database,
    conn: psycopg.Connection,
    insert: Callable[[psycopg.Connection, Batch], int | None],
    volume: Volume,
    repeats: bool,
) -> None:
    """Let sessions insert until the time is over, and compare what there is with the answers."""
    for queue in STRICT:
        awa.Client(conn).declare_queue(queue, opts={"strict_fifo": True})
    end = time.monotonic() + volume.seconds

    def session(seed: int) -> int:
        chance = random.Random(seed)
        rounds = inserted = 0
        with database.connect() as mine:
            while rounds < volume.rounds or time.monotonic() < end:
                rounds += 1
                inserted += insert(mine, batch_of(chance, volume, repeats)) or 0
                # Ended jobs free their keys: a batch of duplicates alone would lock nothing.
                for queue in QUEUES:
                    items = [a.item("fail") for a in claim(mine, queue, volume.size // 10)]
                    assert set(finish(mine, items)) <= {"done"}
        return inserted

    with ThreadPoolExecutor(volume.sessions) as pool:
        inserted = list(pool.map(session, range(volume.sessions)))
    tick(conn, "promote")  # jobs whose lane was being made by another session
    living = sum(len(claim_all(conn, queue)) for queue in QUEUES)
    failed = value(
        conn, "SELECT sum((awa.queue_counts(q)).failed) FROM unnest(%s::text[]) q", QUEUES
    )
    assert failed > volume.keys
    if insert is by_insert_jobs:
        assert sum(inserted) == living + failed
    # One living job for a key at most.
    assert living == value(
        conn, "SELECT count(DISTINCT args) FROM awa.jobs WHERE state = 'running'"
    )
    assert living <= value(conn, "SELECT count(*) FROM awa.job_unique_claims") <= volume.keys


def by_insert_many(conn: psycopg.Connection, batch: Batch) -> int | None:
    args = [job["args"] for job in batch]
    ids = awa.Client(conn).insert_many("k", args, opts=batch[0]["opts"])
    assert len(ids) == len(batch)
    return None


# The first has taken its first keys, the second its own, when both come to the one in the middle.
# Broken by taking keys in the order of the call (_take_keys without ORDER BY key).
@pytest.mark.parametrize("insert", [by_insert_jobs, by_insert_many, by_copy])
def test_b06_two_batches_in_opposite_order_follow_each_other(
    database: Database,
    conn: psycopg.Connection,
    insert: Callable[[psycopg.Connection, Batch], int | None],
) -> None:
    jobs = [{"kind": "k", "args": key, "opts": {"unique": {}}} for key in range(20)]
    middle = jobs[10]
    by_insert_jobs(conn, [{**middle, "opts": {}}])  # makes the lane
    with (
        database.connect(autocommit=False) as holder,
        database.connect() as first,
        database.connect() as second,
        ThreadPoolExecutor(2) as pool,
    ):
        by_insert_jobs(holder, [middle])
        waiting = [
            pool.submit(insert, first, [*jobs[:10], middle, *jobs[11:]]),
            pool.submit(insert, second, [*jobs[:10:-1], middle, *jobs[9::-1]]),
        ]
        for session in (first, second):
            wait_until_blocked(conn, session)
        holder.rollback()
        for future in waiting:
            future.result(WAIT_SECONDS)
    assert counts(conn) == {"available": 21}


# Broken by a look at a key that is not the first of its repeats (_take_keys as above).
def test_b06_batches_that_share_keys_do_not_deadlock(
    database: Database, conn: psycopg.Connection
) -> None:
    collide(database, conn, by_insert_jobs, SHORT, repeats=True)


# Broken by inserting the rows of a load as they come.
def test_b06_loads_that_share_keys_do_not_deadlock(
    database: Database, conn: psycopg.Connection
) -> None:
    collide(database, conn, by_copy, SHORT, repeats=True)


@pytest.mark.long
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("insert", [by_insert_jobs, by_copy])
def test_b06_batches_of_500_do_not_deadlock_for_a_minute(
    database: Database,
    conn: psycopg.Connection,
    insert: Callable[[psycopg.Connection, Batch], int | None],
    repeats: bool,
) -> None:
    collide(database, conn, insert, FULL, repeats)


# Broken by _take_positions without ORDER BY: lanes are locked in the order of the call.
def test_b06_lanes_that_producers_lock_are_locked_in_one_order(
    database: Database, conn: psycopg.Connection
) -> None:
    client = awa.Client(conn)
    for queue in STRICT:
        client.declare_queue(queue, opts={"strict_fifo": True})

    def session(number: int) -> int:
        count = 0
        lanes = [(queue, priority) for queue in STRICT for priority in (1, 2, 3, 4)]
        chance = random.Random(number)
        with awa.Client(database.dsn) as mine:
            for _ in range(60):
                chance.shuffle(lanes)
                count += len(
                    mine.insert_jobs([{"kind": "k", "queue": q, "priority": p} for q, p in lanes])
                )
        return count

    with ThreadPoolExecutor(4) as pool:
        inserted = sum(pool.map(session, range(4)))
    assert inserted == sum(client.queue_counts(queue).available for queue in STRICT)
