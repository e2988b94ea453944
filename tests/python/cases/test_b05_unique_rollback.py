"""Case b05: a unique key whose holder may still roll back.

What an older snapshot may answer is shown case by case in test_unique.py
(test_a_snapshot_does_not_take_an_ended_job_for_the_holder and its neighbours); keys that are freed
inside one transaction are in tests/sql/api/unique_jobs.sql.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.types.json import Jsonb

import awa
from awa.errors import is_transient
from conftest import Database
from engine import (
    WAIT_SECONDS,
    claim,
    claim_all,
    counts,
    finish,
    insert,
    tick,
    wait_until_blocked,
)
from test_unique import NARROW, Answer, unique

SESSIONS = 50
KEY = "the key"
UNIQUE: dict[str, Any] = {"unique": {}}


def by_insert_job(client: awa.Client) -> int | None:
    return client.insert_job("k", KEY, opts=UNIQUE).job_id


def by_insert_jobs(client: awa.Client) -> int | None:
    [result] = client.insert_jobs([{"kind": "k", "args": KEY, "opts": UNIQUE}])
    return result.job_id


def by_insert_many(client: awa.Client) -> int | None:
    [job_id] = client.insert_many("k", [KEY], opts=UNIQUE)
    return job_id


def by_copy(client: awa.Client) -> int | None:
    client.load_jobs([{"kind": "k", "args": KEY, "opts": UNIQUE}])
    return None  # a load answers nothing


WAYS = [by_insert_job, by_insert_jobs, by_insert_many, by_copy]


# Broken by an answer that does not wait for the first one's end.
@pytest.mark.parametrize("ends_by", ["commit", "rollback"])
def test_b05_the_second_insert_waits_for_the_first_ones_end(
    database: Database, conn: psycopg.Connection, ends_by: str
) -> None:
    insert(conn)  # makes the lane
    claim_all(conn)
    with (
        database.connect(autocommit=False) as first,
        database.connect() as second,
        ThreadPoolExecutor(1) as pool,
    ):
        for way in WAYS:
            mine = unique(first, KEY)
            waiting = pool.submit(way, awa.Client(second))
            assert wait_until_blocked(conn, second) == [first.info.backend_pid]
            getattr(first, ends_by)()
            told = waiting.result(WAIT_SECONDS)
            [attempt] = claim_all(conn)
            assert (attempt.job_id == mine.job_id) == (ends_by == "commit")
            assert told == (None if way is by_copy else attempt.job_id)
            assert finish(conn, [attempt.item("fail")]) == ["done"]  # frees the key


# Broken by a lock timeout that is swallowed (_take_key as _try_take_key).
def test_b05_a_lock_timeout_is_an_error_that_a_retry_cures(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SET lock_timeout = '200ms'")
    with database.connect(autocommit=False) as first:
        unique(first, KEY)
        for way in WAYS:
            with pytest.raises(psycopg.errors.LockNotAvailable) as error:
                way(awa.Client(conn))
            assert is_transient(error.value)
        first.rollback()
    assert not unique(conn, KEY).duplicate
    assert counts(conn) == {"available": 1}


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_b05_an_old_snapshot_gets_the_right_answer_or_a_serialization_error(
    database: Database, conn: psycopg.Connection, level: IsolationLevel
) -> None:
    with (
        database.connect(autocommit=False) as first,
        database.connect(autocommit=False) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        second.isolation_level = level
        second.execute("SELECT 1")
        mine = unique(first, "committed")
        waiting = pool.submit(unique, second, "committed")
        wait_until_blocked(conn, second)
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            waiting.result(WAIT_SECONDS)
        second.rollback()
        assert unique(second, "committed") == Answer(mine.job_id, mine.state, True)
        second.rollback()
        second.execute("SELECT 1")
        unique(first, "rolled back")
        waiting = pool.submit(unique, second, "rolled back")
        wait_until_blocked(conn, second)
        first.rollback()
        assert not waiting.result(WAIT_SECONDS).duplicate
        second.commit()
    assert counts(conn) == {"available": 2}


# Broken by a look for the key without the index that decides, by an answer that does not wait for
# the first one's commit, and by a takeover that does not ask whether the claim is still the same.
@pytest.mark.parametrize(
    ("rolling_back", "takeover"), [(0, True), (SESSIONS // 3, False), (SESSIONS // 3, True)]
)
def test_b05_fifty_sessions_insert_one_job_and_all_are_told_which(
    database: Database, conn: psycopg.Connection, rolling_back: int, takeover: bool
) -> None:
    start = Barrier(SESSIONS)
    if takeover:
        unique(conn, "one", states=NARROW)
        assert len(claim(conn)) == 1

    def session(number: int) -> Answer | None:
        with database.connect(autocommit=False) as mine:
            mine.execute("SELECT 1")
            mine.rollback()
            start.wait()
            answer = unique(mine, "one", states=NARROW)
            if number < rolling_back:
                mine.rollback()
                return None
            mine.commit()
            return answer

    with ThreadPoolExecutor(SESSIONS) as pool:
        answers = [a for a in pool.map(session, range(SESSIONS)) if a is not None]
    assert len(answers) == SESSIONS - rolling_back
    assert Counter(a.duplicate for a in answers)[False] == 1
    [job_id] = {a.job_id for a in answers}
    tick(conn, "promote")  # it was deferred if its lane was being made by another session
    assert [attempt.job_id for attempt in claim_all(conn)] == [job_id]


# A rollback to a savepoint frees what was inserted since, while the transaction goes on.
def test_b05_a_rollback_to_a_savepoint_frees_the_key(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE public.rows (n integer)")
    with database.connect(autocommit=False) as first:
        first.execute("SAVEPOINT before")
        gone = unique(first, KEY)
        first.execute("SAVEPOINT within")
        with database.connect() as second, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(unique, second, KEY)
            assert wait_until_blocked(conn, second) == [first.info.backend_pid]
            first.execute("ROLLBACK TO within")
            assert wait_until_blocked(conn, second) == [first.info.backend_pid]
            first.execute("ROLLBACK TO before")
            answer = waiting.result(WAIT_SECONDS)  # it does not wait for the commit
        assert not answer.duplicate
        assert unique(first, KEY) == Answer(answer.job_id, answer.state, True)
        first.execute("INSERT INTO public.rows VALUES (1)")
        first.commit()
    assert conn.execute("SELECT FROM public.rows").rowcount == 1
    tick(conn, "promote")
    [attempt] = claim_all(conn)
    assert attempt.job_id == answer.job_id != gone.job_id


# What is not the case's word for word: no caller is told of nothing, whatever the policy.
def test_b05_no_answer_is_empty(database: Database, conn: psycopg.Connection) -> None:
    query = "SELECT count(*), count(job_id), max(job_id) FROM awa.insert_job(%s, opts => %s)"

    def answer(producer: psycopg.Connection, policy: str) -> tuple[int, int, int]:
        opts = Jsonb({"unique": {"by": [], "on_conflict": policy}})
        [row] = producer.execute(query, [policy, opts]).fetchall()
        return row

    with (
        database.connect(autocommit=False) as first,
        database.connect() as second,
        ThreadPoolExecutor(1) as pool,
    ):
        for policy in ("return", "raise", "replace"):
            mine = answer(first, policy)
            waiting = pool.submit(answer, second, policy)
            wait_until_blocked(conn, second)
            first.commit()
            if policy == "raise":
                with pytest.raises(psycopg.errors.UniqueViolation) as error:
                    waiting.result(WAIT_SECONDS)
                assert error.value.diag.message_detail == f"job_id={mine[2]}"
            else:
                assert waiting.result(WAIT_SECONDS) == mine
    assert counts(conn) == {"available": 3}
