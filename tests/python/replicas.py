"""A primary with a standby, for tests of reading there and of failing over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest

import awa
from conftest import TEMPLATE_SCRIPT
from engine import (
    PRUNE_AT_ONCE,
    WORKER,
    Attempt,
    claim_all,
    complete,
    finish,
    insert,
    insert_many,
    rotate,
    set_settings,
    tick,
    value,
)
from tools.servers import Cluster, Standby, ensure_tree

WAIT_SECONDS = 40
# Statements after the commit of which the standby has everything too.
SYNCHRONOUS = {"synchronous_commit": "on", "hot_standby_feedback": "on"}
VIEWS = ("jobs", "terminal_jobs", "dlq", "queues", "settings", "instances")


@contextmanager
def primary_and_standby(
    options: Mapping[str, str] | None = None,
) -> Iterator[tuple[Cluster, Standby]]:
    """A primary with the extension, and a standby that has all that it has committed."""
    tree = ensure_tree(int(os.environ["AWA_PG_VERSION"]))
    with (
        Cluster(tree, SYNCHRONOUS | dict(options or {})) as primary,
        Standby(primary) as standby,
    ):
        with psycopg.connect(primary.dsn, autocommit=True) as conn:
            # All of it comes to the standby by replay: its UNLOGGED sequences may lose their
            # pages at the promotion (ADR 7).
            conn.execute(TEMPLATE_SCRIPT.read_bytes())
            conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            conn.execute("SELECT pg_reload_conf()")
            wait_for(
                lambda: (
                    value(
                        conn,
                        "SELECT count(*) FROM pg_stat_replication"
                        " WHERE state = 'streaming' AND sync_state = 'sync'",
                    )
                    == 1
                )
            )
        yield primary, standby


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(WAIT_SECONDS * 50):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("waited in vain")


def catch_up(conn: psycopg.Connection, replica: psycopg.Connection) -> None:
    """Wait until the standby shows all that the primary has written."""
    written = value(conn, "SELECT pg_current_wal_lsn()")
    wait_for(lambda: value(replica, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", written))


def jobs_in_every_state(conn: psycopg.Connection) -> list[Attempt]:
    """Jobs in each state, slots that were left, and buckets whose rows have gone."""
    client = awa.Client(conn)
    set_settings(conn, **(PRUNE_AT_ONCE | {"dump_lock_seconds": 60}))
    client.declare_queue("letters", opts={"dlq": True})
    for queue in ("default", "letters", "emptied"):
        insert_many(conn, 4, queue)
        insert(conn, queue, run_at="2100-01-01")
    insert(conn, "unique", opts={"unique": {}})
    client.register_instance(WORKER)
    for ring in ("queue", "claim"):
        complete(conn, claim_all(conn, "emptied"))
        rotate(conn, ring)
    tick(conn)
    attempts = claim_all(conn, "default", 3) + claim_all(conn, "letters", 3)
    done, retried, cancelled, lettered = [attempts[i] for i in (0, 1, 2, 4)]
    assert complete(conn, [done]) == ["done"]
    assert finish(conn, [retried.item("retry", delay_seconds=3600, error="e")]) == ["done"]
    assert finish(conn, [lettered.item("fail", reason="r")]) == ["done"]
    client.cancel_job(cancelled.job_id)
    client.insert_many("k", [{}] * 50, queue="due", opts={"delay_seconds": 0.001})
    wait_for(lambda: tick(conn, "promote") != {} and client.queue_counts("due").scheduled == 0)
    return attempts


def reads(conn: psycopg.Connection, attempts: list[Attempt]) -> dict[str, list[Callable[..., Any]]]:
    """Calls of each function that only reads, by its name."""
    ids = [job_id for (job_id,) in conn.execute("SELECT job_id FROM awa.jobs WHERE queue <> 'due'")]
    every = [*ids, *(attempt.job_id for attempt in attempts)]
    return {
        "api": [lambda c: c.api()],
        "attempt_status": [partial(lambda a, c: c.attempt_status(*a.token), a) for a in attempts],
        "concurrency_digest": [lambda c: c.concurrency_digest("key")],
        "error_codes": [lambda c: c.error_codes()],
        "explain_job": [partial(lambda i, c: c.explain_job(i).state, i) for i in every],
        "job": [partial(lambda i, c: c.job(i), i) for i in every],
        "ordering_shard": [lambda c: c.ordering_shard("key", 8)],
        "queue_counts": [
            partial(lambda q, c: c.queue_counts(q), q)
            for q in ("default", "unique", "letters", "emptied", "due", "no such queue")
        ],
        "queue_depths": [lambda c: [(d.queue, d.priority, d.shard) for d in c.queue_depths()]],
        "ring_status": [lambda c: c.ring_status()],
        "schema_version": [lambda c: c.schema_version()],
        "unique_key": [lambda c: c.unique_key("k", "q", {}, 1)],
        "version": [lambda c: c.version()],
    }
