"""Short names for the engine's calls, for tests that talk to it without the Python client."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

import awa
from conftest import Database

BUILD = Path(__file__).parents[2] / "build"
SCRIPT = BUILD / f"awa--{awa.__version__}.sql"
WORKER = uuid.UUID(int=1, version=4)
WAIT_SECONDS = 20
# A slot goes as soon as nothing in it waits or runs.
PRUNE_AT_ONCE = {
    "terminal_retention_seconds": 0,
    "attempt_evidence_seconds": 0,
    "dump_lock_seconds": 0,
}
# Everything granted to anybody but the owner, PUBLIC included, what PostgreSQL does by itself too.
GRANTED = """
    SELECT o.class, o.name, coalesce(r.rolname, 'PUBLIC'), a.privilege_type
    FROM (
        SELECT 'function' AS class, p.proname AS name, p.proowner AS owner,
               coalesce(p.proacl, acldefault('f', p.proowner)) AS acl
        FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace
        UNION ALL
        SELECT 'relation', c.relname, c.relowner,
               coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's'::"char" ELSE 'r' END,
                                             c.relowner))
        FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace
        UNION ALL
        SELECT 'column', c.relname, c.relowner, a.attacl
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = 'awa'::regnamespace
        UNION ALL
        SELECT 'type', t.typname, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
        FROM pg_type t WHERE t.typnamespace = 'awa'::regnamespace AND t.typcategory <> 'A'
        UNION ALL
        SELECT 'schema', n.nspname, n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner))
        FROM pg_namespace n WHERE n.nspname = 'awa'
    ) o, aclexplode(o.acl) a LEFT JOIN pg_roles r ON r.oid = a.grantee
    WHERE a.grantee <> o.owner
"""


TOKEN = ("job_id", "run_lease", "claim_slot", "batch_id", "position")


def outcome_item(token: Sequence[int], outcome: str, **fields: object) -> dict[str, object]:
    """Return an item of finish_jobs."""
    return {**dict(zip(TOKEN, token, strict=True)), "outcome": outcome, **fields}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claimed job: its token and what a test looks at."""

    job_id: int
    run_lease: int
    attempt: int
    claim_slot: int
    batch_id: int
    position: int
    kind: str

    @property
    def token(self) -> tuple[int, int, int, int, int]:
        return (self.job_id, self.run_lease, self.claim_slot, self.batch_id, self.position)

    def item(self, outcome: str, **fields: object) -> dict[str, object]:
        """Return an item of finish_jobs."""
        return outcome_item(self.token, outcome, **fields)


def install_plain(conn: psycopg.Connection, schema: str = "awa") -> None:
    """Install the engine as plain SQL, as on a managed server, owned by a plain role."""
    if value(conn, "SELECT to_regrole('awa_owner') IS NULL"):
        conn.execute("CREATE ROLE awa_owner NOLOGIN")
    conn.execute(f"CREATE SCHEMA {schema}")
    conn.execute(SCRIPT.read_text().replace("@extschema@", schema).encode())
    conn.execute(f"SELECT {schema}.set_owner('awa_owner')")


def value(conn: psycopg.Connection, query: str, *parameters: object) -> Any:
    """Return the only column of the only row."""
    [(result,)] = conn.execute(query, parameters).fetchall()
    return result


def insert(conn: psycopg.Connection, queue: str = "default", **fields: object) -> int:
    """Enqueue one job; return its id."""
    job = {"kind": "k", "queue": queue, **fields}
    if isinstance(opts := job.get("opts"), dict):
        job["opts"] = Jsonb(opts)
    names = ", ".join(f"{name} => %({name})s" for name in job)
    row = conn.execute(f"SELECT job_id FROM awa.insert_job({names})", job).fetchone()
    assert row
    return int(row[0])


def insert_many(conn: psycopg.Connection, count: int, queue: str = "default") -> list[int]:
    """Enqueue jobs of one kind in one call; return their ids."""
    rows = conn.execute(
        "SELECT awa.insert_many('k', array_fill('{\"n\": 1}'::jsonb, ARRAY[%s]), queue => %s)",
        [count, queue],
    )
    return [job_id for (job_id,) in rows]


def claim(
    conn: psycopg.Connection,
    queue: str = "default",
    limit: int = 100,
    instance: uuid.UUID = WORKER,
    **opts: object,
) -> list[Attempt]:
    """Claim jobs."""
    with conn.cursor(row_factory=class_row(Attempt)) as cursor:
        return cursor.execute(
            "SELECT job_id, run_lease, attempt, claim_slot, batch_id, position, kind"
            " FROM awa.claim_ready_runtime(%s, %s, %s, %s)",
            [queue, limit, instance, Jsonb(opts)],
        ).fetchall()


def claim_all(conn: psycopg.Connection, queue: str = "default", limit: int = 100) -> list[Attempt]:
    """Claim until nothing is found twice, since a first look may only settle gaps."""
    found: list[Attempt] = []
    misses = 0
    while misses < 2:
        more = claim(conn, queue, limit)
        misses = 0 if more else misses + 1
        found += more
    return found


