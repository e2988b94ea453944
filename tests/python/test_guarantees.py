"""Guarantees of the engine, each with tests that were seen to fail when it is broken.

Above each test stands how it was broken once. G8 is in test_plans.py, dumps (G1) in
test_dump_restore.py, races of real processes in test_race.py.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import IsolationLevel, sql
from psycopg.types.json import Jsonb

from conftest import Database, DatabaseServer
from engine import (
    PRUNE_AT_ONCE,
    WAIT_SECONDS,
    WORKER,
    Attempt,
    claim,
    claim_all,
    complete,
    complete_open,
    counts,
    finish,
    insert,
    insert_many,
    open_transaction,
    prune_all,
    read_buffers,
    rotate,
    set_settings,
    terminate,
    tick,
    value,
    wait_until_blocked,
)

OTHER = uuid.UUID(int=2, version=4)


@contextmanager
def paused(conn: psycopg.Connection, function: str, point: str) -> Iterator[Callable[[], None]]:
    """Make a function halt at one of its pause points; yields a way to wait until it does."""
    source = value(conn, "SELECT pg_get_functiondef(%s::regproc)", f"awa.{function}")
    halt = (
        f"PERFORM pg_try_advisory_xact_lock_shared(77, hashtext('{point}'));"
        f" WHILE EXISTS (SELECT FROM public.halted h WHERE h.point = '{point}') LOOP"
        " PERFORM pg_sleep(0.002); END LOOP;"
    )
    assert halt in source or f"-- pause point: {point}\n" in source
    conn.execute("CREATE TABLE IF NOT EXISTS public.halted (point text)")
    conn.execute("GRANT SELECT ON public.halted TO PUBLIC")
    conn.execute("INSERT INTO public.halted VALUES (%s)", [point])
    conn.execute(source.replace(f"-- pause point: {point}\n", halt + "\n").encode())

    def wait() -> None:
        end = time.monotonic() + WAIT_SECONDS
        held = "SELECT count(*) FROM pg_locks WHERE classid = 77 AND objid = hashtext(%s)::oid"
        while not value(conn, held, point):
            assert time.monotonic() < end, f"{function} never came to {point}"

    try:
        yield wait
    finally:
        conn.execute("DELETE FROM public.halted WHERE point = %s", [point])


# ---- G1: a committed job is never lost


# Broken by dropping gaps without proof (_next_emission, "ELSIF p_quiet" made "ELSIF true").
def test_g1_a_job_that_commits_late_outlives_rotations_and_prunes(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    with open_transaction(database) as late:
        job_id = insert(late)
        for _ in range(20):
            insert_many(conn, 5)
            complete(conn, claim_all(conn))
            rotate(conn)
            prune_all(conn)
        late.commit()
    assert [attempt.job_id for attempt in claim_all(conn)] == [job_id]


# Broken by a claim that asks for no proof by locks while the horizon is ahead (_claim_lane).
def test_g1_a_lane_is_known_to_be_idle_although_an_old_transaction_stays(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    with open_transaction(database) as old:
        old.execute("SELECT pg_current_xact_id()")
        with open_transaction(database) as producer:
            insert(producer)
        insert(conn)
        end = time.monotonic() + WAIT_SECONDS
        while value(conn, "SELECT (awa.claim_status('default')).reason") != "idle":
            assert time.monotonic() < end
            claim_all(conn)


# Broken by a prune that does not ask for waiting jobs (_waiting_lanes_in_slot).
def test_g1_jobs_that_wait_outlive_rotations_and_prunes(conn: psycopg.Connection) -> None:
    waiting = insert_many(conn, 3, "quiet")
    for _ in range(20):
        insert(conn)
        complete(conn, claim_all(conn))
        rotate(conn)
        prune_all(conn)
    assert [attempt.job_id for attempt in claim_all(conn, "quiet")] == waiting


KILLED_WORKER = """
import json, sys, time, psycopg
with psycopg.connect(sys.argv[1], autocommit=True) as conn:
    conn.execute("SELECT awa.heartbeat(%s)", [sys.argv[2]])
    rows = conn.execute(
        "SELECT job_id, run_lease, attempt, claim_slot, batch_id, position, kind"
        " FROM awa.claim_ready_runtime('default', 50, %s)", [sys.argv[2]]).fetchall()
    print(json.dumps(rows), flush=True)
    time.sleep(600)
