"""The locks of each call, in order, are the ones of the model of lock order: none is missing there.

The lists are read out of correctness/models/lock_order.pml. Each call is made in the situations
that matter to its locks, and what it has at its end is compared: advisory locks and leaves from
pg_locks, rows by who can have them. The order, and which of them are taken by try, comes from
functions that note each advisory lock before they take it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg.types.json import Jsonb

from conftest import Database
from engine import (
    PRUNE_AT_ONCE,
    WORKER,
    Attempt,
    claim,
    claim_all,
    complete,
    finish,
    insert,
    insert_many,
    open_transaction,
    rotate,
    set_settings,
    tick,
    value,
    wait_until_blocked,
)

MODEL = Path(__file__).parents[2] / "correctness/models/lock_order.pml"


# Broken by a _lock_ready() that locks the position of a job that was claimed. The model found it.
def test_two_cancels_of_a_job_that_moves_do_not_wait_for_each_other(
    database: Database, conn: psycopg.Connection
) -> None:
    job_id = insert(conn)
    answers: dict[str, str] = {}

    def cancel(name: str, connection: psycopg.Connection) -> threading.Thread:
        def body() -> None:
            try:
                answers[name] = value(connection, "SELECT awa.cancel_job(%s)", job_id)
            except psycopg.Error as error:
                answers[name] = str(error.sqlstate)

        thread = threading.Thread(target=body)
        thread.start()
        wait_until_blocked(conn, connection)
        return thread

    with (
        open_transaction(database) as gate,
        open_transaction(database) as worker,
        open_transaction(database) as updater,
        open_transaction(database) as first,
        open_transaction(database) as second,
    ):
        gate.execute("SELECT pg_advisory_xact_lock(awa._lock_key('position', %s))", [job_id])
        for connection in (first, second):
            connection.execute("SET LOCAL deadlock_timeout = '50ms'")
        [attempt] = claim(worker)
        first_thread = cancel("first", first)  # it has seen the job wait, and waits for the claim
        assert finish(worker, [attempt.item("released")]) == ["done"]
        worker.commit()
        updater.execute("SELECT awa.update_job(%s, '{\"delay_seconds\": 60}')", [job_id])
        second_thread = cancel("second", second)  # it waits where the job waits now
        assert wait_until_blocked(conn, first) == [gate.info.backend_pid]
        gate.rollback()  # the first has the old position, and wants the new one
        while gate.info.backend_pid in wait_until_blocked(conn, first):
            pass
        updater.commit()  # the job is deferred: the second must not want the old position
        second_thread.join()
        second.commit()
        first_thread.join()
        first.commit()
    assert answers == {"first": "already_cancelled", "second": "cancelled"}


# ---- what the model says

Lock = tuple[str, str]  # name, mode
Taking = tuple[str, bool]  # name, whether by try


def without_mutants(text: str) -> Iterator[str]:
    """Lines of the model that are there when no mutant is defined."""
    kept = [True]
    for line in text.splitlines():
        if line.startswith("#ifdef"):
            kept.append(False)
        elif line.startswith(("#ifndef", "#if ")):
            kept.append(True)
        elif line.startswith("#else"):
            kept[-1] = not kept[-1]
        elif line.startswith("#endif"):
            kept.pop()
        elif all(kept):
            yield line


def model_lists() -> dict[str, list[tuple[str, str, bool]]]:
    """The locks of each call in the order of the model; those of readers are left out.

    Name, mode, and whether it is taken by try.
    """
    text = MODEL.read_text()
    text = "\n".join(without_mutants(text[text.index("/* _place_job") :]))
    inlines = dict(re.findall(r"^inline (\w+)\(\) \{\n(.*?)\n\}", text, re.M | re.S))
    for _ in range(3):
        text = re.sub(r"\b(\w+)\(\)", lambda call: inlines.get(call[1], call[0]), text)
    calls = re.split(r"^    :: op == (\w+) ->", text[text.index("proctype session") :], flags=re.M)
    return {
        name: [
            (re.sub(r"_[12]$|^(QUEUE|OLD)(?=_SLOT)", "", lock).lstrip("_"), mode, how in "NT")
            for how, lock, mode in re.findall(r"\b(W|N|T|TM)\((\w+)[^,()]*, (\w+)\)", body)
            if mode != "AS"
        ]
        for name, body in zip(calls[1::2], calls[2::2], strict=True)
    }


# ---- what a server says

# Keys say their class, and every function calls a function that notes the lock and takes it.
TRACE = """
    CREATE OR REPLACE FUNCTION awa._lock_key(p_class text, p_id bigint)
    RETURNS bigint
    LANGUAGE plpgsql VOLATILE PARALLEL SAFE STRICT
    SET search_path = pg_catalog, pg_temp
    AS $function$
    BEGIN
        RAISE NOTICE 'class % %', hashtextextended('awa/' || p_class, p_id), p_class;
        RETURN hashtextextended('awa/' || p_class, p_id);
    END
    $function$;

    DO $do$
    DECLARE
        v_name text;
        v_function text;
    BEGIN
        FOREACH v_name IN ARRAY '{pg_advisory_xact_lock,pg_advisory_xact_lock_shared,'
            'pg_try_advisory_xact_lock,pg_try_advisory_xact_lock_shared}'::text[] LOOP
            EXECUTE format($f$
                CREATE FUNCTION awa.%1$I(p_key bigint) RETURNS boolean LANGUAGE plpgsql AS $g$
                BEGIN
                    RAISE NOTICE 'taken %% %%', p_key, '%1$s';
                    RETURN coalesce(nullif(pg_catalog.%1$I(p_key)::text, '')::boolean, true);
                END $g$ $f$, v_name);
        END LOOP;
        FOR v_function IN SELECT pg_get_functiondef(p.oid) FROM pg_proc p
            WHERE p.pronamespace = 'awa'::regnamespace AND p.prosrc LIKE '%advisory_xact_lock%'
              AND p.proname NOT LIKE 'pg%'
        LOOP
            EXECUTE regexp_replace(v_function, '\\mpg_(try_)?advisory_xact', 'awa.\\&', 'g');
        END LOOP;
    END
    $do$;
