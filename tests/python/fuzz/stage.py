"""A database with jobs in every state, calls of its public functions, and proofs that it works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import IsolationLevel, sql

from conftest import Database
from engine import (
    Attempt,
    claim_all,
    complete,
    counts,
    finish,
    insert,
    tick,
    value,
)

from .values import TOKEN, UNIQUE_KEY, Array, Ref, as_json

# Known to no strategy, so that nothing but an id leads to its jobs.
OWN_QUEUE = "of the stage alone"
VIEWS = ("jobs", "terminal_jobs", "dlq", "queues", "instances", "settings")
HANDLERS = """
    CREATE FUNCTION handle(args jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT args';
    CREATE FUNCTION handle_job(job awa.claimed_job) RETURNS void LANGUAGE sql AS '';
    CREATE FUNCTION handle_set(args jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT args';
"""
CASELESS = """
    CREATE COLLATION public.caseless (
        provider = icu, locale = 'und-u-ks-level2', deterministic = false)
"""
HAS_ICU = "SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'und-x-icu')"
SIGNATURES = """
    SELECT p.proname, coalesce(p.proargnames, '{}')::text[],
           ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY a (t, o)
                 ORDER BY a.o), p.pronargs - p.pronargdefaults
    FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace AND NOT starts_with(p.proname, '_')
    ORDER BY p.proname
"""
TABLES = """
    SELECT c.oid::regclass::text FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
    ORDER BY 1
"""
RESET = """
    SELECT count(awa.set_setting(name, NULL)) FROM awa.settings WHERE value <> default_value;
    SELECT count(awa.resume_queue(queue)) FROM awa.queues WHERE paused_at IS NOT NULL;
"""
# What a session must not keep between its statements.
LEFT_BEHIND = """
    SELECT a.state, l.locktype, l.mode, l.relation::regclass::text
    FROM pg_stat_activity a LEFT JOIN pg_locks l ON l.pid = a.pid
    WHERE a.pid = %s AND (a.state <> 'idle' OR l.pid IS NOT NULL)
"""


@dataclass(frozen=True, slots=True)
class Function:
    """A public function as the catalog has it."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    required: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what is given, and the transaction it is made in."""

    function: Function
    arguments: dict[str, object]
    level: IsolationLevel | None = None
    is_kept: bool = True
    is_caseless: bool = False  # texts have a collation that ignores case, where there is one


class Stage:
    """The database, one session that the calls are made in, and another that looks at it."""

    def __init__(self, database: Database) -> None:
        self.dsn = database.dsn
        self.conn = database.connect()
        self.watcher = database.connect()
        self.known: dict[str, dict[str, int]] = {}
        self.conn.execute(HANDLERS)
        self.has_icu = value(self.conn, HAS_ICU)
        if self.has_icu:
            self.conn.execute(CASELESS)
        # Nothing here waits for anybody.
        self.conn.execute("SET statement_timeout = '30s'; SET lock_timeout = '5s'")
        for queue, opts in (
            ("sharded", '{"enqueue_shards": 4}'),
            ("strict", '{"strict_fifo": true}'),
            ("dead", '{"dlq": true}'),
            (f"{OWN_QUEUE}, dead", '{"dlq": true}'),
        ):
            self.conn.execute("SELECT awa.declare_queue(%s, %s)", [queue, opts])
        self._tables = [name for (name,) in self.conn.execute(TABLES).fetchall()]
        self.functions = {
            name: Function(name, tuple(zip(names, types, strict=True)), required)
            for name, names, types, required in self.conn.execute(SIGNATURES).fetchall()
        }
        names = self.conn.execute("SELECT name FROM awa.settings ORDER BY name").fetchall()
        self.settings = [name for (name,) in names]
        self.refresh()

    def close(self) -> None:
        self.conn.close()
        self.watcher.close()

    # Jobs in every state

    def refresh(self) -> None:
        """Put settings and pauses back, and have a job in every state."""
        conn = self.conn
        conn.execute(RESET)
        conn.execute("SELECT awa.pause_queue('paused')")
        conn.execute("SELECT awa.register_sql_handler('bound', 'public.handle(jsonb)')")
        with conn.transaction(force_rollback=True):
            ids = {"pruned": insert(conn, OWN_QUEUE), "never": 2**62}
        keep = {"opts": {"keep_result": True}}
        for name in ("running", "completed", "retryable", "failed", "released"):
            ids[name] = insert(conn, OWN_QUEUE, **keep)
        ids["dead"] = insert(conn, f"{OWN_QUEUE}, dead")
        attempts = {a.job_id: a for a in self._claimed()}
        outcomes: dict[str, tuple[str, dict[str, object]]] = {
            "completed": ("completed", {"result": 1}),
            "retryable": ("retry", {"delay_seconds": 3600, "error": "boom"}),
            "failed": ("fail", {"error": {"error": "boom"}}),
            "dead": ("fail", {"reason": "because"}),
            "released": ("released", {}),
        }
        given = [attempts[ids[n]].item(outcome, **more) for n, (outcome, more) in outcomes.items()]
        assert finish(conn, given) == ["done"] * len(given)
        ids["available"] = insert(conn, OWN_QUEUE, args="{}")
        ids["scheduled"] = insert(conn, OWN_QUEUE, opts={"delay_seconds": 3600})
        ids["cancelled"] = insert(conn, OWN_QUEUE)
        conn.execute("SELECT awa.cancel_job(%s, 'no')", [ids["cancelled"]])
        ids["unique"] = insert(conn, OWN_QUEUE, opts={"unique": {"key": UNIQUE_KEY}})
        for queue in ("stage", "stage", "sharded", "strict", "paused", "dead"):
            insert(conn, queue)
        self.known = {name: {"job_id": job_id} for name, job_id in ids.items()}
        for name in {"running", *outcomes}:
            self.known[name] = dict(zip(TOKEN, attempts[ids[name]].token, strict=True))

    def claim(self, count: int) -> list[Attempt]:
        """So many attempts that run, in one batch."""
        complete(self.conn, self._claimed())
        self.conn.execute(
            "SELECT awa.insert_many('k', array_fill('1'::jsonb, ARRAY[%s]), %s,"
            " opts => '{\"keep_result\": true}')",
            [count, OWN_QUEUE],
        )
        attempts = claim_all(self.conn, OWN_QUEUE)
        assert len(attempts) == count
        return attempts

    def _claimed(self) -> list[Attempt]:
        return claim_all(self.conn, OWN_QUEUE) + claim_all(self.conn, f"{OWN_QUEUE}, dead")

    # Calls

    def text(self, given: object, type_name: str) -> object:
        """A value as it is sent, with a cast to its type."""
        if given is None:
            return None
        if type_name == "jsonb":
            return as_json(given, self.known)
        if isinstance(given, Array):
            return given.text(lambda element: self._element(element, type_name))
        if isinstance(given, Ref):
            return str(self.known[given.name][given.field])
        if type_name.startswith("reg") and isinstance(given, str):
            catalog = "proc WHERE proname" if type_name == "regprocedure" else "roles WHERE rolname"
            return value(self.conn, f"SELECT min(oid::bigint) FROM pg_{catalog} = %s", given)
        return str(given) if isinstance(given, int) else given

    def _element(self, element: object, type_name: str) -> str:
        return str(self.text(element, type_name.removesuffix("[]")))

    def call(self, call: Call) -> list[tuple[Any, ...]]:
        """Make a call in a transaction of its own; the rows of its answer."""
        types = dict(call.function.parameters)
        given = {n: self.text(v, types[n]) for n, v in call.arguments.items()}
        casts = (
            sql.SQL("{} => {}").format(sql.Identifier(name), self._cast(name, types[name], call))
            for name in given
        )
        query = sql.SQL("SELECT answer.* FROM awa.{}({}) answer").format(
            sql.Identifier(call.function.name), sql.SQL(", ").join(casts)
        )
        self.conn.isolation_level = call.level
        try:
            with self.conn.transaction(force_rollback=not call.is_kept):
                return self.conn.execute(query, given).fetchall()
        finally:
            self.conn.isolation_level = None

    def _cast(self, name: str, type_name: str, call: Call) -> sql.Composed:
        # By its number, an object of the catalog need not exist.
        cast = "{}::oid::" if type_name.startswith("reg") else "{}::"
        is_caseless = type_name == "text" and call.is_caseless and self.has_icu
        collation = " COLLATE public.caseless" if is_caseless else ""
        return sql.SQL(cast).format(sql.Placeholder(name)) + sql.SQL(type_name + collation)

    # Proofs

    def digest(self) -> tuple[Any, ...]:
        """A number for the rows of each table."""
        query = ", ".join(
            f"(SELECT sum(hashtextextended(t::text, 0)) FROM {table} t)" for table in self._tables
        )
        [row] = self.watcher.execute(f"SELECT {query}").fetchall()
        return row

    def check(self) -> None:
        """Nothing is held, everything can be read, and a job goes its way."""
        conn = self.conn
        left = self.watcher.execute(LEFT_BEHIND, [conn.info.backend_pid]).fetchall()
        assert left == [], left
        assert not value(conn, "SELECT coalesce(current_setting('awa.inbox', true), '') <> ''")
        for view in VIEWS:
            conn.execute(f"SELECT * FROM awa.{view}").fetchall()
        conn.execute("SELECT (awa.queue_depths()).*, (SELECT count(*) FROM awa.ring_status())")
        outcomes = tick(conn)
        assert "failed" not in outcomes.values(), outcomes
        # The first one publishes slots that tick has planned, and forgets where claims have looked.
        changed: dict[str, int] = dict(
            conn.execute("SELECT step, rows FROM awa.verify()").fetchall()
        )
        assert changed["verify_sequences"] == 0, changed
        again = conn.execute("SELECT step FROM awa.verify() WHERE rows <> 0").fetchall()
        assert again == [], again
        job_id = insert(conn, OWN_QUEUE)
        attempts = self._claimed()
        assert job_id in {attempt.job_id for attempt in attempts}
        assert set(complete(conn, attempts)) == {"done"}
        assert value(conn, "SELECT (awa.job(%s)).state", job_id) == "completed"

    def work_off(self) -> None:
        """Claim and complete all that waits: what was taken in can also be given out."""
        conn = self.conn
        conn.execute(RESET)
        for (queue,) in conn.execute("SELECT queue FROM awa.queues WHERE lanes > 0").fetchall():
            attempts = claim_all(conn, queue, 1000)
            assert set(complete(conn, attempts)) <= {"done"}
            assert "available" not in counts(conn, queue), queue