"""


# Broken by a rescue that closes attempts without moving their jobs (_rescue_positions).
def test_g1_jobs_of_a_killed_worker_run_again(conn: psycopg.Connection, database: Database) -> None:
    set_settings(conn, heartbeat_seconds=0.1, staleness_seconds=0.3)
    conn.execute(
        "SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[50]),"
        ' opts => \'{"backoff": {"delays": [0]}}\')'
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", KILLED_WORKER, database.dsn, str(OTHER)], stdout=subprocess.PIPE
    )
    with worker:
        assert worker.stdout
        dead = [Attempt(*row) for row in json.loads(worker.stdout.readline())]
        worker.send_signal(signal.SIGKILL)
    assert len(dead) == 50
    again: list[Attempt] = []
    end = time.monotonic() + WAIT_SECONDS
    while len(again) < 50 and time.monotonic() < end:
        tick(conn, "rescue", "promote")
        again += claim(conn)
    assert {(a.attempt, a.run_lease) for a in again} == {(2, 2)}
    assert {a.job_id for a in again} == {a.job_id for a in dead}
    assert set(finish(conn, [a.item("completed") for a in dead], OTHER)) == {"stale"}
    statuses = {
        value(conn, "SELECT awa.attempt_status(%s, %s, %s, %s, %s)", *a.token) for a in dead
    }
    assert statuses == {"rescued"}
    assert set(complete(conn, again)) == {"done"}
    assert counts(conn) == {"completed": 50}
    closures = conn.execute(
        "SELECT c.outcome, count(*), count(DISTINCT (c.batch_id, p))"
        " FROM awa.lease_claim_closures c, unnest(awa._to_list(c.closed)) p GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert closures == [("completed", 50, 50), ("rescued", 50, 50)]


# ---- G2: an attempt has one owner


def stale_attempt(conn: psycopg.Connection, closing: str) -> Attempt:
    """An attempt that ended in the given way while its worker goes on."""
    job_id = insert(conn, opts={"backoff": {"delays": [0]}, "keep_result": True})
    [attempt] = claim(conn, deadline_seconds=0.001)
    if closing == "rescued":
        while tick(conn, "rescue") and counts(conn).get("running"):
            pass
    elif closing == "cancelled":
        assert value(conn, "SELECT awa.cancel_job(%s)", job_id) == "cancelled_running"
    else:
        fields = {"delay_seconds": 0} if closing in ("retry", "snooze") else {}
        assert finish(conn, [attempt.item(closing, **fields)]) == ["done"]
    return attempt


# Broken by finishing without regard to closures (_finish_batch and _complete_attempts).
@pytest.mark.parametrize(
    "closing",
    ["rescued", "cancelled", "completed", "retry", "snooze", "released", "fail"],
)
def test_g2_a_stale_token_changes_nothing_and_is_told(
    conn: psycopg.Connection, closing: str
) -> None:
    attempt = stale_attempt(conn, closing)
    tick(conn, "promote")
    before = counts(conn), value(conn, "SELECT awa.job(%s)::text", attempt.job_id)
    same = {"completed": "completed", "cancelled": "cancel"}.get(closing, closing)
    for outcome in ("completed", "retry", "snooze", "cancel", "fail", "released"):
        item = attempt.item(outcome, result=1, error="late", delay_seconds=5)
        [answer] = finish(conn, [item])
        # The same outcome again is what a lost answer looks like.
        repeats = outcome == same or (closing == "fail" and outcome == "retry")
        assert answer == ("already_done" if repeats else "stale"), outcome
    expected = "already_done" if closing == "completed" else "stale"
    assert complete(conn, [attempt]) == [expected]
    with pytest.raises(psycopg.Error) as error:
        conn.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
    assert error.value.sqlstate == "JQ001"
    progress = "SELECT awa.set_progress(%s, %s, %s, %s, %s, '{}')"
    assert value(conn, progress, *attempt.token) is False
    holds = [
        {
            "claim_slot": attempt.claim_slot,
            "batch_id": attempt.batch_id,
            "positions": [attempt.position],
        }
    ]
    told = value(conn, "SELECT (awa.heartbeat(%s, %s)).cancelled", WORKER, Jsonb(holds))
    assert [hold["position"] for hold in told] == [attempt.position]
    assert (counts(conn), value(conn, "SELECT awa.job(%s)::text", attempt.job_id)) == before


# Broken by not comparing the lease, the owner, and the claimed positions.
def test_g2_a_forged_token_changes_nothing(conn: psycopg.Connection) -> None:
    insert_many(conn, 2)
    [attempt] = claim(conn, limit=1)
    token = dict(attempt.item("completed"))
    forged = [token | {key: int(str(token[key])) + 1} for key in list(token) if key != "outcome"]
    for item in forged:
        assert finish(conn, [item]) == ["stale"], item
        fields = [item[k] for k in ("job_id", "run_lease", "claim_slot", "batch_id", "position")]
        with pytest.raises(psycopg.Error) as error:
            conn.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", fields)
        assert error.value.sqlstate == "JQ001"
    assert finish(conn, [attempt.item("completed")], OTHER) == ["stale"]
    assert complete(conn, [attempt], OTHER) == ["stale"]
    assert counts(conn) == {"available": 1, "running": 1}
    assert finish(conn, [attempt.item("completed")]) == ["done"]


# Broken by a finish that takes no lock of the batch (_finish_attempts): it waits for the cancel.
@pytest.mark.parametrize("outcome", ["completed", "retry"])
def test_g2_a_finish_is_told_that_its_batch_is_busy(
    database: Database, conn: psycopg.Connection, outcome: str
) -> None:
    first, _ = insert_many(conn, 2)
    [_, attempt] = claim(conn)
    conn.execute("SET statement_timeout = '5s'")
    with open_transaction(database) as canceller:
        assert value(canceller, "SELECT awa.cancel_job(%s)", first) == "cancelled_running"
        assert finish(conn, [attempt.item(outcome)]) == ["busy"]
    assert finish(conn, [attempt.item(outcome)]) == ["done"]


# Broken by a cancel that notifies nobody (_cancel_running).
def test_g2_a_cancel_of_a_running_job_is_notified(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = insert(conn)
    claim(conn)
    channel = value(conn, "SELECT (awa.claim_status('default')).channel")
    with database.connect() as listener:
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        assert value(conn, "SELECT awa.cancel_job(%s)", job_id) == "cancelled_running"
        heard = [n.payload for n in listener.notifies(timeout=WAIT_SECONDS, stop_after=1)]
    assert heard == ["cancel"]


# Broken by a notification that does not ask for the option of its queue (_notify_workers).
def test_g2_a_queue_without_notifications_tells_nobody(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.declare_queue('default', %s)", ['{"notify": false}'])
    job_id = insert(conn)
    claim(conn)
    channel = value(conn, "SELECT awa._channel('default')")
    with database.connect() as listener:
        listener.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        assert value(conn, "SELECT awa.cancel_job(%s)", job_id) == "cancelled_running"
        conn.execute("SELECT pg_notify(%s, 'the next one')", [channel])
        [heard] = listener.notifies(timeout=WAIT_SECONDS, stop_after=1)
    assert heard.payload == "the next one"


# Broken by going on at the position of the second look, without its lock (_lock_ready).
@pytest.mark.parametrize(
    "change",
    [
        "SELECT awa.cancel_job(%(id)s)",
        "SELECT awa.update_job(%(id)s, '{\"max_attempts\": 3}')",
        "SELECT awa._replace_args(%(id)s, '{\"n\": 2}', now())",
    ],
)
def test_g2_a_change_locks_a_job_where_it_lies(
    database: Database, conn: psycopg.Connection, change: str
) -> None:
    [job_id] = insert_many(conn, 1)
    with open_transaction(database) as first, open_transaction(database) as second:
        first.execute("SELECT awa.update_job(%s, '{\"priority\": 1}')", [job_id])
        second.execute("SELECT 1")
        changing = threading.Thread(target=lambda: second.execute(change, {"id": job_id}))
        changing.start()
        wait_until_blocked(conn, second)
        first.commit()  # moves the job to another lane
        changing.join()
        assert claim(conn) == []  # the second change is not committed: the job is locked
        second.commit()
    claimed = [attempt.job_id for attempt in claim_all(conn)]
    assert claimed == ([] if "cancel" in change else [job_id])
    assert total(conn) == 1


# Broken by a claim without the lane lock.
def test_g2_two_claims_at_once_share_nothing(database: Database, conn: psycopg.Connection) -> None:
    insert_many(conn, 20)
    with open_transaction(database) as first:
        mine = claim(first, limit=10)
        assert claim(conn) == []  # the lane is busy, and the second one waits a moment at most
        first.commit()
    theirs = claim(conn)
    assert len(mine) == len(theirs) == 10
    assert not {a.job_id for a in mine} & {a.job_id for a in theirs}


# Broken by a claim that goes away when its lane is busy (no second round in _claim_ready),
# and by one that, having waited, reads the lane's tail as it was before.
def test_g2_a_claim_waits_for_another_one_and_takes_what_came_meanwhile(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("ALTER FUNCTION awa._wait_for_lane SET lock_timeout = '1min'")
    ids = insert_many(conn, 10)
    theirs: list[Attempt] = []
    with database.connect() as waiting, open_transaction(database) as first:
        mine = claim(first)
        second = threading.Thread(target=lambda: theirs.extend(claim(waiting)))
        second.start()
        wait_until_blocked(conn, waiting)
        later = insert_many(conn, 5)
        first.commit()
        second.join()
    assert [a.job_id for a in mine] == ids
    assert [a.job_id for a in theirs] == later


# Broken by a claim_max_bytes of 16 MiB: the lane stayed locked until the client read on.
def test_g2_a_client_that_does_not_read_its_claim_stops_no_other_claim(
    database: Database, conn: psycopg.Connection
) -> None:
    wide = "SELECT awa.insert_many('k', array_fill(to_jsonb(repeat('x', 100000)), ARRAY[200]))"
    ids = [job_id for (job_id,) in conn.execute(wide)]
    stopped = database.connect()
    pid = stopped.info.backend_pid
    statement = b"SELECT * FROM awa.claim_ready_runtime('default', 500, $1)"
    stopped.pgconn.send_query_params(statement, [str(OTHER).encode()])
    while stopped.pgconn.flush():
        pass
    state = (
        "SELECT string_agg(state, '') FROM pg_stat_activity"
        " WHERE pid = %s AND query LIKE '%%claim_ready%%'"
    )
    end = time.monotonic() + WAIT_SECONDS
    while value(conn, state, pid) != "idle":
        assert time.monotonic() < end, "the claim waits for its client"
    theirs = [attempt.job_id for attempt in claim(conn)]
    assert theirs
    assert theirs[0] in ids[1:]
    stopped.pgconn.finish()


# Broken by not locking the slot of the emission before reading the ledger (_claim_lane): its row
# then lay in a slot that had become a newer one, and hid the claims in between.
def test_g2_a_claim_that_sleeps_while_the_ring_turns_does_not_hide_later_ones(
    database: Database, conn: psycopg.Connection
) -> None:
    set_settings(conn, **PRUNE_AT_ONCE)
    first = insert(conn)
    rotate(conn)
    slept_in = value(conn, "SELECT last_value & 63 FROM awa.queue_ring")
    slow: list[Attempt] = []
    newest = "SELECT slot FROM awa.queue_ring_rotations ORDER BY generation DESC LIMIT 1"
    with database.connect() as sleeper:
        sleeping = threading.Thread(target=lambda: slow.extend(claim(sleeper, limit=1)))
        with paused(conn, "_claim_lane", "probe") as claim_waits:
            sleeping.start()
            claim_waits()
            for turn in range(20):
                conn.execute("SELECT awa.cancel_job(%s)", [insert(conn, "other")])
                tick(conn, "plan_queue")
                if turn and value(conn, newest) == slept_in:
                    break  # planned again, and not current yet
                tick(conn, "publish_queue")
                tick(conn, "prune_queue")
        sleeping.join()
    assert [attempt.job_id for attempt in slow] == [first]
    ids = insert_many(conn, 3)
    assert [attempt.job_id for attempt in claim(conn, limit=1)] == ids[:1]
    tick(conn, "publish_queue")
    assert [attempt.job_id for attempt in claim(conn)] == ids[1:]


# Broken by setting the lane's hint in the claim itself: a sequence remembers what rolled back.
def test_g2_a_claim_that_is_rolled_back_can_be_claimed_again(
    database: Database, conn: psycopg.Connection
) -> None:
    ids = insert_many(conn, 10)
    for _ in range(3):
        with open_transaction(database) as victim:
            assert [a.job_id for a in claim(victim)] == ids
            terminate(conn, victim)
    again = claim(conn)
    assert [(a.job_id, a.run_lease) for a in again] == [(job_id, 1) for job_id in ids]


# ---- G3: enqueue is transactional, and nobody waits for another producer


# Broken by taking the strict_fifo lock on every queue (_producer_lane).
def test_g3_a_producer_that_idles_stops_neither_producers_nor_claims(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    complete(conn, claim(conn))
    with open_transaction(database) as idle, open_transaction(database) as other:
        late = insert(idle)
        prompt = insert(other)
        other.commit()
        assert [a.job_id for a in claim_all(conn)] == [prompt]
        idle.commit()
    assert [a.job_id for a in claim_all(conn)] == [late]


# Broken by waiting for the lane that another transaction creates (_create_lane without "try").
def test_g3_nobody_waits_for_the_creator_of_a_brand_new_queue(
    database: Database, conn: psycopg.Connection
) -> None:
    with open_transaction(database) as creator, open_transaction(database) as other:
        late = insert(creator, "new")
        prompt = insert(other, "new")
        bulk = insert_many(other, 3, "new")
        other.commit()
        tick(conn)
        assert {a.job_id for a in claim_all(conn, "new")} == {prompt, *bulk}
        creator.commit()
    assert [a.job_id for a in claim_all(conn, "new")] == [late]


# Broken in the same two ways.
@pytest.mark.parametrize("new", [False, True])
def test_g3_two_queues_in_opposite_order_do_not_deadlock(
    database: Database, conn: psycopg.Connection, new: bool
) -> None:
    if not new:
        insert(conn, "p")
        insert(conn, "q")
    with open_transaction(database) as a, open_transaction(database) as b:
        ids = {insert(a, "p"), insert(b, "q")}
        ids |= {insert(a, "q"), insert(b, "p")}
        a.commit()
        b.commit()
    tick(conn)
    found = {x.job_id for queue in ("p", "q") for x in claim_all(conn, queue)}
    assert ids <= found


# Broken by counting jobs from the lane's sequence instead of its rows (_count_available).
def test_g3_jobs_are_visible_on_commit_and_gone_on_rollback(
    database: Database, conn: psycopg.Connection
) -> None:
    with open_transaction(database) as producer:
        insert_many(producer, 3)
        insert(producer, opts={"delay_seconds": 60})
        with producer.transaction(force_rollback=True):
            insert_many(producer, 5)
        assert counts(conn) == {}
        producer.commit()
        assert counts(conn) == {"available": 3, "scheduled": 1}
        insert_many(producer, 7)
        insert(producer, opts={"delay_seconds": 60})
        producer.rollback()
    assert counts(conn) == {"available": 3, "scheduled": 1}
    assert len(claim_all(conn)) == 3


# Broken by not taking the strict_fifo lock.
def test_g3_producers_of_a_strict_fifo_lane_follow_each_other(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.declare_queue('strict', '{\"strict_fifo\": true}')")
    with open_transaction(database) as first, open_transaction(database) as second:
        ids = [insert(first, "strict")]
        blocked = threading.Thread(target=lambda: ids.append(insert(second, "strict")))
        blocked.start()
        assert wait_until_blocked(conn, second) == [first.info.backend_pid]
        first.commit()
        blocked.join()
        second.commit()
    assert [a.job_id for a in claim(conn, "strict")] == ids


# ---- G4: order within a lane


# Broken by sorting candidates downwards (_see_rows); the late job by never probing gaps there.
def test_g4_claims_follow_the_lane_and_a_late_job_comes_first(
    database: Database, conn: psycopg.Connection
) -> None:
    ids = [insert(conn), *insert_many(conn, 9), insert(conn)]
    assert [a.job_id for n in (1, 3, 7) for a in claim(conn, limit=n)] == ids
    with open_transaction(database) as slow:
        late = insert(slow)
        prompt = insert_many(conn, 20)
        assert [a.job_id for a in claim(conn, limit=5)] == prompt[:5]
        rotate(conn)
        more = insert_many(conn, 5)
        assert [a.job_id for a in claim(conn, limit=5)] == prompt[5:10]
        slow.commit()
    rest = [a.job_id for n in (5, 7, 9) for a in claim(conn, limit=n)]
    assert rest == [late, *prompt[10:], *more]


# Broken by no aging at all (_choose_lanes).
def test_g4_a_low_priority_job_starts_within_three_aging_steps(conn: psycopg.Connection) -> None:
    step = 0.2
    set_settings(conn, aging_seconds=step)
    low = insert(conn, priority=4)
    began = time.monotonic()
    slowest = 0.0
    while True:
        round_began = time.monotonic()
        conn.execute(
            "SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[25]), priority => 1)"
        )
        claimed = {a.job_id for a in claim(conn, limit=25)}
        slowest = max(slowest, time.monotonic() - round_began)
        if low in claimed:
            break
        assert time.monotonic() - began < 3 * step + slowest
    assert slowest < step, "this machine is too slow for the test"


# ---- G5: no dead tuples


RING_TABLES = (
    "^(ready_entries|ready_tombstones|ready_claim_attempt_batches|done_entries"
    "|receipt_completion_batches|lease_claim_batches|lease_claim_closures)_[0-9]+$"
    "|^(queue|claim)_ring_rotations$"
)


def written(conn: psycopg.Connection) -> dict[str, tuple[int, int, int]]:
    """Inserted, updated and deleted rows of tables that were written to."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    rows = conn.execute(
        "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables"
        " WHERE schemaname = 'awa' AND n_tup_ins + n_tup_upd + n_tup_del > 0"
    )
    return {name: (ins, upd, dele) for name, ins, upd, dele in rows.fetchall()}