"""
CLASSES = {"queue_ring": "RING", "claim_ring": "CLAIM_RING"}
LEAVES = {
    r"(ready_\w+|done_entries|receipt_\w+)_\d+": "SLOT",
    r"lease_claim_\w+_\d+": "CLAIM_SLOT",
    r"deferred_jobs_\d+": "DEFERRED_SLOT",
    r"leases": "LEASES",
    r"lane_\d+": "LANE_SEQUENCE",
}
MODES = {
    "RowExclusiveLock": "RE",
    "ShareLock": "S",
    "ExclusiveLock": "E",
    "AccessExclusiveLock": "AE",
}
# Rows by their key; new ones count where others can want the same key.
ROWS = {
    "KEY": ("job_unique_claims", "key", True),
    "DEFERRED": ("deferred_jobs", "job_id", False),
    "LETTER": ("dlq_entries", "job_id", False),
    "COPY": ("failed_entries", "job_id", True),
    "PROGRESS": ("attempt_state", '(batch_id, "position")', True),
    "INSTANCE_ROW": ("runtime_instances", "instance_id", True),
    "META": ("queue_meta", "queue", True),
}
HELD = """
    SELECT l.locktype, (l.classid::bigint << 32) | l.objid::bigint, l.relation, l.mode
    FROM pg_locks l
    WHERE l.pid = pg_backend_pid() AND l.granted AND l.locktype IN ('advisory', 'relation')
