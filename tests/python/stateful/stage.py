"""The engine as it is played: small rings, a clock that stands still, and a way back to the start.

Every public call takes its time from the clock of the server and hands it on as `p_now`. In this
build the clock is a setting of the session, so that the public calls themselves are played, with
the time that the machine gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from interleaver.world import new_database
from rewind import go_back, remember
from tools.edits import Edit, apply_all, install_script

QUEUE_SLOTS, CLAIM_SLOTS = 8, 4
EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
BUILD_EDITS = (
    Edit(
        "_slot_count",
        "WHEN 'queue' THEN 16 WHEN 'claim' THEN 8",
        f"WHEN 'queue' THEN {QUEUE_SLOTS} WHEN 'claim' THEN {CLAIM_SLOTS}",
    ),
    Edit("_sample_claims", "uuid_send(gen_random_uuid())", "''::bytea"),
    Edit("_move_attempt", "random()", "0"),
)
CLOCK = """
CREATE FUNCTION awa._test_clock() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN current_setting('awa_test.now')::timestamptz;
"""
SETTINGS = {
    "terminal_retention_seconds": 300,
    "failed_retention_seconds": 600,
    "dlq_retention_seconds": 1200,
    "attempt_evidence_seconds": 60,
    "evacuate_attempt_seconds": 30,
    "queue_rotate_seconds": 20,
    "claim_rotate_seconds": 20,
    "dump_lock_seconds": 5,
    "aging_seconds": 60,
    "heartbeat_seconds": 10,
    "staleness_seconds": 90,
    "instance_retention_seconds": 3600,
}
QUEUES: dict[str, dict[str, object]] = {
    "plain": {},
    "dead": {"dlq": True},
    "sharded": {"enqueue_shards": 2},
    "strict": {"strict_fifo": True},
}
LATE_QUEUE = "late"  # nobody declares it
# Where every job is, read from the tables, without a function of the engine.
PLACES = """
WITH live AS (
    SELECT coalesce(r.job_id, r.position) AS job_id, r.position, r.slot,
           coalesce((r.ext ->> 'run_lease')::bigint, 0) AS run_lease
    FROM awa.ready_entries r
    WHERE NOT EXISTS (SELECT FROM awa.ready_tombstones t
                      WHERE t.slot = r.slot AND t.position = r.position)),
emissions AS (
    SELECT DISTINCT ON (e.cursor >> 42) e.cursor >> 42 AS lane, e.*
    FROM (SELECT claim_no, cursor, gaps_old, gaps_new, held FROM awa.ready_claim_attempt_batches
          UNION ALL
          SELECT claim_no, cursor, gaps_old, gaps_new, held FROM awa.queue_claim_heads) e
    ORDER BY e.cursor >> 42, e.claim_no DESC),
receipts AS (
    SELECT b.batch_id, b.ready_slot, p AS position
    FROM awa.lease_claim_batches b, unnest(b.positions) m,
         generate_series(lower(m), upper(m) - 1) p),
closures AS (
    SELECT c.batch_id, p AS position
    FROM awa.lease_claim_closures c, unnest(c.closed) m, generate_series(lower(m), upper(m) - 1) p)
SELECT l.job_id, 'available' AS place, l.run_lease
FROM live l LEFT JOIN emissions e ON e.lane = l.position >> 42
WHERE e.lane IS NULL OR l.position > e.cursor OR e.gaps_old @> l.position
      OR e.gaps_new @> l.position OR e.held @> l.position
