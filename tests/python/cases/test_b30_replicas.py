"""Case b30: replicas, logical replication, old snapshots.

That a standby answers all that reads and refuses all that writes is in test_failover.py
(test_a_standby_answers_all_that_reads_and_refuses_all_that_writes), that workers follow a promotion
in the same place. What a transaction does whose snapshot is older than a prune or a claim is in
test_guarantees.py: enqueueing (test_g7_an_old_snapshot_enqueues_into_the_present_slot), completing
(test_g7_complete_job_asks_for_a_repeat_when_the_claim_is_younger_than_the_snapshot and the one
after it). A pinned snapshot on the server itself is case b01.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo

import awa
from conftest import TEMPLATE_SCRIPT, Database
from engine import (
    PRUNE_AT_ONCE,
    WORKER,
    Attempt,
    claim_all,
    complete,
    insert_many,
    open_transaction,
    prune_all,
    rotate,
    set_settings,
    tick,
    value,
)
from replicas import (
    VIEWS,
    catch_up,
    jobs_in_every_state,
    primary_and_standby,
    reads,
    wait_for,
)
from tools.servers import Cluster, Standby, ensure_tree

Call = Callable[[awa.Client, psycopg.Connection], Any]
JOBS = 20
CONFLICT = "40001"
WRONG_ISOLATION = "25001"
SLOT_BYTES = """
    SELECT sum(pg_relation_size(c.oid)) FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relispartition
"""
# Tables without a replica identity, but for those of the rings, which are never updated.
NAMELESS = """
    SELECT c.relname FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'r' AND c.relreplident <> 'i'
      AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
      AND NOT EXISTS (
          SELECT FROM pg_inherits h
          WHERE h.inhrelid = c.oid AND h.inhparent <> 'awa.deferred_jobs'::regclass)