# Broken by an UPDATE of the claimed rows in _claim_lane, and by a DELETE of them in
# _complete_attempts.
def test_g5_a_pinned_snapshot_meets_no_dead_tuple_on_the_hot_path(
    database: Database, conn: psycopg.Connection, server_version: int
) -> None:
    jobs, rounds = 250, 12
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as pin:
        pin.execute("SELECT FROM awa.queue_meta")
        pruned = 0
        costs = []
        for _ in range(rounds):
            insert_many(conn, jobs)
            insert(conn)
            costs.append(
                read_buffers(
                    conn, "SELECT * FROM awa.claim_ready_runtime('default', 50, %s)", OTHER
                )
            )
            done = complete(conn, claim_all(conn, limit=50))
            assert len(done) == jobs + 1 - 50
            assert complete_open(conn, OTHER) == 50
            for ring in ("queue", "claim"):
                rotate(conn, ring)
                pruned += prune_all(conn, ring)
        end = time.monotonic() + WAIT_SECONDS
        while sum(n for name, (n, _, _) in written(conn).items() if "ready_entries_" in name) < (
            jobs * rounds
        ):
            assert time.monotonic() < end, "statistics never arrived"
        tables = written(conn)
        ring_tables = {
            name: changes
            for name, changes in tables.items()
            if value(conn, "SELECT %s ~ %s", name, RING_TABLES)
        }
        assert len(ring_tables) > 20
        assert {n: c for n, c in ring_tables.items() if c[1:] != (0, 0)} == {}
        # What is updated at all is updated per prune or heartbeat, never per job.
        del tables["setting_overrides"]  # this test writes them
        assert {n: c for n, c in tables.items() if sum(c[1:]) > pruned + rounds} == {}
        assert counts(conn) == {"completed": (jobs + 1) * rounds}
        assert pruned > rounds
        assert max(costs[3:]) <= 1.25 * max(costs[1:3]), costs
        if value(conn, "SELECT count(*) FROM pg_available_extensions WHERE name = 'pgstattuple'"):
            conn.execute("CREATE EXTENSION pgstattuple SCHEMA public")
            dead = conn.execute(
                "SELECT c.relname, public.pgstattuple(c.oid) FROM pg_class c"
                " WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'r'"
                " AND c.relname ~ %s AND (public.pgstattuple(c.oid)).dead_tuple_count > 0",
                [RING_TABLES],
            ).fetchall()
            assert dead == []


