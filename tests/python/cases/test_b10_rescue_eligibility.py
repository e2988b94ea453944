"""Case b10: who may be rescued, and that nobody who may not stands in the way.

Heartbeats and silence second by second, ten healthy minutes, lost receipts, and a step of 100 with
150 healthy attempts ahead of 5 dead ones are in tests/sql/maintenance/rescue_attempts.sql. The
time of a deadline's end under load is measured by `make bench-deadline`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

import awa
from engine import (
    claim,
    counts,
    finish,
    insert_many,
    read_buffers,
    rotate,
    set_settings,
    tick,
    value,
)

ALIVE = uuid.UUID(int=21, version=4)
DEAD = uuid.UUID(int=22, version=4)
# Seconds at job, claim and queue; None is absent, "null" is JSON null. The first one counts.
LEVELS = (None, "null", 60.0, 3600.0)
RESCUE = 'SELECT * FROM awa.tick(\'{"steps": ["rescue"]}\')'


def every_level() -> Iterator[tuple[object, object, object, float | None]]:
    for job in LEVELS:
        for claimed in LEVELS:
            for queue in LEVELS:
                given = [level for level in (job, claimed, queue) if isinstance(level, float)]
                yield job, claimed, queue, given[0] if given else None


def opts(seconds: object) -> dict[str, object]:
    if seconds is None:
        return {}
    return {"deadline_seconds": None if seconds == "null" else seconds}


# Broken by a precedence in the sweep that is not the claim's, and by zero taken for "at once".
def test_b10_one_precedence_for_executor_and_sweep(conn: psycopg.Connection) -> None:
    client = awa.Client(conn)
    expected: dict[int, float | None] = {}
    for number, (job, claimed, queue, seconds) in enumerate(every_level()):
        name = f"q{number}"
        client.declare_queue(name, opts=opts(queue))
        client.insert_job("k", queue=name, opts=opts(job))
        [got] = conn.execute(
            "SELECT c.job_id, c.deadline_at, c.deadline_at - now()"
            " FROM awa.claim_ready_runtime(%s, 1, %s, %s) c",
            [name, ALIVE, Jsonb(opts(claimed))],
        ).fetchall()
        job_id, deadline_at, left = got
        expected[job_id] = seconds
        if seconds is None:
            assert deadline_at is None
        else:
            assert abs(left - timedelta(seconds=seconds)) < timedelta(seconds=10)
    conn.execute("SELECT awa.heartbeat(%s)", [ALIVE])

    def rescued_after(seconds: float) -> set[int]:
        # A day of heartbeats, and the sweep at a time of its own.
        conn.execute(
            "UPDATE awa.runtime_instances SET heartbeat_at = now() + make_interval(secs => %s)",
            [seconds],
        )
        conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
        conn.execute(
            "SELECT awa._rescue_attempts(1000, clock_timestamp() + make_interval(secs => %s))",
            [seconds],
        )
        rows = conn.execute("SELECT job_id FROM awa.jobs WHERE state = 'retryable'")
        return {job_id for (job_id,) in rows}

    assert rescued_after(50) == set()
    assert rescued_after(75) == {job_id for job_id, s in expected.items() if s == 60}
    assert rescued_after(3590) == {job_id for job_id, s in expected.items() if s == 60}
    assert rescued_after(86400) == {job_id for job_id, s in expected.items() if s}
    # Without a deadline only silence counts.
    conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
    for seconds in (86400 + 100, 86400 + 120):
        conn.execute(
            "SELECT awa._rescue_attempts(1000, clock_timestamp() + make_interval(secs => %s))",
            [seconds],
        )
    rows = conn.execute("SELECT job_id, errors #>> '{0,error}' FROM awa.jobs").fetchall()
    assert {job_id for job_id, error in rows if error.startswith("heartbeat stale")} == {
        job_id for job_id, s in expected.items() if s is None
    }


def test_b10_a_deadline_that_is_none_is_refused_at_every_level(conn: psycopg.Connection) -> None:
    for seconds in (0, -1, 0.0005, 31_536_001, "60", 1e30):
        given = Jsonb({"deadline_seconds": seconds})
        for call in (
            "awa.insert_job('k', opts => %s)",
            "awa.insert_many('k', ARRAY['{}'::jsonb], opts => %s)",
            "awa.declare_queue('default', %s)",
            "awa.claim_ready_runtime('default', 1, gen_random_uuid(), %s)",
        ):
            with pytest.raises(psycopg.Error, match="deadline_seconds") as error:
                conn.execute(f"SELECT * FROM {call}".encode(), [given])
            assert error.value.sqlstate in ("22023", "23514")
            assert error.value.diag.message_hint
    assert conn.execute("SELECT FROM awa.queues").rowcount == 0


# Broken by a step that stops at the first it may not rescue.
def test_b10_five_dead_ones_behind_150_healthy_ones_go_in_two_ticks(
    conn: psycopg.Connection,
) -> None:
    set_settings(conn, heartbeat_seconds=0.05, rescue_rows=100)
    for worker, number in ((ALIVE, 150), (DEAD, 5)):
        insert_many(conn, number)
        assert len(claim(conn, limit=number, instance=worker, separate=["k"])) == number
        conn.execute("SELECT awa.heartbeat(%s)", [worker])
    conn.execute(
        "UPDATE awa.runtime_instances SET heartbeat_at = now() - interval '1 hour',"
        " suspect_at = now() - interval '1 hour' WHERE instance_id = %s",
        [DEAD],
    )
    for _ in range(2):
        assert tick(conn)["rescue"] == "done"
    rows = conn.execute("SELECT awa.job(job_id) FROM awa.jobs WHERE state = 'retryable'")
    assert rows.rowcount == 5
    assert counts(conn)["running"] == 150


# Broken by a look at every open attempt in each step.
def test_b10_a_step_costs_the_same_whatever_runs_and_has_run(conn: psycopg.Connection) -> None:
    set_settings(conn, heartbeat_seconds=3600, staleness_seconds=3600)

    def fill(batches: int) -> None:
        """Healthy attempts, half of them with a deadline, and as many that have ended."""
        insert_many(conn, 2 * batches)
        for seconds in (None, 3600):
            attempts = claim(
                conn, limit=batches, instance=ALIVE, separate=["k"], deadline_seconds=seconds
            )
            assert len({attempt.batch_id for attempt in attempts}) == batches
            items = [attempt.item("completed") for attempt in attempts[::2]]
            for start in range(0, len(items), 50):
                assert set(finish(conn, items[start : start + 50], ALIVE)) == {"done"}
        conn.execute("SELECT awa.heartbeat(%s)", [ALIVE])

    def cost() -> int:
        return min(read_buffers(conn, RESCUE) for _ in range(3))

    fill(20)
    tick(conn, "rescue")  # the one look at all of them in an hour
    little = cost()
    fill(400)
    for _ in range(2):
        rotate(conn, "claim")
        fill(100)
    much = cost()
    assert value(conn, "SELECT count(*) FROM awa.lease_claim_batches") > 1000
    assert much <= 1.25 * little + 20, (little, much)
    assert counts(conn)["running"] == 620