"""
# Replay waits for no query in its way; feedback is sent as often as it can be.
IMPATIENT = {"max_standby_streaming_delay": "0", "wal_receiver_status_interval": "1s"}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Cluster, Standby]]:
    with primary_and_standby(IMPATIENT) as pair:
        yield pair


def turn(conn: psycopg.Connection) -> int:
    """Run some jobs and empty the slots that they leave; return how many were emptied."""
    insert_many(conn, JOBS)
    complete(conn, claim_all(conn))
    pruned = 0
    for ring in ("queue", "claim"):
        rotate(conn, ring)
        pruned += prune_all(conn, ring)
    return pruned


class Reader(threading.Thread):
    """Reads the standby by every call and view, over and over, and repeats what is cancelled."""

    def __init__(self, dsn: str, calls: list[Call]) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._calls = calls
        self._stopped = threading.Event()
        self.rounds = 0
        self.completed: list[int] = []
        self.errors: list[BaseException] = []

    def run(self) -> None:
        self._conn = psycopg.connect(self._dsn, autocommit=True)
        try:
            while not self._stopped.is_set() or self.rounds == 0:
                for call in self._calls:
                    self.repeat(call)
                counts = self.repeat(lambda client, _: client.queue_counts("default"))
                self.completed.append(counts.completed)
                self.rounds += 1
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._conn.close()

    def repeat(self, call: Call) -> Any:
        """The answer of a call that a replayed prune may cancel, with its session if need be."""
        while True:
            try:
                return call(awa.Client(self._conn), self._conn)
            except (psycopg.Error, awa.AwaError) as error:
                # Where it ends the session, the reason does not always get through.
                if error.sqlstate != CONFLICT and not self._conn.closed:
                    raise
            if self._conn.closed:
                self._conn = psycopg.connect(self._dsn, autocommit=True)

    def stop(self) -> None:
        self._stopped.set()
        self.join(20)


def all_reads(conn: psycopg.Connection, attempts: list[Attempt]) -> list[Call]:
    """Calls of each function and view that reads."""

    def of_function(call: Callable[[awa.Client], Any]) -> Call:
        return lambda client, _: call(client)

    def of_view(name: str) -> Call:
        query = f"SELECT to_jsonb(v) FROM awa.{name} v ORDER BY 1".encode()
        return lambda _, conn: conn.execute(query).fetchall()

    calls = [of_function(call) for every in reads(conn, attempts).values() for call in every]
    return [
        *calls,
        of_function(lambda c: c.claim_status("default", arm=False)),
        *map(of_view, VIEWS),
    ]


def test_b30_reads_on_a_standby_go_on_through_a_heavy_prune(pair: tuple[Cluster, Standby]) -> None:
    primary, standby = pair
    with (
        psycopg.connect(primary.dsn, autocommit=True) as conn,
        psycopg.connect(standby.dsn, autocommit=True) as replica,
    ):
        calls = all_reads(conn, jobs_in_every_state(conn))
        set_settings(conn, **PRUNE_AT_ONCE)
        before = awa.Client(conn).queue_counts("default").completed
        catch_up(conn, replica)
        readers = [Reader(standby.dsn, calls) for _ in range(2)]
        for reader in readers:
            reader.start()
        turns = 8
        pruned = sum(turn(conn) for _ in range(turns))
        catch_up(conn, replica)
        for reader in readers:
            reader.stop()
        assert [error for reader in readers for error in reader.errors] == []
        assert pruned >= turns
        # No answer lost what had been there: counts only rise.
        for reader in readers:
            assert reader.completed == sorted(reader.completed) != []
        assert awa.Client(replica).queue_counts("default").completed == before + turns * JOBS

        # Reading locks nothing that others could meet.
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
        client = awa.Client(replica)
        with replica.transaction():
            for call in calls:
                call(client, replica)
            assert value(replica, held, replica.info.backend_pid) == 0


def test_b30_a_read_that_a_prune_cancels_can_be_repeated(pair: tuple[Cluster, Standby]) -> None:
    primary, standby = pair
    with (
        psycopg.connect(primary.dsn, autocommit=True) as conn,
        psycopg.connect(standby.dsn, autocommit=True) as replica,
        psycopg.connect(standby.dsn, autocommit=True) as watcher,
    ):
        insert_many(conn, JOBS)
        complete(conn, claim_all(conn))
        catch_up(conn, replica)
        whole = awa.Client(replica).queue_counts("default")
        errors: list[psycopg.Error] = []

        def linger() -> None:
            try:
                replica.execute("SELECT count(*), pg_sleep(60) FROM awa.terminal_jobs")
            except psycopg.Error as error:
                errors.append(error)

        lingering = threading.Thread(target=linger, daemon=True)
        lingering.start()
        sleeps = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
        wait_for(lambda: value(watcher, sleeps, replica.info.backend_pid) == "PgSleep")
        rotate(conn)
        assert prune_all(conn) > 0
        lingering.join(20)
        assert [error.sqlstate for error in errors] == [CONFLICT]
        catch_up(conn, replica)
        assert awa.Client(replica).queue_counts("default") == whole


def test_b30_a_worker_that_knows_a_standby_alone_is_refused_at_its_start(
    pair: tuple[Cluster, Standby], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, standby = pair
    (tmp_path / "tasks.py").write_text("handlers = {'k': lambda: None}\n")
    command = [sys.executable, "-m", "awa", "worker", "tasks:handlers", "--dsn", standby.dsn]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "error: the server is a standby, where no worker can run",
        "hint: Name the primary; or, to follow a failover, all servers and "
        "target_session_attrs=read-write.",
    ]

    # Each of these asks for more than this server, and waits.
    patient = {
        "several": make_conninfo(
            standby.dsn, host="127.0.0.1,127.0.0.1", port=f"{standby.port},{standby.port}"
        ),
        "read-write": make_conninfo(standby.dsn, target_session_attrs="read-write"),
    }

    async def wait_a_while(dsn: str) -> None:
        worker = awa.Worker(dsn, {"k": lambda: None})
        entering = asyncio.create_task(worker.__aenter__())
        async with asyncio.timeout(20):
            while not any("read-only" in record.message for record in caplog.records):
                await asyncio.sleep(0.02)
        assert not entering.done()
        worker.stop()
        await entering
        await worker.__aexit__(None, None, None)

    for dsn in patient.values():
        caplog.clear()
        asyncio.run(wait_a_while(dsn))


def test_b30_an_old_query_on_a_standby_stops_no_prune(pair: tuple[Cluster, Standby]) -> None:
    primary, standby = pair
    pinned = "SELECT backend_xmin::text FROM pg_stat_replication"
    with (
        psycopg.connect(primary.dsn, autocommit=True) as conn,
        psycopg.connect(standby.dsn) as old,
    ):
        old.isolation_level = IsolationLevel.REPEATABLE_READ
        set_settings(conn, **PRUNE_AT_ONCE)
        turn(conn)
        horizon = value(old, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
        wait_for(lambda: value(conn, pinned) == horizon)
        bytes_used = []
        for _ in range(4):
            assert turn(conn) >= 2
            bytes_used.append(value(conn, SLOT_BYTES))
        assert value(conn, pinned) == horizon
        assert len(set(bytes_used)) == 1
        # A transaction that is in nobody's way is not cancelled either.
        assert value(old, "SELECT count(*) FROM pg_namespace WHERE nspname = 'awa'") == 1


# What a subscriber is told


def messages(conn: psycopg.Connection) -> Counter[str]:
    """Messages of the publication since the last look, by their kind."""
    rows = conn.execute(
        "SELECT chr(get_byte(data, 0)) FROM pg_logical_slot_get_binary_changes("
        "'s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
    )
    return Counter(kind for (kind,) in rows)


def live(conn: psycopg.Connection) -> None:
    """Take jobs through everything that writes."""
    client = awa.Client(conn)
    attempts = jobs_in_every_state(conn)
    set_settings(conn, **(PRUNE_AT_ONCE | {"dlq_retention_seconds": 3600}))
    conn.execute("SELECT awa.set_setting('dlq_retention_seconds', NULL)")
    client.set_progress(*attempts[3].token, {"half": True})
    client.heartbeat(WORKER)
    assert complete(conn, [attempts[3]]) == ["done"]
    client.retry_dlq(attempts[4].job_id)
    client.insert_job("k", opts={"unique": {"on_conflict": "replace"}}, queue="unique")
    client.pause_queue("default")
    client.resume_queue("default")
    for waiting in ("default", "due"):
        client.drain_queue(waiting)
    late = client.insert_job("k", opts={"delay_seconds": 3600}).job_id
    client.update_job(late, {"priority": 1})
    client.cancel_job(late)
    for ring in ("queue", "claim"):
        for _ in range(3):
            insert_many(conn, JOBS, "ring")
            held, *others = claim_all(conn, "ring")
            assert set(complete(conn, others)) == {"done"}
            rotate(conn, ring)
            assert "failed" not in tick(conn).values()
            assert complete(conn, [held]) == ["done"]


def test_b30_a_publication_of_all_tables_refuses_no_write() -> None:
    tree = ensure_tree(int(os.environ["AWA_PG_VERSION"]))
    with (
        Cluster(tree, {"wal_level": "logical"}) as server,
        psycopg.connect(server.dsn, autocommit=True) as conn,
    ):
        conn.execute(TEMPLATE_SCRIPT.read_bytes())
        conn.execute("CREATE PUBLICATION p FOR ALL TABLES")
        conn.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        live(conn)
        told = messages(conn)
        assert min(told[kind] for kind in "IUDT") > 0
        # A prune says that a slot was emptied, and of none of its rows that it is gone.
        insert_many(conn, JOBS)
        complete(conn, claim_all(conn))
        rotate(conn)
        messages(conn)
        assert prune_all(conn) > 0
        told = messages(conn)
        assert told["T"] > 0
        assert told["D"] == 0
        # What is updated or deleted anywhere can say which row it was.
        assert conn.execute(NAMELESS).fetchall() == []


def test_b30_a_snapshot_older_than_a_prune_is_refused_or_answered_right(
    database: Database, conn: psycopg.Connection
) -> None:
    attempts = jobs_in_every_state(conn)
    calls = all_reads(conn, attempts)
    rotate(conn)
    insert_many(conn, JOBS)
    complete(conn, claim_all(conn))
    client = awa.Client(conn)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as old:
        old.execute("SELECT 1 FROM awa.queue_meta")
        before = [call(client, conn) for call in calls]
        rotate(conn)
        assert prune_all(conn) > 0
        after = [call(client, conn) for call in calls]
        assert before != after
        wrong = []
        for number, call in enumerate(calls):
            try:
                with old.transaction():
                    answer = call(awa.Client(old), old)
            except (psycopg.Error, awa.AwaError) as error:
                answer = error.sqlstate
            if answer not in (WRONG_ISOLATION, CONFLICT, before[number], after[number]):
                wrong.append((number, answer))
        assert wrong == []
