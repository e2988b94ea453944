"""Case b15: times without a zone, and workers whose clocks are wrong.

Times in messages of `insert_jobs` are in tests/sql/api/insert_jobs.sql. Cron and callbacks do not
exist yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

import awa
from conftest import Database
from engine import counts, set_settings, value
from test_worker_process import SCRIPT, marks, until
from tools.faketime import ensure_faketime

AHEAD, BEHIND = "+600", "-600"
SKEW = timedelta(minutes=10)
NAIVE = datetime(2400, 1, 2, 3, 4, 5)
INSTANT = datetime(2400, 1, 2, 3, 4, 5, 678901, timezone(timedelta(hours=-7)))
Insert = Callable[[awa.Client, Any], int]
WAYS: dict[str, Insert] = {
    "insert_job": lambda c, at: c.insert_job("k", run_at=at).job_id,
    "insert_many": lambda c, at: c.insert_many("k", [{}], run_at=at)[0],
    "insert_jobs": lambda c, at: c.insert_jobs([{"kind": "k", "run_at": at}])[0].job_id,
    "load_jobs": lambda c, at: c.load_jobs([{"kind": "k", "run_at": at}]),
}


@pytest.fixture
def elsewhere(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[awa.Client]:
    """A client whose process, session and database are in three time zones."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    with database.connect() as admin:
        admin.execute(f"ALTER DATABASE {database.name} SET timezone = 'Asia/Kolkata'".encode())
    with database.connect() as conn:
        assert value(conn, "SELECT current_setting('timezone')") == "Asia/Kolkata"
        yield awa.Client(conn)
    monkeypatch.undo()
    time.tzset()


# Broken by a client that sends what it is given: the database would read it in its own zone.
@pytest.mark.parametrize("name", WAYS)
def test_b15_a_time_without_zone_is_refused(elsewhere: awa.Client, name: str) -> None:
    way = WAYS[name]
    for at, message in [
        (NAIVE, "run_at has no time zone"),
        (date(2400, 1, 2), "run_at"),
        ("2400-01-02", "run_at"),
        ("2400-01-02T03:04:05", "run_at"),
        (1e9, "run_at"),
        (datetime(9999, 12, 31, 23, 59, tzinfo=UTC), "run_at"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "run_at"),
    ]:
        with pytest.raises((awa.InvalidArgument, awa.LimitExceeded), match=message) as error:
            way(elsewhere, at)
        assert error.value.hint
    assert counts(elsewhere._conn) == {}  # type: ignore[arg-type]


# Broken by a datetime that is written without its offset.
def test_b15_an_aware_time_is_the_same_instant_everywhere(elsewhere: awa.Client) -> None:
    conn: Any = elsewhere._conn
    for way in WAYS.values():
        way(elsewhere, INSTANT)
    conn.execute("SELECT awa.insert_job('k', run_at => '2400-01-02 03:04:05.678901-07')")
    conn.execute(
        """SELECT awa.insert_jobs('[{"kind": "k", "run_at": "2400-01-02T10:04:05.678901Z"}]')"""
    )
    rows = conn.execute("SELECT run_at FROM awa.jobs").fetchall()
    assert rows == [(INSTANT,)] * 6
    # The last day that can be, and the past, which means now.
    last = datetime(9999, 12, 30, 23, 59, 59, tzinfo=UTC)
    for way in WAYS.values():
        way(elsewhere, last)
        way(elsewhere, datetime(1, 1, 2, tzinfo=UTC))
    rows = conn.execute(
        "SELECT run_at, count(*) FROM awa.jobs WHERE state = 'scheduled' GROUP BY 1"
    )
    assert dict(rows.fetchall()) == {INSTANT: 6, last: 4}
    assert counts(conn)["available"] == 4


# The same rule for text in JSON as for Python: no zone, no job.
def test_b15_text_without_zone_is_refused_in_json(elsewhere: awa.Client) -> None:
    conn: Any = elsewhere._conn
    for text in ("2400-01-02", "2400-01-02T03:04:05", "2400-01-02 03:04:05", "tomorrow", "now"):
        with pytest.raises(psycopg.Error) as error:
            conn.execute(
                "SELECT awa.insert_jobs(%s)", [json.dumps([{"kind": "k", "run_at": text}])]
            )
        assert error.value.sqlstate == "22023"
        assert "run_at" in str(error.value)
    assert counts(conn) == {}


