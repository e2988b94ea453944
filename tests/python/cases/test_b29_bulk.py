"""Case b29: many jobs in one transaction, by every way there is; all of them store the same.

Shown elsewhere: validation and errors of each way (insert_jobs.sql, job_inbox.sql, and
test_a_load_with_a_bad_job_enqueues_nothing in test_client.py); a load is one transaction
(test_a_load_of_100_000_jobs_is_one_transaction in test_unique.py), and two of them do not deadlock
on their keys (test_loads_that_share_keys_do_not_deadlock); a client that stops reading its own COPY
(test_a_load_with_a_bad_job_enqueues_nothing). A client chooses no lane: it gives an ordering key,
and the database its shard.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel, sql
from psycopg.types.json import Jsonb

from conftest import Database
from engine import claim_all, counts, open_transaction, value

# Everything of a row but its id and when it came.
STORED = """
    SELECT kind, queue, priority, max_attempts, state, args, tags, metadata, run_at > created_at,
           attempt, run_lease, deadline_at
    FROM awa.jobs ORDER BY job_id
"""
FIELDS = ("kind", "args", "queue", "priority", "max_attempts", "run_at", "opts")
NEVER_MORE_SUBTRANSACTIONS = 64


def by_single(conn: psycopg.Connection, jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        names = ", ".join(f"{name} => %s" for name in job)
        conn.execute(f"SELECT awa.insert_job({names})".encode(), [_adapted(job, n) for n in job])


def _adapted(job: dict[str, Any], name: str) -> Any:
    return Jsonb(job[name]) if name in ("args", "opts") else job[name]


def by_insert_jobs(conn: psycopg.Connection, jobs: list[dict[str, Any]]) -> None:
    conn.execute("SELECT count(*) FROM awa.insert_jobs(%s)", [Jsonb(jobs)])


def by_insert_many(conn: psycopg.Connection, jobs: list[dict[str, Any]]) -> None:
    """One call for each run of jobs that differ in their args alone."""
    start = 0
    while start < len(jobs):
        options = {n: v for n, v in jobs[start].items() if n != "args"}
        end = start
        while end < len(jobs) and {n: v for n, v in jobs[end].items() if n != "args"} == options:
            end += 1
        args = [Jsonb(job["args"]) for job in jobs[start:end]]
        names = ", ".join(f"{name} => %s" for name in ("args", *options))
        conn.execute(
            f"SELECT count(*) FROM awa.insert_many({names})".encode(),
            [args, *(_adapted(options, name) for name in options)],
        )
        start = end


def by_copy(conn: psycopg.Connection, jobs: list[dict[str, Any]]) -> None:
    with conn.cursor().copy(
        f"COPY awa.job_inbox ({', '.join(FIELDS)}) FROM STDIN".encode()
    ) as copy:
        for job in jobs:
            copy.write_row([_text(job.get(name), name) for name in FIELDS])


def _text(given: Any, name: str) -> Any:
    return json.dumps(given) if name in ("args", "opts") and given is not None else given


WAYS: dict[str, Callable[[psycopg.Connection, list[dict[str, Any]]], None]] = {
    "single": by_single,
    "insert_jobs": by_insert_jobs,
    "insert_many": by_insert_many,
    "copy": by_copy,
}


def jobs_of(count: int) -> list[dict[str, Any]]:
    """Jobs with a hundredth of duplicate keys; the last ones with options of every sort."""
    unique = {"unique": {"by": ["args.n"]}}
    jobs: list[dict[str, Any]] = [
        {"kind": "k", "args": {"n": n - 1 if n % 100 == 99 else n}, "opts": unique}
        for n in range(count)
    ]
    for n in range(40):
        opts = {"tags": ["t"], "metadata": {"m": n // 10}, "deadline_seconds": 60}
        options: dict[str, Any] = {"queue": f"q{n // 20}", "priority": 1 + n // 10, "opts": opts}
        if n >= 30:
            options["run_at"] = "2999-01-01T00:00:00+05:30"
        jobs.append({"kind": "other", "args": {"n": n}, "max_attempts": 3, **options})
    return jobs


@pytest.fixture
def listener(database: Database, conn: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """Hears the wake-ups of the default queue, as a worker that sleeps does."""
    channel = value(conn, "SELECT (awa.claim_status('default', arm => true)).channel")
    with database.connect() as listening:
        listening.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        conn.execute("SELECT awa.set_setting('idle_poll_ms', '60000')")
        conn.execute("SELECT awa.claim_status('default', arm => true)")
        yield listening


# Broken by a block with an exception clause around each row (_parse_rows), and by a load that
# leaves the keys out.
@pytest.mark.parametrize("count", [200, pytest.param(100_000, marks=pytest.mark.long)])
def test_b29_every_way_stores_the_same_without_a_subtransaction_per_row(
    database: Database, conn: psycopg.Connection, listener: psycopg.Connection, count: int
) -> None:
    jobs = jobs_of(count)
    stored: dict[str, list[Any]] = {}
    for name, insert in WAYS.items():
        if name == "single" and count > 10_000:
            continue
        with open_transaction(database, IsolationLevel.REPEATABLE_READ) as reader:
            reader.execute("SELECT FROM awa.queue_meta")
            with open_transaction(database) as producer:
                producer.execute("SET statement_timeout = 0")
                top = int(value(producer, "SELECT pg_current_xact_id()::text"))
                insert(producer, jobs)
                producer.commit()
                next_one = int(value(producer, "SELECT pg_current_xact_id()::text"))
                producer.rollback()
        assert next_one - top - 1 < NEVER_MORE_SUBTRANSACTIONS, name
        if name != "single":
            heard = [n.payload for n in listener.notifies(timeout=2, stop_after=1)]
            more = [n.payload for n in listener.notifies(timeout=0.05)]
            assert (len(heard), more) == (1, []), name
        else:
            for _ in listener.notifies(timeout=0.2):
                pass
        rows = conn.execute(STORED).fetchall()
        # Keys come last in a load: what they are of is compared, not their place.
        stored[name] = sorted(rows, key=str)
        for queue in ("default", "q0", "q1"):
            while value(conn, "SELECT awa.drain_queue(%s, '{\"limit\": 10000}')", queue):
                pass
        conn.execute("TRUNCATE awa.done_entries, awa.job_unique_claims")
    first, *others = stored.values()
    assert len(first) == count - count // 100 + 40
    for other in others:
        assert other == first


def spoil(jobs: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [*jobs[:index], {**jobs[index], "priority": 9}, *jobs[index + 1 :]]


# Broken by an error that does not say which row, and by rows that outlive a savepoint.
@pytest.mark.parametrize(
    ("count", "bad"), [(1000, 777), pytest.param(100_000, 77_777, marks=pytest.mark.long)]
)
def test_b29_a_bad_row_is_named_and_nothing_is_left(
    database: Database, conn: psycopg.Connection, count: int, bad: int
) -> None:
    jobs = [{"kind": "k", "args": {"n": n}} for n in range(count)]
    named = {"insert_jobs": f"jobs[{bad + 1}]", "copy": f"row {bad + 1}"}
    with open_transaction(database) as mine:
        mine.execute("SET statement_timeout = 0")
        mine.execute("CREATE TABLE orders (n integer)")
        for name, words in named.items():
            mine.execute("SAVEPOINT s")
            with pytest.raises(psycopg.errors.CheckViolation) as error:
                WAYS[name](mine, spoil(jobs, bad))
            message = error.value.diag.message_primary or ""
            assert words in message, message
            assert "priority" in message
            # Back at its savepoint, the transaction is as it was.
            mine.execute("ROLLBACK TO s")
            mine.execute("INSERT INTO orders VALUES (1)")
        # The last argument of all jobs of insert_many is one too long.
        mine.execute("SAVEPOINT s")
        args = [Jsonb("x" * 2_000_000 if n == bad else n) for n in range(min(count, bad + 2))]
        with pytest.raises(psycopg.errors.CheckViolation, match=rf"args\[{bad + 1}\]"):
            mine.execute("SELECT awa.insert_many('k', %s)", [args])
        mine.execute("ROLLBACK TO s")
        by_copy(mine, jobs[:10])
        mine.commit()
    assert value(conn, "SELECT count(*) FROM orders") == 2
    assert [a.kind for a in claim_all(conn)] == ["k"] * 10
    assert counts(conn) == {"running": 10}


# Broken by a load that stores as it goes (a trigger for each row that inserts).
def test_b29_a_load_whose_connection_breaks_leaves_nothing(
    database: Database, conn: psycopg.Connection
) -> None:
    with database.connect() as victim:
        with (
            suppress(psycopg.Error),
            victim.cursor().copy("COPY awa.job_inbox (kind, args) FROM STDIN") as copy,
        ):
            for n in range(20_000):
                copy.write_row(["k", str(n)])
                if n == 10_000:
                    pid = victim.info.backend_pid
                    assert value(conn, "SELECT pg_terminate_backend(%s, 10000)", pid)
        assert victim.closed or victim.broken
    assert claim_all(conn) == []
    assert counts(conn) == {}
    by_copy(conn, [{"kind": "k", "args": n} for n in range(10)])
    assert len(claim_all(conn)) == 10


# Broken by a way that gives a key another shard, and by a claim that reads the shards of now alone.
def test_b29_an_ordering_key_has_one_lane_by_every_way_and_each_lane_is_read(
    conn: psycopg.Connection,
) -> None:
    conn.execute("SELECT awa.declare_queue('default', '{\"enqueue_shards\": 4}')")
    keys = [f"key {n}" for n in range(20)]
    for insert in WAYS.values():
        insert(
            conn,
            [{"kind": k, "args": {}, "opts": {"ordering_key": k}} for k in keys],
        )
    rows = conn.execute(
        "SELECT r.kind, l.shard, awa.ordering_shard(r.kind, 4) FROM awa.ready_entries r"
        " JOIN awa.queue_lanes l ON l.lane_id = r.position / 4398046511104"
    ).fetchall()
    assert len(rows) == len(WAYS) * len(keys)
    assert all(shard == expected for _, shard, expected in rows)
    assert len({shard for _, shard, _ in rows}) == 4
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        conn.execute("SELECT awa.ordering_shard('key', 65)")
    # Fewer shards later on: what lies in the others is still read.
    conn.execute("SELECT awa.declare_queue('default', '{\"enqueue_shards\": 1}')")
    assert Counter(a.kind for a in claim_all(conn)) == dict.fromkeys(keys, len(WAYS))
