"""Unique jobs among many sessions: races end in one job, and nobody waits who need not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.types.json import Jsonb

import awa
from conftest import Database
from engine import (
    WAIT_SECONDS,
    claim,
    claim_all,
    complete,
    finish,
    insert,
    insert_many,
    rotate,
    set_settings,
    tick,
    value,
    wait_until_blocked,
)

SESSIONS = 50
NARROW = ["scheduled", "available", "retryable"]  # a running job does not hold its key


@dataclass(frozen=True, slots=True)
class Answer:
    """What an insert said."""

    job_id: int
    state: str
    duplicate: bool


def unique(conn: psycopg.Connection, name: str, queue: str = "default", **parts: object) -> Answer:
    """Insert a job whose key is made of its name, unless the option says otherwise."""
    row = conn.execute(
        "SELECT job_id, state::text, duplicate FROM"
        " awa.insert_job('k', to_jsonb(%s::text), %s, opts => %s)",
        [name, queue, Jsonb({"unique": parts})],
    ).fetchone()
    assert row
    return Answer(*row)


def state(conn: psycopg.Connection, job_id: int) -> str:
    return str(value(conn, "SELECT (awa.job(%s)).state", job_id))


def make_due(conn: psycopg.Connection) -> None:
    conn.execute("UPDATE awa.deferred_jobs SET run_at = clock_timestamp()")


def test_a_snapshot_that_cannot_see_the_holder_is_refused(
    database: Database, conn: psycopg.Connection
) -> None:
    with database.connect(autocommit=False) as old:
        old.isolation_level = IsolationLevel.REPEATABLE_READ
        old.execute("SELECT 1")
        mine = unique(conn, "one")
        with pytest.raises(psycopg.errors.SerializationFailure):
            unique(old, "one")
        old.rollback()
        assert unique(old, "one") == Answer(mine.job_id, "available", True)


# Each holder is alive in the snapshot. Broken by a look at the claim as the snapshot shows it, and
# by one that takes the job of the newest claim for what the snapshot says of it.
@pytest.mark.parametrize(
    ("states", "outcome", "expected"),
    [
        (None, "completed", "duplicate"),
        (None, "fail", "new"),
        (["available", "failed"], "fail", "refused"),
        (NARROW, "completed", "refused"),
        (NARROW, "retry", "refused"),
        (NARROW, None, "refused"),
        (["available", "running"], "completed", "refused"),
    ],
)
def test_a_snapshot_does_not_take_an_ended_job_for_the_holder(
    database: Database,
    conn: psycopg.Connection,
    states: list[str] | None,
    outcome: str | None,
    expected: str,
) -> None:
    mine = unique(conn, "one", states=states)
    with database.connect(autocommit=False) as old:
        old.isolation_level = IsolationLevel.REPEATABLE_READ
        old.execute("SELECT 1")
        [attempt] = claim(conn)
        if outcome == "completed":
            assert complete(conn, [attempt]) == ["done"]
        elif outcome:
            assert finish(conn, [attempt.item(outcome)]) == ["done"]
        if expected == "refused":
            with pytest.raises(psycopg.errors.SerializationFailure):
                unique(old, "one", states=states)
            old.rollback()
        else:
            answer = unique(old, "one", states=states)
            old.commit()
            assert answer.duplicate == (expected == "duplicate")
            assert (answer.job_id == mine.job_id) == answer.duplicate
            assert unique(conn, "one", states=states).job_id == answer.job_id


# Broken by taking a key for one's own that is a transaction old (_still_holds, "age(c.xmin) <= 1").
def test_a_snapshot_does_not_take_the_job_of_the_last_transaction_for_its_own(
    database: Database, conn: psycopg.Connection
) -> None:
    with database.connect(autocommit=False) as old:
        old.isolation_level = IsolationLevel.REPEATABLE_READ
        unique(conn, "one", states=NARROW)
        with pytest.raises(psycopg.errors.SerializationFailure):
            unique(old, "one", states=NARROW)


def test_a_snapshot_knows_the_jobs_of_its_own_transaction(database: Database) -> None:
    with database.connect(autocommit=False) as mine:
        mine.isolation_level = IsolationLevel.REPEATABLE_READ
        first = unique(mine, "one", states=NARROW)
        mine.execute("SAVEPOINT s")
        second = unique(mine, "two", states=NARROW)
        for name, job in (("one", first), ("two", second)):
            assert not job.duplicate
            assert unique(mine, name, states=NARROW) == Answer(job.job_id, job.state, True)


# Broken by ON CONFLICT DO UPDATE, which locks the claim of a duplicate, without a look before it.
def test_an_idle_producer_of_a_duplicate_stops_nobody(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SET lock_timeout = '1s'")
    mine = unique(conn, "one")
    [attempt] = claim(conn)
    with database.connect(autocommit=False) as idle:
        assert unique(idle, "one").duplicate
        assert finish(conn, [attempt.item("fail")]) == ["done"]
        assert not unique(conn, "one").duplicate
        assert state(conn, mine.job_id) == "failed"


# Broken by taking the key in rescue or retry with a plain insert.
@pytest.mark.parametrize("ends_by", ["commit", "rollback"])
def test_a_retry_does_not_wait_for_a_producer_of_its_key(
    database: Database, conn: psycopg.Connection, ends_by: str
) -> None:
    conn.execute("SET statement_timeout = '5s'")
    mine = unique(conn, "one", states=NARROW)
    [attempt] = claim(conn)
    with database.connect(autocommit=False) as producer:
        newer = unique(producer, "one", states=NARROW)
        assert not newer.duplicate
        assert finish(conn, [attempt.item("retry", delay_seconds=0)]) == ["done"]
        others = [insert(conn, opts={"delay_seconds": 0.001}) for _ in range(30)]
        make_due(conn)
        assert tick(conn, "promote") == {"promote": "done"}
        assert {state(conn, job_id) for job_id in others} == {"available"}
        assert state(conn, mine.job_id) == "retryable"
        getattr(producer, ends_by)()
    assert tick(conn, "promote") == {"promote": "done"}
    if ends_by == "commit":
        assert state(conn, mine.job_id) == "cancelled"
        reason = value(conn, "SELECT (awa.job(%s)).reason", mine.job_id)
        assert reason == f"unique key held by job {newer.job_id}"
    else:
        assert state(conn, mine.job_id) == "available"
        assert unique(conn, "one", states=NARROW).job_id == mine.job_id


def test_a_load_of_100_000_jobs_is_one_transaction(conn: psycopg.Connection) -> None:
    with conn.transaction():
        before = value(conn, "SELECT pg_current_xact_id()::text")
        with conn.cursor().copy("COPY awa.job_inbox (kind, args) FROM STDIN") as copy:
            copy.write("".join(f"k\t{n}\n" for n in range(100_000)))
        xids = conn.execute("SELECT DISTINCT xmin::text FROM awa.ready_entries").fetchall()
    assert xids == [(str(int(before) % 2**32),)]
    assert value(conn, "SELECT (awa.queue_counts('default')).available") == 100_000


def test_claim_and_completion_do_not_touch_the_claims(conn: psycopg.Connection) -> None:
    insert_many(conn, 5)
    unique(conn, "one")
    version = "SELECT array_agg(c.xmin::text || c.ctid::text) FROM awa.job_unique_claims c"
    before = value(conn, version)
    attempts = claim_all(conn)
    assert set(complete(conn, attempts)) == {"done"}
    assert value(conn, version) == before
    assert unique(conn, "one").state == "completed"


# An attempt that outlived its slot ends in leases, away from its body.
def test_a_moved_attempt_keeps_its_key(conn: psycopg.Connection) -> None:
    mine = unique(conn, "one")
    [attempt] = claim(conn)
    moved = value(
        conn,
        "SELECT awa._lease_receipts(%s, %s, 10, clock_timestamp())",
        *(attempt.claim_slot, attempt.batch_id),
    )
    assert moved == 1
    assert unique(conn, "one") == Answer(mine.job_id, "running", True)
    assert complete(conn, [attempt]) == ["done"]
    assert unique(conn, "one") == Answer(mine.job_id, "completed", True)


def turn_ring(conn: psycopg.Connection, times: int) -> None:
    """Turn the queue ring so many times by work and maintenance, retention respected."""
    for _ in range(16 * times):
        insert_many(conn, 20, "filler")
        complete(conn, claim_all(conn, "filler"))
        for step in ("evacuate", "prune_queue"):
            assert tick(conn, step)[step] != "failed"
        rotate(conn)


# Broken by a prune that forgets the claims, and by a claim that ends with its job's history.
def test_a_key_outlives_the_history_of_its_job_until_its_period_ends(
    conn: psycopg.Connection,
) -> None:
    set_settings(conn, terminal_retention_seconds=1, dump_lock_seconds=0)
    # A period that does not end while the test runs.
    left = value(conn, "SELECT 3600 - mod(extract(epoch FROM clock_timestamp()), 3600)")
    period = 3600 if left > 120 else 3601
    long = unique(conn, "long", period_seconds=period)
    short = unique(conn, "short", key="ab" * 16, period_seconds=2)
    plain = unique(conn, "plain")
    waiting = unique(conn, "waiting", queue="paused", period_seconds=period)
    complete(conn, claim_all(conn))
    turn_ring(conn, 2)
    for job in (long, short, plain):
        assert state(conn, job.job_id) == "pruned"
    # Prune has settled them; the sweep need not look for them one by one.
    unsettled = conn.execute("SELECT job_id FROM awa.job_unique_claims WHERE ended IS NULL")
    assert unsettled.fetchall() == [(waiting.job_id,)]
    assert unique(conn, "long", period_seconds=period) == Answer(long.job_id, "completed", True)
    assert unique(conn, "waiting", period_seconds=period).state == "available"
    assert unique(conn, "waiting", period_seconds=period).job_id == waiting.job_id
    # A ring that has no room is pruned before its time, but a key keeps its own.
    end = monotonic() + WAIT_SECONDS
    while unique(conn, "plain").duplicate:
        assert monotonic() < end
    while unique(conn, "short", key="ab" * 16, period_seconds=2).duplicate:
        assert monotonic() < end
    assert not unique(conn, "long", period_seconds=period + 7).duplicate


def fail_while_another_takes_the_key(
    database: Database, conn: psycopg.Connection, name: str, **parts: Any
) -> int:
    """Let a job fail while a producer, which rolls back, has its claim locked; return its id."""
    mine = unique(conn, name, **parts)
    [attempt] = claim(conn)
    with database.connect(autocommit=False) as producer:
        assert not unique(producer, name, **parts).duplicate
        assert finish(conn, [attempt.item("fail")]) == ["done"]
        producer.rollback()
    sql = "SELECT ended IS NULL FROM awa.job_unique_claims WHERE job_id = %s"
    assert value(conn, sql, mine.job_id) is True
    return mine.job_id


# Broken by a look that takes one retention for all ends, and by a sweep that only deletes.
@pytest.mark.parametrize("has_dlq", [False, True])
def test_an_end_that_found_its_claim_locked_is_written_later(
    database: Database, conn: psycopg.Connection, has_dlq: bool
) -> None:
    set_settings(
        conn,
        terminal_retention_seconds=1,
        failed_retention_seconds=1 if has_dlq else 50_000,
        dlq_retention_seconds=50_000 if has_dlq else 1,
        dlq_default=int(has_dlq),
    )
    states = ["available", "failed"]
    mine = fail_while_another_takes_the_key(database, conn, "one", states=states)
    ends_in = (
        "SELECT (k.ends_at - clock_timestamp()) > interval '40000 s'"
        " FROM awa.job_unique_claims c, awa._key_holder(c, clock_timestamp()) k"
    )
    assert value(conn, ends_in)
    assert unique(conn, "one", states=states) == Answer(mine, "failed", True)
    end = monotonic() + WAIT_SECONDS
    while value(conn, "SELECT ended IS NULL FROM awa.job_unique_claims"):
        assert monotonic() < end
        assert tick(conn, "unique_keys") == {"unique_keys": "done"}
    assert value(conn, "SELECT ended FROM awa.job_unique_claims") == "failed"
    assert value(conn, ends_in)
    assert unique(conn, "one", states=states) == Answer(mine, "failed", True)


# Such an end is written at the latest when the job is forgotten: a job without a trace counts as
# completed. Broken by a prune, or an expiry of dead letters, that only thinks of completed jobs.
@pytest.mark.parametrize("has_dlq", [False, True])
def test_a_failed_job_is_not_taken_for_a_completed_one_once_it_is_forgotten(
    database: Database, conn: psycopg.Connection, has_dlq: bool
) -> None:
    set_settings(
        conn,
        terminal_retention_seconds=1,
        dump_lock_seconds=0,
        failed_retention_seconds=1,
        dlq_retention_seconds=1,
        dlq_default=int(has_dlq),
    )
    parts: dict[str, Any] = {"states": ["available", "completed"], "period_seconds": 36_000_000}
    mine = fail_while_another_takes_the_key(database, conn, "one", **parts)
    end = monotonic() + WAIT_SECONDS
    while state(conn, mine) != "pruned":
        assert monotonic() < end
        turn_ring(conn, 1)
        assert tick(conn, "expire") == {"expire": "done"}
    assert value(conn, "SELECT count(*) FROM awa.job_unique_claims") == 0
    assert not unique(conn, "one", **parts).duplicate


# A claim that prune had to leave, because somebody had it locked, is judged by its missing job.
def test_a_claim_whose_job_vanished_belongs_to_a_completed_one(
    database: Database, conn: psycopg.Connection
) -> None:
    set_settings(conn, terminal_retention_seconds=1, dump_lock_seconds=0)
    ids = [unique(conn, "kept", period_seconds=36000).job_id, unique(conn, "free").job_id]
    complete(conn, claim_all(conn))
    with database.connect(autocommit=False) as other:
        other.execute("SELECT FROM awa.job_unique_claims FOR UPDATE")
        turn_ring(conn, 1)
        other.rollback()
    assert [state(conn, job_id) for job_id in ids] == ["pruned", "pruned"]
    assert value(conn, "SELECT count(*) FROM awa.job_unique_claims WHERE ended IS NULL") == 2
    assert unique(conn, "kept", period_seconds=36000) == Answer(ids[0], "completed", True)
    assert not unique(conn, "free").duplicate


@pytest.mark.parametrize("ends_by", ["commit", "rollback"])
def test_a_replaced_job_is_not_claimed_until_its_replacement_commits(
    database: Database, conn: psycopg.Connection, ends_by: str
) -> None:
    policy: dict[str, Any] = {"by": [], "on_conflict": "replace"}
    mine = unique(conn, "old", **policy)
    behind = insert(conn)
    with database.connect(autocommit=False) as producer:
        assert unique(producer, "new", **policy).job_id == mine.job_id
        assert [a.job_id for a in claim(conn)] == [behind]
        getattr(producer, ends_by)()
    rows = conn.execute(
        "SELECT job_id, args FROM awa.claim_ready_runtime('default', 10, gen_random_uuid())"
    ).fetchall()
    assert rows == [(mine.job_id, "new" if ends_by == "commit" else "old")]


def test_a_claim_and_a_replacement_of_one_job_do_not_both_happen(
    database: Database, conn: psycopg.Connection
) -> None:
    policy: dict[str, Any] = {"by": [], "on_conflict": "replace"}
    mine = unique(conn, "old", **policy)
    with database.connect(autocommit=False) as worker, ThreadPoolExecutor(1) as pool:
        [attempt] = claim(worker)
        with database.connect() as producer:
            waiting = pool.submit(unique, producer, "new", **policy)
            wait_until_blocked(conn, producer)
            worker.commit()
            assert waiting.result(WAIT_SECONDS) == Answer(mine.job_id, "running", True)
    assert complete(conn, [attempt]) == ["done"]
    assert claim_all(conn) == []


def test_many_unique_jobs_in_one_call(conn: psycopg.Connection) -> None:
    def insert_range(first: int, last: int) -> Sequence[Any]:
        return conn.execute(
            "SELECT awa.insert_many('k', ARRAY(SELECT to_jsonb(g / 2)"
            " FROM generate_series(%s::integer, %s) g), opts => '{\"unique\": {}}')",
            [first, last],
        ).fetchall()

    first = insert_range(0, 3999)
    assert len(set(first)) == 2000
    again = insert_range(3000, 4999)
    assert again[:1000] == first[3000:]
    assert len(claim_all(conn, limit=1000)) == 2500


def test_a_task_inserts_unique_jobs(conn: psycopg.Connection) -> None:
    handlers = awa.Handlers()

    @handlers.task(unique={"by": ["args.to"]})
    def send(to: str, subject: str) -> None: ...

    first = send.insert(conn, "ada", "hi")
    again = send.insert(conn, "ada", "hello")
    assert (again.job_id, again.duplicate) == (first.job_id, True)
    assert not send.insert(conn, "bob", "hi").duplicate
    assert not send.options(unique=False).insert(conn, "ada", "hi").duplicate
    strict = send.options(unique={"by": ["args.to"], "on_conflict": "raise"})
    with pytest.raises(awa.UniqueConflict):
        strict.insert(conn, "ada", "hi")
    with pytest.raises(awa.InvalidArgument, match="unique"):
        send.options(unique={"key": "short"}).insert(conn, "ada", "hi")