# Clocks


@contextmanager
def skewed(database: Database, seconds: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process whose clock is wrong by so much, its monotonic clock apart.

    The library breaks time.sleep() on that one, so handlers sleep in the event loop.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": str(ensure_faketime()),
        "FAKETIME": f"{seconds}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    command = [sys.executable, str(SCRIPT), database.dsn, json.dumps(options)]
    worker = subprocess.Popen(command, env=environment)
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def starts(conn: psycopg.Connection, job_id: int) -> list[datetime]:
    query = "SELECT at FROM marks WHERE job_id = %s AND event = 'start' ORDER BY at"
    return [at for (at,) in conn.execute(query, [job_id])]


def check_skewed_workers(
    database: Database, conn: psycopg.Connection, staleness: float, seconds: float
) -> None:
    """Two workers, 20 minutes apart, do what one with the right time does."""
    conn.execute(
        "CREATE TABLE marks (job_id bigint, attempt integer, event text,"
        " at timestamptz DEFAULT clock_timestamp())"
    )
    set_settings(conn, staleness_seconds=staleness, heartbeat_seconds=staleness / 4)
    client = awa.Client(conn)
    long = client.insert_many("async_sleep", [{"seconds": seconds}] * 4)
    with (
        skewed(database, AHEAD, queues={"default": 2, "else": 2}) as ahead,
        skewed(database, BEHIND, queues={"default": 2, "else": 2}) as behind,
    ):
        until(lambda: len(marks(conn, "start")) == 4)
        soon = client.insert_job("fail_once", queue="else", opts={"delay_seconds": 1}).job_id
        due = client.job(soon).run_at
        client.update_job(soon, {"backoff": {"delays": [1.5]}})
        later = client.insert_job("fail_once", queue="else", opts={"delay_seconds": 300}).job_id
        bounded = client.insert_job(
            "async_sleep", {"seconds": seconds / 2}, queue="else", opts={"deadline_seconds": 60}
        ).job_id
        clocks = client.insert_many("tell_the_time", [{}] * 20, queue="else")
        until(lambda: counts(conn, "else") == {"completed": 22, "scheduled": 1}, 30)
        until(lambda: counts(conn) == {"completed": 4}, 30)
        assert value(conn, "SELECT count(*) FROM awa.instances WHERE is_live") == 2
        for worker in (ahead, behind):
            worker.terminate()
            assert worker.wait(20) == 0
    # Nobody took a job from the other one, and nothing was early.
    assert marks(conn, "start") == sorted(
        [(job_id, 1) for job_id in [*long, bounded]] + [(soon, 1), (soon, 2)]
    )
    first, second = starts(conn, soon)
    assert due is not None
    assert due <= first < due + SKEW / 2
    assert timedelta(seconds=1.5) <= second - first < SKEW / 2
    info = client.job(later)
    assert info.state == "scheduled"
    assert info.run_at is not None
    assert info.created_at is not None
    assert info.run_at - info.created_at == timedelta(seconds=300)
    told = conn.execute(
        "SELECT extract(epoch FROM at)::float8 - split_part(event, ' ', 2)::float8, job_id"
        " FROM marks WHERE event LIKE 'time %'"
    ).fetchall()
    assert {job_id for _, job_id in told} == set(clocks)
    assert all(590 < abs(wrong) < 610 for wrong, _ in told)  # so the clocks were wrong indeed


# Broken by a heartbeat, and by a due time, that the worker's own clock decides.
def test_b15_workers_with_wrong_clocks_change_nothing(
    database: Database, conn: psycopg.Connection
) -> None:
    check_skewed_workers(database, conn, staleness=2, seconds=3.5)


@pytest.mark.long
def test_b15_workers_with_wrong_clocks_change_nothing_for_half_a_minute(
    database: Database, conn: psycopg.Connection
) -> None:
    check_skewed_workers(database, conn, staleness=6, seconds=30)