# ---- G7: maintenance is safe with any number of callers, killed anywhere

STEPS = (
    *("publish_queue", "publish_claim", "plan_queue", "plan_claim", "refill", "promote", "rescue"),
    *("expire", "unique_keys", "instances", "hints", "evacuate", "prune_attempts", "prune_claim"),
    *("prune_queue", "prune_deferred"),
)


def busy_database(conn: psycopg.Connection) -> None:
    """Give every step of tick something to do."""
    set_settings(conn, staleness_seconds=0.2, heartbeat_seconds=0.05, dlq_retention_seconds=1)
    set_settings(conn, instance_retention_seconds=60)
    conn.execute("SELECT awa.declare_queue('default', '{\"dlq\": true}')")
    insert_many(conn, 20)
    complete(conn, claim(conn))
    for ring in ("queue", "claim"):
        rotate(conn, ring)
    insert_many(conn, 10)
    finish(conn, [a.item("fail") for a in claim(conn, limit=5)])
    finish(conn, [a.item("retry", delay_seconds=0) for a in claim(conn, limit=3)])
    claim(conn, limit=2, deadline_seconds=0.001)
    insert(conn, opts={"delay_seconds": 0.001})
    conn.execute("SELECT awa.register_instance(%s)", [OTHER])
    conn.execute("UPDATE awa.runtime_instances SET started_at = now() - interval '1 hour'")
    conn.execute("UPDATE awa.dlq_entries SET dlq_at = now() - interval '1 hour'")