def complete(
    conn: psycopg.Connection, attempts: Sequence[Attempt], instance: uuid.UUID = WORKER
) -> list[str]:
    """Complete attempts, one call per batch; return the answers."""
    batches: dict[tuple[int, int], list[int]] = {}
    for attempt in attempts:
        batches.setdefault((attempt.claim_slot, attempt.batch_id), []).append(attempt.position)
    return [
        result
        for (slot, batch), positions in batches.items()
        for (result,) in conn.execute(
            "SELECT result FROM awa.complete_jobs(%s, %s, %s, %s)",
            [instance, slot, batch, positions],
        ).fetchall()
    ]


def complete_open(conn: psycopg.Connection, instance: uuid.UUID = WORKER) -> int:
    """Complete every attempt of an instance that is open, known to the test or not."""
    batches = conn.execute(
        "SELECT b.slot, b.batch_id, awa._to_list(b.positions - coalesce(c.closed, '{}'))"
        " FROM awa.lease_claim_batches b LEFT JOIN (SELECT batch_id, range_agg(closed) AS closed"
        " FROM awa.lease_claim_closures GROUP BY 1) c USING (batch_id)"
        " WHERE b.owner = %s AND b.positions IS DISTINCT FROM c.closed",
        [instance],
    ).fetchall()
    answers = [
        result
        for slot, batch, positions in batches
        for (result,) in conn.execute(
            "SELECT result FROM awa.complete_jobs(%s, %s, %s, %s)",
            [instance, slot, batch, positions],
        ).fetchall()
    ]
    assert set(answers) <= {"done"}
    return len(answers)


def finish(
    conn: psycopg.Connection, items: Sequence[dict[str, object]], instance: uuid.UUID = WORKER
) -> list[str]:
    """End attempts by finish_jobs; return the answers."""
    rows = conn.execute("SELECT result FROM awa.finish_jobs(%s, %s)", [instance, Jsonb(items)])
    return [result for (result,) in rows]


def tick(conn: psycopg.Connection, *steps: str) -> dict[str, str]:
    """Run maintenance steps, all by default; return the outcome of each."""
    budget = {"steps": steps} if steps else {}
    rows = conn.execute("SELECT step, outcome FROM awa.tick(%s)", [Jsonb(budget)])
    return dict(rows.fetchall())


def set_settings(conn: psycopg.Connection, **settings: object) -> None:
    for name, setting in settings.items():
        conn.execute("SELECT awa.set_setting(%s, %s)", [name, str(setting)])


def rotate(conn: psycopg.Connection, ring: str = "queue") -> None:
    """Turn a ring by one slot; its current slot must hold something."""
    set_settings(conn, **{f"{ring}_rotate_bytes": 8192})
    assert tick(conn, f"plan_{ring}") == {f"plan_{ring}": "planned"}
    assert tick(conn, f"publish_{ring}") == {f"publish_{ring}": "published"}


def prune_all(conn: psycopg.Connection, ring: str = "queue") -> int:
    """Prune without regard to retention until nothing more can go; return how many slots went."""
    set_settings(conn, **PRUNE_AT_ONCE)
    pruned = 0
    while tick(conn, f"prune_{ring}")[f"prune_{ring}"] == "pruned":
        pruned += 1
    return pruned


def counts(conn: psycopg.Connection, queue: str = "default") -> dict[str, int]:
    """Return the states that have jobs, with how many."""
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute("SELECT * FROM awa.queue_counts(%s)", [queue]).fetchone()
    assert row
    return {state: count for state, count in row.items() if state != "queue" and count}


def grants(conn: psycopg.Connection) -> set[tuple[str, ...]]:
    """Every right on an object of the schema: class, name, role, privilege."""
    return set(conn.execute(GRANTED).fetchall())


def wait_until_blocked(conn: psycopg.Connection, waiting: psycopg.Connection) -> list[int]:
    """Wait until a connection waits for a lock; return the processes that hold it."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if blockers := value(conn, "SELECT pg_blocking_pids(%s)", waiting.info.backend_pid):
            return list(blockers)
    raise AssertionError("the connection does not wait for any lock")


def terminate(conn: psycopg.Connection, victim: psycopg.Connection) -> None:
    """Kill the server process of a connection, and wait until it is gone."""
    pid = victim.info.backend_pid
    assert value(conn, "SELECT pg_terminate_backend(%s, %s)", pid, WAIT_SECONDS * 1000)


def read_buffers(conn: psycopg.Connection, query: str, *parameters: object) -> int:
    """Run a query and return how many buffers it read, those of nested statements included."""
    text = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}"
    plan = value(conn, text, *parameters)[0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


@contextmanager
def open_transaction(
    database: Database, level: IsolationLevel | None = None
) -> Iterator[psycopg.Connection]:
    """A connection in a transaction, which is rolled back at the end; it waits for nothing long."""
    connection = database.connect(autocommit=False)
    try:
        connection.isolation_level = level
        connection.execute("SET statement_timeout = '10s'")
        yield connection
    finally:
        # A server does not wait for it when a connection is merely closed.
        with suppress(psycopg.OperationalError):
            connection.rollback()
        connection.close()
