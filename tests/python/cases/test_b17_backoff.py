"""Case b17: delays at any attempt, with any policy, stay within their bounds and are no error.

Shown elsewhere: the delay of every attempt, its mean that never decreases, policies
(backoff.sql); the policies of Python (test_exponential_delays_stay_within_the_cap in
test_handlers.py) and delays that an outcome refuses (test_outcomes_refuse_impossible_delays).
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from engine import WORKER, Attempt, claim, counts, finish, insert, tick, value

DAY = 86_400
# What an attempt may be, at the widest jitter: (policy, least delay, most delay) by attempt.
ATTEMPTS = (1, 20, 31, 62, 100, 305, 998, 32_765)
POLICIES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"jitter": 1},
    {"base_seconds": 86_400, "factor": 100, "jitter": 1},
    {"base_seconds": 4, "factor": 1.000001, "cap_seconds": 5},
    {"delays": [86_400]},
)


def at_attempt(conn: psycopg.Connection, number: int, policy: dict[str, Any] | None) -> Attempt:
    """A running attempt of this number; beyond the limit of max_attempts by force."""
    opts = {"delay_seconds": 0.001, **({"backoff": policy} if policy else {})}
    queue = f"q{value(conn, 'SELECT count(*) FROM awa.jobs')}"
    job_id = insert(conn, queue, opts=opts, max_attempts=1000)
    conn.execute(
        "UPDATE awa.deferred_jobs SET attempt = %s, ext = jsonb_set(coalesce(ext, '{}'),"
        " '{max_attempts}', '100000') WHERE job_id = %s",
        [number - 1, job_id],
    )
    while not (attempts := claim(conn, queue)):
        tick(conn, "promote")
    [attempt] = attempts
    assert (attempt.job_id, attempt.attempt) == (job_id, number)
    return attempt


def delay(conn: psycopg.Connection, attempt: Attempt, before: object) -> tuple[float, float]:
    """Seconds until a job runs again, seen from before its finish, and from now."""
    [(then, now)] = conn.execute(
        "SELECT extract(epoch FROM j.run_at - %s)::float8,"
        " extract(epoch FROM j.run_at - clock_timestamp())::float8 FROM awa.job(%s) j",
        [before, attempt.job_id],
    ).fetchall()
    return then, now


def clock(conn: psycopg.Connection) -> object:
    return value(conn, "SELECT clock_timestamp()")


# Broken by a power that is taken before the exponent is bounded (_backoff_seconds: 22003), and by a
# cap that is applied before the jitter.
def test_b17_a_retry_has_a_delay_within_its_cap_at_any_attempt(conn: psycopg.Connection) -> None:
    for policy in POLICIES:
        cap = (policy or {}).get("cap_seconds", DAY)
        for number in ATTEMPTS:
            attempt = at_attempt(conn, number, policy)
            before = clock(conn)
            assert finish(conn, [attempt.item("retry", error="no")]) == ["done"]
            then, now = delay(conn, attempt, before)
            assert then >= 0, (policy, number)
            assert now <= cap, (policy, number)
            state = value(conn, "SELECT state FROM awa.job(%s)", attempt.job_id)
            assert state == "retryable", (policy, number)


# Broken by a delay that is not checked (_parse_finish_item).
def test_b17_a_delay_that_cannot_be_is_refused_and_leaves_the_attempt_open(
    conn: psycopg.Connection,
) -> None:
    attempt = at_attempt(conn, 1, None)
    for bad in (-1, -0.001, 31_536_001, 1e12, "5", True, [1]):
        rows = conn.execute(
            "SELECT result, reason FROM awa.finish_jobs(%s, %s)",
            [WORKER, Jsonb([attempt.item("retry", delay_seconds=bad)])],
        ).fetchall()
        assert rows == [("invalid", 'field "delay_seconds" must be a number from 0 to 31536000')], (
            bad
        )
    assert value(conn, "SELECT count(*) FROM awa.jobs WHERE state = 'running'") == 1
    # None leaves it to the backoff, 0 is at once, and the largest is a year.
    for given, least, most in (
        (None, 1.9, 2.5),
        (0, 0, 0.001),
        (31_536_000, 31_535_990, 31_536_000),
    ):
        attempt = at_attempt(conn, 1, None) if given is not None else attempt
        before = clock(conn)
        assert finish(conn, [attempt.item("retry", delay_seconds=given)]) == ["done"]
        then, now = delay(conn, attempt, before)
        assert then >= least
        assert now <= most


# Broken by a limit of attempts that counts from 0 (_move_attempt), and by one that is not checked.
def test_b17_max_attempts_of_1_runs_once_and_none_is_refused(conn: psycopg.Connection) -> None:
    insert(conn, "once", max_attempts=1)
    [attempt] = claim(conn, "once")
    assert finish(conn, [attempt.item("retry", delay_seconds=0)]) == ["done"]
    assert counts(conn, "once") == {"failed": 1}
    reason = value(conn, "SELECT reason FROM awa.job(%s)", attempt.job_id)
    assert reason == "max_attempts_exhausted"
    for bad in (0, -1, 1001, 2**31 - 1, -(2**31)):
        for call in (
            "insert_job('k', max_attempts => %s)",
            "insert_many('k', '{{1}}', max_attempts => %s)",
        ):
            with pytest.raises(psycopg.Error) as error:
                conn.execute(
                    f"SELECT awa.{call.replace('{{', '{').replace('}}', '}')}".encode(), [bad]
                )
            assert error.value.sqlstate == "23514", (bad, call)
    for large in (2**31, 10**30):
        with pytest.raises(psycopg.Error) as error:
            conn.execute(
                "SELECT awa.insert_jobs(%s)", [Jsonb([{"kind": "k", "max_attempts": large}])]
            )
        assert error.value.sqlstate in ("22023", "23514"), large
        assert "max_attempts" in str(error.value)
    assert counts(conn) == {}


# Broken by a snooze that keeps the attempt charged (_move_attempt).
def test_b17_a_snooze_changes_neither_the_attempt_nor_the_next_delay(
    conn: psycopg.Connection,
) -> None:
    insert(conn, max_attempts=2)
    for lease in range(1, 31):
        while not (attempts := claim(conn)):
            tick(conn, "promote")
        [attempt] = attempts
        assert (attempt.attempt, attempt.run_lease) == (1, lease)
        assert finish(conn, [attempt.item("snooze", delay_seconds=0)]) == ["done"]
    while not (attempts := claim(conn)):
        tick(conn, "promote")
    before = clock(conn)
    assert finish(conn, [attempts[0].item("retry")]) == ["done"]
    then, now = delay(conn, attempts[0], before)
    assert then >= 2
    assert now <= 2.5