def total(conn: psycopg.Connection) -> int:
    return sum(counts(conn).values())


# Broken by a step lock that two callers can both have (_tick): both promote.
@pytest.mark.parametrize("step", STEPS)
def test_g7_a_killed_step_leaves_no_trace_and_nobody_waits_for_it(
    database: Database, conn: psycopg.Connection, step: str
) -> None:
    busy_database(conn)
    set_settings(conn, **PRUNE_AT_ONCE)
    if step.startswith("publish"):
        tick(conn, step.replace("publish", "plan"))
    before = counts(conn)
    cursor = "SELECT last_value FROM awa.queue_ring"
    with open_transaction(database) as victim:
        outcome = tick(victim, step)[step]
        assert outcome not in ("failed", "contended"), outcome
        assert tick(conn, step)[step] == "contended"
        conn.execute("SET statement_timeout = '10s'")
        ids = insert_many(conn, 5)  # nobody waits for the caller that hangs
        terminate(conn, victim)
    ring_now = value(conn, cursor)
    assert counts(conn) == Counter(before) + Counter(available=5)
    assert len(ids) == 5
    # The next caller does what the killed one did not, and all goes on.
    assert tick(conn, step)[step] not in ("failed", "contended")
    for _ in range(3):
        assert "failed" not in tick(conn).values()
    assert value(conn, cursor) >= ring_now
    assert set(ids) <= {a.job_id for a in claim_all(conn)}


# Broken by a prune that does not look again under its lock (_prune_slot): random races never met
# the moment between the two looks.
def test_g7_a_row_that_comes_while_prune_locks_its_slot_is_kept(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    complete(conn, claim(conn))
    set_settings(conn, **PRUNE_AT_ONCE)
    late: list[int] = []
    outcomes: list[dict[str, str]] = []
    with database.connect() as producer, database.connect() as pruner:
        insertion = threading.Thread(target=lambda: late.append(insert(producer)))
        prune = threading.Thread(target=lambda: outcomes.append(tick(pruner, "prune_queue")))
        with paused(conn, "_prune_ring", "prune") as prune_waits:
            with paused(conn, "_append_ready_one", "insert") as insertion_waits:
                insertion.start()
                insertion_waits()  # it has read the ring: its slot is the old one
                rotate(conn)
                prune.start()
                prune_waits()  # it has found nothing in the old slot
            insertion.join()
        prune.join()
    assert outcomes == [{"prune_queue": "in_use"}]
    assert [attempt.job_id for attempt in claim_all(conn)] == late


# Broken by a prune that does not add the counts of its slot to the rollups (_prune_slot).
def test_g7_many_callers_killed_at_random_keep_the_counts_exact(
    database: Database, conn: psycopg.Connection
) -> None:
    set_settings(conn, **PRUNE_AT_ONCE)
    set_settings(conn, queue_rotate_bytes=8192, claim_rotate_bytes=8192)
    stop = threading.Event()
    reports: Counter[str] = Counter()
    unexpected: list[BaseException] = []

    def call_tick() -> None:
        while not stop.is_set():
            try:
                with database.connect() as caller:
                    caller.execute("SET application_name = 'tick'")
                    while not stop.is_set():
                        reports.update(f"{s} {o}" for s, o in tick(caller).items())
            except psycopg.OperationalError:
                reports["killed"] += 1
            except psycopg.Error as error:
                unexpected.append(error)
                return

    callers = [threading.Thread(target=call_tick) for _ in range(3)]
    for caller in callers:
        caller.start()
    jobs = 0
    end = time.monotonic() + 60
    rounds = itertools.count()
    while (reports["killed"] < 12 or reports["prune_queue pruned"] < 8) and (
        time.monotonic() < end and not unexpected
    ):
        jobs += len(insert_many(conn, 20))
        complete(conn, claim_all(conn, limit=50))
        if next(rounds) % 8 == 0:  # some rounds of maintenance must come to their end
            conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'tick' AND datname = current_database()"
                " ORDER BY random() LIMIT 1"
            )
    stop.set()
    for caller in callers:
        caller.join()
    assert not unexpected
    assert reports["killed"] >= 12
    assert reports["prune_queue pruned"] >= 8, reports
    assert not [name for name in reports if name.endswith("failed")], reports
    complete(conn, claim_all(conn))
    assert counts(conn) == {"completed": jobs}