"""


@dataclass
class Observed:
    """Locks that calls had at their end, and advisory ones as each call took them, in order."""

    locks: set[Lock] = field(default_factory=set)
    orders: list[list[Taking]] = field(default_factory=list)


class Server:
    """A database in which calls are made and looked at; each call is rolled back."""

    def __init__(self, database: Database, conn: psycopg.Connection) -> None:
        self.database = database
        self.conn = conn
        self.conn.execute(TRACE.encode())
        set_settings(self.conn, **PRUNE_AT_ONCE, idle_poll_ms=1000)
        self.queues = 0

    def queue(self, **options: object) -> str:
        """A queue of its own, with a lane."""
        self.queues += 1
        name = f"queue_{self.queues:03}"
        self.conn.execute("SELECT awa.declare_queue(%s, %s)", [name, Jsonb(options)])
        return name

    def run(self, observed: Observed, query: str, *parameters: object) -> None:
        """Make a call in a transaction, note its locks, and roll it back."""
        notices: list[str] = []
        with self.database.connect(autocommit=False) as actor:
            actor.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
            actor.execute(query.encode(), parameters)
            asked = list(notices)
            held = actor.execute(HELD).fetchall()
            observed.locks |= self.row_locks(actor)
            actor.rollback()
        relations = self.conn.execute("SELECT oid::bigint, relname FROM pg_class").fetchall()
        known: dict[int, str] = dict(relations)
        words = [notice.split(" ", 2) for notice in asked]
        classes = {int(key): self.class_name(name) for what, key, name in words if what == "class"}
        advisory = set()
        for kind, key, relation, mode in held:
            if kind == "advisory" and classes[key] != "STEP":
                advisory.add(key)
                observed.locks.add((classes[key], "S" if mode == "ShareLock" else "X"))
            elif kind == "relation" and mode in MODES:
                for pattern, name in LEAVES.items():
                    if re.fullmatch(pattern, known.get(int(relation), "")):
                        observed.locks.add((name, MODES[mode]))
        taken: dict[int, Taking] = {}
        for what, key, name in words:
            if what == "taken" and int(key) in advisory:
                taken.setdefault(int(key), (classes[int(key)], "_try_" in name))
        observed.orders.append(list(taken.values()))

    @staticmethod
    def class_name(name: str) -> str:
        return CLASSES.get(name, name.partition("/")[0].upper())

    def row_locks(self, actor: psycopg.Connection) -> set[Lock]:
        locks: set[Lock] = set()
        for name, (table, key, counts_new) in ROWS.items():
            query = f"SELECT {key}::text FROM awa.{table}"
            try:
                self.conn.execute("SET lock_timeout = '50ms'")
                seen = set(self.conn.execute(query.encode()).fetchall())
            except psycopg.errors.LockNotAvailable:
                continue  # it was truncated
            finally:
                self.conn.execute("RESET lock_timeout")
            free = set(self.conn.execute(f"{query} FOR UPDATE SKIP LOCKED".encode()).fetchall())
            new = set(actor.execute(query.encode()).fetchall()) - seen if counts_new else set()
            if seen - free or new:
                locks.add((name, "X"))
        return locks

    # ---- situations

    def unique(self, *states: str, **more: object) -> dict[str, object]:
        """Options of a job with a unique key of its own."""
        self.queues += 1
        unique: dict[str, object] = {"key": f"{self.queues:032x}", **more}
        return {"unique": {**unique, "states": states} if states else unique}

    def running(self, queue: str, **fields: object) -> Attempt:
        insert(self.conn, queue, **fields)
        [attempt] = claim(self.conn, queue)
        return attempt

    def progressing(self, attempt: Attempt) -> Attempt:
        query = "SELECT awa.set_progress(%s, %s, %s, %s, %s, '1')"
        assert value(self.conn, query, *attempt.token)
        return attempt

    def failed(self, queue: str, **fields: object) -> int:
        attempt = self.running(queue, **fields)
        assert finish(self.conn, [attempt.item("fail", error="e")]) == ["done"]
        return attempt.job_id

    def leased(self, queue: str, **fields: object) -> Attempt:
        """A running attempt that evacuation has made a lease of."""
        attempt = self.running(queue, **fields)
        set_settings(self.conn, evacuate_attempt_seconds=0)
        query = "SELECT awa._lease_receipts(%s, %s, 1, now())"
        assert value(self.conn, query, attempt.claim_slot, attempt.batch_id) == 1
        return attempt

    def step(self, observed: Observed, step: str) -> None:
        self.run(observed, "SELECT awa.tick(%s)", Jsonb({"steps": [step]}))

    def change(self, query: str, *parameters: object) -> None:
        """Make time pass, by hand."""
        assert self.conn.execute(query.encode(), parameters).rowcount


LATER = {"delay_seconds": 3600}
STRICT = {"strict_fifo": True}
FAILED = ("available", "failed")
FINISH = "SELECT awa.finish_jobs(%s, %s)"
COMPLETE_JOB = "SELECT awa.complete_job(%s, %s, %s, %s, %s, %s)"
CANCEL = "SELECT awa.cancel_job(%s)"
RETRY = "SELECT awa.retry_job(%s, %s)"
UPDATE = "SELECT awa.update_job(%s, %s)"
NOTHING = Jsonb({})


def insert_calls(s: Server, o: Observed) -> None:
    query = "SELECT awa.insert_job('k', queue => %s, opts => %s)"
    s.run(o, query, s.queue(), NOTHING)
    s.run(o, query, s.queue(**STRICT), NOTHING)
    s.run(o, query, "a new queue", NOTHING)
    s.run(o, query, s.queue(), Jsonb(LATER))


def insert_jobs_calls(s: Server, o: Observed) -> None:
    queues = [s.queue(**STRICT), s.queue(**STRICT), "a new queue"]
    jobs: list[object] = [{"kind": "k", "queue": queue} for queue in reversed(queues)]
    s.run(o, "SELECT awa.insert_jobs(%s)", Jsonb([*jobs, {"kind": "k", "opts": LATER}]))


def insert_unique_calls(s: Server, o: Observed) -> None:
    queue, strict = s.queue(), s.queue(**STRICT)
    query = "SELECT awa.insert_job('k', queue => %s, opts => %s)"
    s.run(o, query, strict, Jsonb(s.unique()))
    s.run(o, query, "a new queue", Jsonb(s.unique() | LATER))
    s.run(o, query, "a new queue", Jsonb(s.unique()))
    loses = s.unique("available")
    s.running(queue, opts=loses)
    s.run(o, query, queue, Jsonb(loses))
    waits, deferred = (s.unique(on_conflict="replace") for _ in range(2))
    insert(s.conn, strict, opts=waits)
    insert(s.conn, queue, opts=deferred | LATER)
    s.run(o, query, queue, Jsonb(waits))
    s.run(o, query, queue, Jsonb(deferred))


def claim_calls(s: Server, o: Observed) -> None:
    queue = s.queue()
    first, _ = insert(s.conn, queue), insert(s.conn, queue)
    query = "SELECT awa.claim_ready_runtime(%s, 2, gen_random_uuid())"
    s.run(o, query, queue)
    with open_transaction(s.database) as other:
        other.execute(CANCEL, [first])
        s.run(o, query, queue)


def finish_calls(s: Server, o: Observed) -> None:
    key = s.unique("available", "retryable")
    for outcome in ("completed", "retry", "fail", "released"):
        attempts = [
            s.progressing(s.running(s.queue(**STRICT), opts=key if outcome == "retry" else {})),
            s.leased(s.queue()),
        ]
        s.run(o, FINISH, WORKER, Jsonb([attempt.item(outcome) for attempt in attempts]))
    attempt = s.running(s.queue())
    query = "SELECT awa.complete_jobs(%s, %s, %s, %s)"
    s.run(o, query, WORKER, attempt.claim_slot, attempt.batch_id, [attempt.position])


def complete_job_calls(s: Server, o: Observed) -> None:
    kept = s.unique() | {"keep_result": True}
    result = Jsonb({"result": 1})
    s.run(o, COMPLETE_JOB, *s.progressing(s.running(s.queue(), opts=kept)).token, result)
    s.run(o, COMPLETE_JOB, *s.leased(s.queue()).token, result)


def cancel_calls(s: Server, o: Observed) -> None:
    s.run(o, CANCEL, insert(s.conn, s.queue(), opts=s.unique()))
    s.run(o, CANCEL, insert(s.conn, s.queue(), opts=LATER))
    s.run(o, CANCEL, s.progressing(s.running(s.queue())).job_id)
    s.run(o, CANCEL, s.leased(s.queue()).job_id)


def retry_calls(s: Server, o: Observed) -> None:
    s.run(o, RETRY, insert(s.conn, s.queue(), opts=LATER), Jsonb({"queue": "a new queue"}))
    s.run(o, RETRY, s.failed(s.queue(), opts=s.unique()), Jsonb(LATER))
    s.run(o, RETRY, s.failed(s.queue(dlq=True)), NOTHING)
    pruned = s.failed(s.queue(**STRICT))
    rotate(s.conn)
    set_settings(s.conn, dump_lock_seconds=60)
    assert tick(s.conn, "prune_queue") == {"prune_queue": "released"}
    s.run(o, RETRY, pruned, NOTHING)
    set_settings(s.conn, dump_lock_seconds=0)
    s.conn.execute("SELECT awa.verify()")
    assert tick(s.conn, "prune_queue") == {"prune_queue": "pruned"}
    s.run(o, RETRY, pruned, NOTHING)


def retry_dlq_calls(s: Server, o: Observed) -> None:
    query = "SELECT awa.retry_dlq(%s, %s)"
    s.run(o, query, s.failed(s.queue(dlq=True, **STRICT), opts=s.unique()), NOTHING)
    s.run(o, query, s.failed(s.queue(dlq=True)), Jsonb({"queue": "a new queue"}))
    s.run(o, query, s.failed(s.queue(dlq=True)), Jsonb(LATER))


def purge_dlq_calls(s: Server, o: Observed) -> None:
    s.run(o, "SELECT awa.purge_dlq(%s)", s.failed(s.queue(dlq=True), opts=s.unique(*FAILED)))


def update_calls(s: Server, o: Observed) -> None:
    s.run(o, UPDATE, insert(s.conn, s.queue(), opts=s.unique()), Jsonb({"queue": "a new queue"}))
    s.run(o, UPDATE, insert(s.conn, s.queue(**STRICT)), Jsonb({"priority": 2}))
    s.run(o, UPDATE, insert(s.conn, s.queue(), opts=LATER), Jsonb(LATER))


def drain_calls(s: Server, o: Observed) -> None:
    queue = s.queue()
    insert(s.conn, queue, opts=s.unique())
    insert(s.conn, queue, opts=LATER)
    s.run(o, "SELECT awa.drain_queue(%s)", queue)


def progress_calls(s: Server, o: Observed) -> None:
    s.run(o, "SELECT awa.set_progress(%s, %s, %s, %s, %s, '1')", *s.running(s.queue()).token)


def heartbeat_calls(s: Server, o: Observed) -> None:
    s.running(s.queue())
    s.run(o, "SELECT awa.heartbeat(%s)", WORKER)
    s.run(o, "SELECT awa.heartbeat(gen_random_uuid())")


def register_calls(s: Server, o: Observed) -> None:
    s.run(o, "SELECT awa.register_instance(gen_random_uuid())")


def declare_calls(s: Server, o: Observed) -> None:
    s.run(o, "SELECT awa.declare_queue('a new queue')")


def rescue_calls(s: Server, o: Observed) -> None:
    soon = {"deadline_seconds": 0.001}
    s.progressing(s.running(s.queue(), opts=s.unique("available", "retryable") | soon))
    s.running(s.queue(), opts=soon, max_attempts=1)
    s.leased(s.queue(), opts=soon)
    s.conn.execute("SELECT awa.heartbeat(%s)", [WORKER])
    s.change("UPDATE awa.runtime_instances SET heartbeat_at = heartbeat_at - interval '1 hour'")
    s.step(o, "rescue")


def promote_calls(s: Server, o: Observed) -> None:
    waits = s.unique("available")
    for queue, opts in (("a new queue", {}), (s.queue(**STRICT), {}), (s.queue(), waits)):
        insert(s.conn, queue, opts=opts | LATER)
    s.change("UPDATE awa.deferred_jobs SET run_at = now(), slot = 0")
    s.step(o, "promote")


def refill_calls(s: Server, o: Observed) -> None:
    insert(s.conn, s.queue(), opts=LATER)
    s.change("UPDATE awa.deferred_jobs SET run_at = now() + interval '5 minutes'")
    s.step(o, "refill")


def expire_calls(s: Server, o: Observed) -> None:
    s.failed(s.queue(dlq=True), opts=s.unique(*FAILED))
    s.change("UPDATE awa.dlq_entries SET dlq_at = '-infinity'")
    # Somebody had the claim locked when the job failed.
    s.change("UPDATE awa.job_unique_claims SET ended = NULL, expires_at = NULL")
    s.failed(s.queue())
    rotate(s.conn)
    set_settings(s.conn, dump_lock_seconds=60)
    assert tick(s.conn, "prune_queue") == {"prune_queue": "released"}
    s.change("UPDATE awa.failed_entries SET finalized_at = '-infinity'")
    s.leased(s.queue())
    s.step(o, "expire")


def unique_keys_calls(s: Server, o: Observed) -> None:
    s.failed(s.queue(), opts=s.unique(*FAILED))
    s.change("UPDATE awa.job_unique_claims SET expires_at = '-infinity'")
    s.step(o, "unique_keys")


def instances_calls(s: Server, o: Observed) -> None:
    s.conn.execute("SELECT awa.register_instance(%s)", [WORKER])
    s.change("UPDATE awa.runtime_instances SET started_at = '-infinity'")
    s.step(o, "instances")


def evacuate_calls(s: Server, o: Observed) -> None:
    queue = s.queue()
    set_settings(s.conn, ring_size_cap_bytes=1048576, evacuate_attempt_seconds=0, evacuate_rows=10)
    insert_many(s.conn, 10000, "done")
    complete(s.conn, claim_all(s.conn, "done", 1000))
    insert_many(s.conn, 1000, queue)
    rotate(s.conn)
    s.step(o, "evacuate")
    claim_all(s.conn, queue, 1000)
    s.step(o, "evacuate")


def prune_queue_calls(s: Server, o: Observed) -> None:
    assert complete(s.conn, [s.running(s.queue(), opts=s.unique())]) == ["done"]
    s.failed(s.queue())
    rotate(s.conn)
    s.step(o, "prune_queue")


def prune_claim_calls(s: Server, o: Observed) -> None:
    assert complete(s.conn, [s.running(s.queue())]) == ["done"]
    rotate(s.conn, "claim")
    s.step(o, "prune_claim")


def prune_deferred_calls(s: Server, o: Observed) -> None:
    queue = s.queue()
    query = (
        "SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[4000]), queue => %s, opts => %s)"
    )
    s.conn.execute(query, [queue, Jsonb(LATER)])
    bucket = value(s.conn, "SELECT mod(awa._deferred_slot(now(), now()) + 5, 16)")
    s.change("UPDATE awa.deferred_jobs SET slot = %s, run_at = '-infinity'", bucket)
    [left] = s.conn.execute("SELECT max(job_id) FROM awa.deferred_jobs").fetchone() or (0,)
    s.change("DELETE FROM awa.deferred_jobs WHERE job_id <> %s", left)
    s.step(o, "prune_deferred")
    s.change("DELETE FROM awa.deferred_jobs")
    s.step(o, "prune_deferred")


def prune_attempts_calls(s: Server, o: Observed) -> None:
    s.change(
        "INSERT INTO awa.leases (batch_id, position, job_id, run_lease, claimed_at, run_at, owner,"
        " priority, shard, attempt, queue, kind)"
        " SELECT n, n, n, 1, now(), now(), gen_random_uuid(), 2, 0, 1, 'q', 'k'"
        " FROM generate_series(1, 4000) n"
    )
    s.change("DELETE FROM awa.leases")
    s.step(o, "prune_attempts")


def rotate_calls(s: Server, o: Observed) -> None:
    for step in ("plan_queue", "plan_claim", "publish_queue", "publish_claim"):
        s.step(o, step)


CALLS: dict[str, Callable[[Server, Observed], None]] = {
    "INSERT": insert_calls,
    "INSERT_JOBS": insert_jobs_calls,
    "INSERT_UNIQUE": insert_unique_calls,
    "CLAIM": claim_calls,
    "FINISH": finish_calls,
    "COMPLETE_JOB": complete_job_calls,
    "CANCEL": cancel_calls,
    "RETRY": retry_calls,
    "RETRY_DLQ": retry_dlq_calls,
    "PURGE_DLQ": purge_dlq_calls,
    "UPDATE": update_calls,
    "DRAIN": drain_calls,
    "SET_PROGRESS": progress_calls,
    "HEARTBEAT": heartbeat_calls,
    "REGISTER": register_calls,
    "DECLARE": declare_calls,
    "RESCUE": rescue_calls,
    "PROMOTE": promote_calls,
    "REFILL": refill_calls,
    "EXPIRE": expire_calls,
    "UNIQUE_KEYS": unique_keys_calls,
    "INSTANCES": instances_calls,
    "EVACUATE": evacuate_calls,
    "PRUNE_QUEUE": prune_queue_calls,
    "PRUNE_CLAIM": prune_claim_calls,
    "PRUNE_DEFERRED": prune_deferred_calls,
    "PRUNE_ATTEMPTS": prune_attempts_calls,
    "ROTATE": rotate_calls,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_the_locks_of_the_model_in_its_order(
    database: Database, conn: psycopg.Connection, call: str
) -> None:
    observed, modelled = Observed(), model_lists()[call]
    CALLS[call](Server(database, conn), observed)
    locks = {(name, mode) for name, mode, _ in modelled}
    assert without_truncate(observed.locks) == without_truncate(locks)
    takings = [(name, is_try) for name, _, is_try in modelled]
    for order in observed.orders:
        assert is_in_order(order, takings), f"{order} is not an order of {takings}"


def without_truncate(locks: set[Lock]) -> set[Lock]:
    """Without SHARE where ACCESS EXCLUSIVE is, since TRUNCATE takes it then."""
    return {(name, mode) for name, mode in locks if mode != "S" or (name, "AE") not in locks}


def is_in_order(order: list[Taking], takings: list[Taking]) -> bool:
    """Whether locks were first taken in the order in which the model first takes them."""
    rest = iter(dict.fromkeys(takings))
    return all(taking in rest for taking in dict.fromkeys(order))


def test_every_call_of_the_model_is_compared() -> None:
    assert set(model_lists()) == set(CALLS)