UNION ALL
SELECT coalesce(b.job_id, b.position), 'running', coalesce((b.ext ->> 'run_lease')::bigint, 0) + 1
FROM receipts r JOIN awa.ready_entries b ON b.slot = r.ready_slot AND b.position = r.position
WHERE NOT EXISTS (SELECT FROM closures c WHERE c.batch_id = r.batch_id AND c.position = r.position)
UNION ALL
SELECT job_id, 'running', run_lease FROM awa.leases WHERE outcome IS NULL
UNION ALL
SELECT job_id, state::text, run_lease FROM awa.deferred_jobs
UNION ALL
SELECT job_id, 'dead', run_lease FROM awa.dlq_entries
UNION ALL
SELECT coalesce(b.job_id, b.position), 'completed', coalesce((b.ext ->> 'run_lease')::bigint, 0) + 1
FROM (SELECT slot, p AS position FROM awa.receipt_completion_batches, unnest(positions) m,
             generate_series(lower(m), upper(m) - 1) p) c
JOIN awa.ready_entries b ON b.slot = c.slot AND b.position = c.position
UNION ALL
SELECT d.job_id, d.state::text, d.run_lease FROM awa.done_entries d
WHERE NOT d.is_undo
      AND NOT EXISTS (SELECT FROM awa.done_entries u
                      WHERE u.is_undo AND u.job_id = d.job_id AND u.run_lease = d.run_lease
                            AND u.finalized_at = d.finalized_at)
UNION ALL
SELECT f.job_id, 'failed', f.run_lease FROM awa.failed_entries f
WHERE NOT EXISTS (SELECT FROM awa.done_entries d
                  WHERE d.job_id = f.job_id AND d.finalized_at = f.finalized_at)
"""


def build(edits: Sequence[Edit] = ()) -> str:
    """Return the script that installs schema awa for a play, with the edits of a mutant."""
    text = apply_all(install_script().read_text(), (*BUILD_EDITS, *edits))
    text = re.sub(r"\b(clock|transaction)_timestamp\(\)", "@extschema@._test_clock()", text)
    return "CREATE SCHEMA awa;\n" + CLOCK + text.replace("@extschema@", "awa")


@contextmanager
def new_stage(server_dsn: str, name: str, edits: Sequence[Edit] = ()) -> Iterator[Stage]:
    """A database with the engine in it, for as long as the block lasts."""
    with (
        new_database(server_dsn, name, template="template0") as dsn,
        psycopg.connect(dsn, autocommit=True) as conn,
    ):
        yield Stage(conn, edits)


class Stage:
    """The connection of a play, with its clock in milliseconds."""

    def __init__(self, conn: psycopg.Connection, edits: Sequence[Edit]) -> None:
        self.conn, self.now = conn, 0
        conn.execute("SET client_min_messages = error")
        conn.execute("SET lock_timeout = '5s'")  # one connection waits for nobody
        # Estimates for empty tables are high, and looks at all of them would be prepared for that.
        conn.execute("SET jit = off; SET max_parallel_workers_per_gather = 0")
        self.set_clock(0)
        conn.execute(build(edits).encode())
        for setting, value in SETTINGS.items():
            conn.execute("SELECT awa.set_setting(%s, %s)", (setting, str(value)))
        for queue, options in QUEUES.items():
            conn.execute("SELECT awa.declare_queue(%s, %s)", (queue, Jsonb(options)))
        remember(conn)

    def reset(self) -> None:
        """Go back to where no job was ever inserted."""
        self.set_clock(0)
        go_back(self.conn)
        self.conn.execute("SELECT setseed(0)")

    def set_clock(self, now: int) -> None:
        self.now = now
        self.conn.execute(f"SET awa_test.now = '{at(now).isoformat()}'".encode())

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        return self.conn.execute(sql.encode(), values).fetchall()

    def value(self, sql: str, *values: object) -> Any:
        [(value,)] = self.rows(sql, *values)
        return value

    def tick(self, *steps: str) -> dict[str, str]:
        """Run maintenance steps; return their outcomes."""
        rows = self.rows("SELECT step, outcome, detail FROM awa.tick(%s)", Jsonb({"steps": steps}))
        failed = [row for row in rows if row[1] == "failed"]
        assert not failed, failed
        return {step: outcome for step, outcome, _ in rows}


def at(now: int) -> datetime:
    """The time of the model's clock."""
    return EPOCH + timedelta(milliseconds=now)