CALLS = (
    "SELECT awa.claim_ready_runtime('default', 1, %(worker)s)",
    "SELECT awa.claim_status('default')",
    "SELECT awa.complete_jobs(%(worker)s, 0, 1, '{1}')",
    "SELECT awa.finish_jobs(%(worker)s, '[]')",
    "SELECT awa.cancel_job(%(job)s)",
    "SELECT awa.set_progress(1, 1, 0, 1, 1, '{}')",
    "SELECT awa.heartbeat(%(worker)s)",
    "SELECT awa.tick()",
    "SELECT awa.queue_counts('default')",
    "SELECT awa.verify()",
)


# Broken by leaving the check out of any of them (_require_read_committed).
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_g7_an_old_snapshot_is_refused(
    database: Database, conn: psycopg.Connection, level: IsolationLevel
) -> None:
    job_id = insert(conn)
    with open_transaction(database, level) as old:
        for call in CALLS:
            with pytest.raises(psycopg.Error) as error:
                old.execute(call, {"worker": WORKER, "job": job_id})
            assert error.value.sqlstate == "25001", call
            old.rollback()
    assert counts(conn) == {"available": 1}


# Broken by a closure number that is not a key (dropping the unique index of closures).
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
@pytest.mark.parametrize("closing", ["rescue", "finish", "cancel", "prune"])
def test_g7_complete_job_in_an_old_snapshot_never_accepts_a_closed_attempt(
    database: Database, conn: psycopg.Connection, closing: str, level: IsolationLevel
) -> None:
    insert(conn, opts={"backoff": {"delays": [0]}})
    [attempt] = claim(conn, deadline_seconds=0.001)
    with open_transaction(database, level) as old:
        old.execute("SELECT FROM awa.queue_meta")  # takes the snapshot
        if closing == "rescue":
            while tick(conn, "rescue") and counts(conn).get("running"):
                pass
        elif closing == "finish":
            finish(conn, [attempt.item("retry", delay_seconds=0)])
        elif closing == "cancel":
            conn.execute("SELECT awa.cancel_job(%s)", [attempt.job_id])
        else:
            complete(conn, [attempt])
            rotate(conn, "claim")
            rotate(conn, "queue")
            assert prune_all(conn, "claim") == 1
            assert prune_all(conn, "queue") == 1
        before = counts(conn)
        with pytest.raises(psycopg.Error) as error:
            old.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
        assert error.value.sqlstate in ("40001", "JQ001")
        old.rollback()
    assert counts(conn) == before


