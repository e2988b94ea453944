"""Case b19: dead letters that several operators, the retention and unique keys meet at once.

Shown elsewhere, in dead_letters.sql: a second report of a failure is already done and makes no
second dead letter; a replay starts at attempt 0 with a lease that no attempt of the former life
has; a rollback puts the dead letter back; retry into a paused and into another queue; purge and
retention. There is no call that retries all: whoever wants that calls retry_dlq for each.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

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
    open_transaction,
    set_settings,
    tick,
    value,
    wait_until_blocked,
)

RETRY = "SELECT (awa.retry_dlq(%s)).state::text"


@pytest.fixture(autouse=True)
def dead_letters(conn: psycopg.Connection) -> None:
    conn.execute("SELECT awa.declare_queue('default', '{\"dlq\": true}')")


def dead(conn: psycopg.Connection, count: int) -> list[Attempt]:
    """Jobs that failed; the attempts that did."""
    insert_many(conn, count)
    attempts = claim(conn, limit=count)
    assert finish(conn, [a.item("fail", error="no") for a in attempts]) == ["done"] * count
    return attempts


def outcome(conn: psycopg.Connection, query: str, job_id: int) -> str:
    """The answer, or the SQLSTATE of the error."""
    try:
        return str(value(conn, query, job_id))
    except psycopg.Error as error:
        return error.sqlstate or "?"


# Broken by a retry that reads the dead letter and deletes it afterwards (_take_dead_letter).
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_b19_of_two_who_retry_one_dead_letter_one_does(
    database: Database, conn: psycopg.Connection, end: str
) -> None:
    [attempt] = dead(conn, 1)
    with open_transaction(database) as first, database.connect() as second:
        assert outcome(first, RETRY, attempt.job_id) == "available"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(outcome, second, RETRY, attempt.job_id)
            assert wait_until_blocked(conn, second) == [first.info.backend_pid]
            getattr(first, end)()
            assert waiting.result() == ("42704" if end == "commit" else "available")
    assert counts(conn) == {"available": 1}
    [again] = claim_all(conn)
    # What is left of the former life cannot end the new one.
    assert (again.attempt, again.run_lease) == (1, attempt.run_lease + 1)
    assert finish(conn, [attempt.item("completed"), attempt.item("fail")]) == [
        *("stale", "already_done")
    ]
    assert complete(conn, [again]) == ["done"]
    assert counts(conn) == {"completed": 1}


# Broken likewise, by a purge that answers true when it found nothing, and by an expiry that does
# not look at the age of the row it has locked.
def test_b19_retries_purges_and_retention_share_the_dead_letters(
    database: Database, conn: psycopg.Connection
) -> None:
    many = 300
    ids = [attempt.job_id for attempt in dead(conn, many)]
    conn.execute(
        "UPDATE awa.dlq_entries SET dlq_at = dlq_at - interval '40 days' WHERE job_id = ANY (%s)",
        [ids[::3]],
    )
    answers: Counter[str] = Counter()
    retried: list[int] = []
    lock = threading.Lock()

    def operator(seed: int) -> None:
        chance = random.Random(seed)
        calls = {"retry": RETRY, "purge": "SELECT awa.purge_dlq(%s)"}
        with database.connect() as mine:
            for job_id in chance.sample(ids, many):
                what = chance.choice(["retry", "purge"])
                answer = outcome(mine, calls[what], job_id)
                with lock:
                    answers[f"{what} {answer}"] += 1
                    if answer == "available":
                        retried.append(job_id)

    def retention() -> None:
        with database.connect() as mine:
            while any(not operator.done() for operator in operators):
                rows = 'SELECT rows FROM awa.tick(\'{"steps": ["expire"], "rows": 5}\')'
                with lock:
                    answers["expired"] += value(mine, rows) or 0

    with ThreadPoolExecutor(6) as pool:
        operators = [pool.submit(operator, seed) for seed in range(5)]
        pool.submit(retention).result()
        for running in operators:
            running.result()
    assert set(answers) == {
        *("retry available", "retry 42704", "purge True", "purge False", "expired")
    }
    assert len(retried) == len(set(retried))
    assert answers["retry available"] + answers["purge True"] + answers["expired"] == many
    assert counts(conn) == {"available": len(retried)}
    assert sorted(a.job_id for a in claim_all(conn)) == sorted(retried)


# Broken by a replay that takes the key whoever holds it (_take_dead_letter without its check).
@pytest.mark.parametrize("call", ["retry_dlq", "retry_job"])
def test_b19_a_replay_whose_key_is_held_names_the_holder_and_stays(
    conn: psycopg.Connection, call: str
) -> None:
    job_id = insert(conn, opts={"unique": {}})
    [attempt] = claim(conn)
    assert finish(conn, [attempt.item("fail")]) == ["done"]
    holder = insert(conn, opts={"unique": {}})
    assert holder != job_id
    with pytest.raises(psycopg.errors.UniqueViolation) as error:
        conn.execute(f"SELECT awa.{call}(%s)".encode(), [job_id])
    told = f"{error.value.diag.message_primary} {error.value.diag.message_detail}"
    assert str(holder) in told
    assert counts(conn) == {"available": 1, "dead_lettered": 1}
    assert complete(conn, claim(conn)) == ["done"]
    # A completed job holds its key as well, by the default states.
    assert outcome(conn, f"SELECT (awa.{call}(%s)).state", job_id) == "23505"
    assert counts(conn) == {"completed": 1, "dead_lettered": 1}


# Broken by a replay that needs a row of the queue (queue_meta), or a lane that is there already.
def test_b19_a_replay_goes_to_a_queue_that_nobody_knows_any_more(
    database: Database, conn: psycopg.Connection
) -> None:
    [attempt, other] = dead(conn, 2)
    conn.execute("DELETE FROM awa.queue_meta")
    assert outcome(conn, RETRY, attempt.job_id) == "available"
    row = conn.execute(
        "SELECT * FROM awa.retry_dlq(%s, %s)", [other.job_id, Jsonb({"queue": "new name"})]
    )
    assert row.fetchone() is not None
    assert [a.job_id for a in claim_all(conn)] == [attempt.job_id]
    assert [a.job_id for a in claim_all(conn, "new name")] == [other.job_id]


# Broken by a failure that is written before its closure is (_move_attempt before the look).
def test_b19_two_reports_of_one_failure_at_once_make_one_dead_letter(
    database: Database, conn: psycopg.Connection
) -> None:
    set_settings(conn, errors_max_count=5)
    insert_many(conn, 20)
    attempts = claim(conn, limit=20)
    items = [a.item("fail", error="no") for a in attempts]
    answers: Counter[str] = Counter()

    def report(seed: int) -> list[str]:
        with database.connect() as mine:
            mixed = random.Random(seed).sample(items, 20)
            return [answer for item in mixed for answer in finish(mine, [item])]

    with ThreadPoolExecutor(4) as pool:
        for told in pool.map(report, range(4)):
            answers.update(told)
    assert set(answers) <= {"done", "already_done", "busy"}
    finish(conn, items)
    assert counts(conn) == {"dead_lettered": 20}
    assert value(conn, "SELECT count(*) FROM awa.dlq") == 20
    assert value(conn, "SELECT max(jsonb_array_length(errors)) FROM awa.dlq") == 1
    assert "failed" not in tick(conn).values()