# Broken by treating a batch that the snapshot cannot see as stale.
def test_g7_complete_job_asks_for_a_repeat_when_the_claim_is_younger_than_the_snapshot(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as old:
        old.execute("SELECT FROM awa.queue_meta")
        [attempt] = claim(conn)
        with pytest.raises(psycopg.Error) as error:
            old.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
        assert error.value.sqlstate == "40001"
        old.rollback()
        old.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
        old.commit()
    assert counts(conn) == {"completed": 1}


# Broken by answering 40001 whenever the snapshot sees no batch: the caller would repeat for ever.
def test_g7_complete_job_tells_a_pruned_attempt_from_a_younger_one(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    [attempt] = claim(conn)
    complete(conn, [attempt])
    rotate(conn, "claim")
    assert prune_all(conn, "claim") == 1
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as fresh:
        with pytest.raises(psycopg.Error) as error:
            fresh.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
        assert error.value.sqlstate == "JQ001"


# Broken by moving the cursor to a ledger row of the same transaction (no check in _verify_rings):
# the emission in a slot that the ledger does not know is not found, and jobs are claimed twice.
def test_g7_verify_does_not_publish_what_may_be_rolled_back(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    set_settings(conn, queue_rotate_bytes=8192)
    with open_transaction(database) as both:
        assert tick(both, "plan_queue") == {"plan_queue": "planned"}
        with pytest.raises(psycopg.Error) as error:
            both.execute("SELECT awa.verify()")
        assert error.value.sqlstate == "55000"
    assert value(conn, "SELECT last_value FROM awa.queue_ring") == 0


# Broken by ALTER SEQUENCE on every lane.
def test_g3_verify_neither_waits_for_producers_nor_stops_them(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn, "a")
    insert(conn, "b")
    with open_transaction(database) as producer, open_transaction(database) as operator:
        insert(producer, "b")
        operator.execute("SET lock_timeout = '2s'")
        operator.execute("SELECT awa.verify()")
        producer.execute("SET lock_timeout = '2s'")
        insert(producer, "a")
        producer.commit()
    assert counts(conn, "a") == counts(conn, "b") == {"available": 2}


# Broken by inserting the row of the claim's owner without trying the instance's lock (_note_owner).
@pytest.mark.parametrize("call", ["claim", "register_instance", "heartbeat"])
def test_g4_a_claim_does_not_wait_for_another_call_of_the_same_new_instance(
    database: Database, conn: psycopg.Connection, call: str
) -> None:
    insert(conn, "first")
    insert(conn, "second")
    with open_transaction(database) as idle:
        if call == "claim":
            assert len(claim(idle, "first")) == 1
        else:
            idle.execute(f"SELECT awa.{call}(%s)", [WORKER])
        conn.execute("SET statement_timeout = '2s'")
        assert len(claim(conn, "second")) == 1
    # Without a row of its owner the attempt is rescued all the same.
    assert value(conn, "SELECT count(*) FROM awa.instances") == 0
    set_settings(conn, staleness_seconds=0.2)
    end = time.monotonic() + WAIT_SECONDS
    while "retryable" not in counts(conn, "second"):
        assert time.monotonic() < end
        tick(conn, "rescue")


# Broken by keeping the look at the lane's lock until the end of the transaction.
def test_g4_a_worker_that_asks_why_and_idles_stops_no_claim(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = insert(conn)
    with open_transaction(database) as idle:
        assert value(idle, "SELECT (awa.claim_status('default', true)).reason") == "ready"
        assert [a.job_id for a in claim(conn)] == [job_id]


# Broken by holding all due jobs of a step in memory at once.
def test_g7_promotion_of_many_large_jobs_stays_small(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute(
        "SELECT count(*) FROM awa.insert_many('k',"
        " array_fill(to_jsonb(repeat('a', 1000000)), ARRAY[200]),"
        " opts => '{\"delay_seconds\": 0.001}')"
    )
    with database.connect() as maintainer:
        pid = maintainer.info.backend_pid
        while counts(conn).get("scheduled"):
            assert tick(maintainer, "promote") == {"promote": "done"}
        [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert counts(conn) == {"available": 200}
    assert int(peak) < 400_000


# Broken by reading the ring from the snapshot (a table instead of a sequence).
def test_g7_an_old_snapshot_enqueues_into_the_present_slot(
    database: Database, conn: psycopg.Connection
) -> None:
    insert(conn)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as old:
        old.execute("SELECT FROM awa.queue_meta")
        complete(conn, claim_all(conn))
        for _ in range(3):
            rotate(conn)
            insert(conn)
            complete(conn, claim_all(conn))
            prune_all(conn)
        job_id = insert(old)
        many = insert_many(old, 3)
        old.commit()
    slots = value(conn, "SELECT array_agg(DISTINCT slot) FROM awa.ready_entries")
    assert value(conn, "SELECT last_value %% 64 FROM awa.queue_ring") in slots
    assert [a.job_id for a in claim_all(conn)] == [job_id, *many]


# ---- G9: one clear error for bad input, and one bad row wedges nothing

BAD_INSERTS: dict[str, tuple[dict[str, object], str, str]] = {
    "kind empty": ({"kind": ""}, "22023", "kind"),
    "kind long": ({"kind": "x" * 201}, "23514", "kind"),
    "queue control": ({"queue": "a\nb"}, "22023", "queue"),
    "priority": ({"priority": 5}, "23514", "priority"),
    "priority null": ({"priority": None}, "23514", "priority"),
    "max_attempts": ({"max_attempts": 0}, "23514", "max_attempts"),
    "run_at": ({"run_at": "infinity"}, "22023", "run_at"),
    "args null": ({"args": None}, "22023", "args"),
    "args large": ({"args": Jsonb("x" * 1_048_577)}, "23514", "args"),
    "args deep": ({"args": "[" * 300 + "]" * 300}, "23514", "args"),
    "opts unknown": ({"opts": {"colour": 1}}, "22023", "colour"),
    "opts later": ({"opts": {"after": [1]}}, "JQ007", "after"),
    "opts unique": ({"opts": {"unique": {"states": []}}}, "22023", "states"),
    "opts tags": ({"opts": {"tags": ["a"] * 21}}, "23514", "tags"),
    "opts delay": ({"opts": {"delay_seconds": -1}}, "22023", "delay_seconds"),
    "opts backoff": ({"opts": {"backoff": {"factor": 0}}}, "22023", "factor"),
    "opts trace": ({"opts": {"trace": "x" * 513}}, "22023", "trace"),
    "opts metadata": ({"opts": {"metadata": []}}, "22023", "metadata"),
}


# Broken by leaving a check out.
def test_g9_bad_input_gets_one_clear_error(conn: psycopg.Connection) -> None:
    for case, (fields, sqlstate, name) in BAD_INSERTS.items():
        with pytest.raises(psycopg.Error) as error:
            insert(conn, **fields)  # type: ignore[arg-type]
        diag = error.value.diag
        assert error.value.sqlstate == sqlstate, case
        assert diag.message_primary, case
        assert name in diag.message_primary, case
        assert len(diag.message_primary) < 300, case
        assert diag.message_hint, case
    assert counts(conn) == {}


# Broken by a promotion that does not halve its batch (_promote without the exception block).
def test_g9_a_job_that_cannot_be_promoted_ends_and_the_others_go_on(
    conn: psycopg.Connection,
) -> None:
    ids = [insert(conn, opts={"delay_seconds": 0.001}) for _ in range(9)]
    conn.execute("UPDATE awa.deferred_jobs SET priority = 9 WHERE job_id = %s", [ids[4]])
    tick(conn, "promote")
    assert counts(conn) == {"available": 8, "failed": 1}
    reason = value(conn, "SELECT (awa.job(%s)).reason", ids[4])
    assert reason.startswith("promotion failed")


# Broken by a promotion that waits for the strict_fifo lock.
def test_g9_a_producer_that_idles_on_a_strict_lane_does_not_stop_promotion(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.declare_queue('strict', '{\"strict_fifo\": true}')")
    insert(conn, "strict", opts={"delay_seconds": 0.001})
    insert(conn, "other", opts={"delay_seconds": 0.001})
    [released] = claim_released(conn)
    with open_transaction(database) as idle:
        insert(idle, "strict")
        assert tick(conn, "promote")["promote"] == "done"
        assert counts(conn, "other") == {"available": 1}
        assert counts(conn, "strict") == {"scheduled": 1, "running": 1}
        conn.execute("SET statement_timeout = '5s'")
        assert finish(conn, [released.item("released")]) == ["done"]
        idle.commit()
    tick(conn, "promote")
    assert counts(conn, "strict") == {"available": 3}


def claim_released(conn: psycopg.Connection) -> list[Attempt]:
    """A running attempt of the strict queue."""
    insert(conn, "strict")
    return claim(conn, "strict", limit=1)


# Broken by parsing items outside the isolation.
def test_g9_an_invalid_item_does_not_stop_its_batch(conn: psycopg.Connection) -> None:
    insert_many(conn, 5)
    attempts = claim(conn)
    items = [a.item("completed") for a in attempts]
    items[1]["outcome"] = "exploded"
    items[2] = {"job_id": "x"}
    items[3] |= {"outcome": "snooze"}
    assert finish(conn, items) == ["done", "invalid", "invalid", "invalid", "done"]
    assert counts(conn) == {"completed": 2, "running": 3}


# ---- G10: least privilege


@contextmanager
def role(server: DatabaseServer) -> Iterator[str]:
    """A role without any rights, gone afterwards."""
    name = f"role_{uuid.uuid4().hex[:12]}"
    server.admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
    try:
        yield name
    finally:
        server.admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


CAPABILITY_CALLS = {
    "producer": "SELECT awa.insert_job('k')",
    "worker": f"SELECT awa.claim_ready_runtime('default', 1, '{WORKER}')",
    "operator": "SELECT awa.pause_queue('default')",
    "reader": "SELECT count(*) FROM awa.jobs",
}
REFUSED = [
    "SELECT FROM awa.ready_entries",
    "SELECT FROM awa.deferred_jobs",
    "SELECT FROM awa.runtime_instances",
    "DELETE FROM awa.queue_meta",
    "SELECT nextval('awa.claim_batch_ids')",
    "SELECT awa._claim_ready('default', 1, NULL, NULL, NULL, false)",
    "SELECT awa._set_ring_cursor('queue', 9, 9)",
    "SELECT awa.set_owner('postgres')",
    "CREATE TABLE awa.mine ()",
]


# Broken by a GRANT of a table, of a function beyond the list, and by EXECUTE for PUBLIC.
@pytest.mark.parametrize("capability", [*CAPABILITY_CALLS, None])
def test_g10_a_role_can_do_what_it_was_granted_and_no_more(
    server: DatabaseServer, database: Database, capability: str | None
) -> None:
    with role(server) as name, database.connect() as conn:
        if capability:
            conn.execute(f"SELECT awa.grant_{capability}('{name}')")
        conn.execute(f"SET ROLE {name}")
        for other, call in CAPABILITY_CALLS.items():
            if other == capability or (capability, other) == ("operator", "reader"):
                conn.execute(call)
                continue
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(call)
        for statement in REFUSED:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(statement)
        conn.execute("RESET ROLE")
        conn.execute(f"DROP OWNED BY {name}")


# Broken by a definer function without search_path, and by one that belongs to a superuser.
def test_g10_functions_run_as_a_plain_owner_with_a_fixed_path(conn: psycopg.Connection) -> None:
    wrong = conn.execute(
        "SELECT p.oid::regprocedure FROM pg_proc p JOIN pg_roles r ON r.oid = p.proowner"
        " WHERE p.pronamespace = 'awa'::regnamespace AND p.prosecdef"
        " AND (r.rolsuper OR r.rolcanlogin OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication"
        "      OR r.rolbypassrls"
        "      OR NOT coalesce(p.proconfig @> '{\"search_path=pg_catalog, pg_temp\"}', false))"
    ).fetchall()
    assert wrong == []
    public = conn.execute(
        "SELECT p.oid::regprocedure FROM pg_proc p"
        " WHERE p.pronamespace = 'awa'::regnamespace"
        " AND (p.proacl IS NULL OR EXISTS (SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0))"
    ).fetchall()
    assert public == []


# Broken by dropping "SET search_path" and a qualification (lower() in _insert_job, say).
def test_g10_objects_of_the_caller_do_not_hijack_definer_functions(
    server: DatabaseServer, database: Database
) -> None:
    with role(server) as name, database.connect() as conn:
        for capability in ("producer", "worker", "operator"):
            conn.execute(f"SELECT awa.grant_{capability}('{name}')")
        conn.execute("CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO PUBLIC")
        conn.execute(f"GRANT TEMPORARY ON DATABASE {database.name} TO {name}")
        conn.execute(f"SET ROLE {name}")
        body = (
            "RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hijacked as %', current_user; END $$"
        )
        for signature in ("lower(text)", "upper(text)", "format(text, text)", "coalesce_(text)"):
            conn.execute(f"CREATE FUNCTION evil.{signature} {body}")
        conn.execute(
            "CREATE FUNCTION evil.eq(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE 'hijacked as %', current_user; END $$;"
            "CREATE OPERATOR evil.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.eq)"
        )
        conn.execute(
            "CREATE TEMP TABLE pg_class (relname text); CREATE TEMP TABLE pg_locks (x int)"
        )
        conn.execute("SET search_path = evil, pg_temp, pg_catalog")
        insert(conn)
        insert(conn, opts={"delay_seconds": 0.001, "tags": ["a"]})
        tick(conn)
        assert set(complete(conn, claim_all(conn))) == {"done"}
        conn.execute("SET search_path = pg_catalog")
        conn.execute("RESET ROLE")
        conn.execute(f"DROP OWNED BY {name}")
