"""What each capability may do, by real calls: every object of the schema, from the catalog.

A new public function, view or type fails here until it is given to somebody below, or to nobody;
what is internal (a name with an underscore, tables, sequences) belongs to nobody.
"""

from __future__ import annotations

import re
import string
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql

from conftest import Database, DatabaseServer
from engine import WORKER, claim_all, finish, grants, insert, tick, value

CAPABILITIES = ("producer", "worker", "operator", "reader")
EVERYBODY = " ".join(CAPABILITIES)
SEEING = "operator reader"
VIEWS = ("jobs", "terminal_jobs", "dlq", "queues", "instances", "settings")
# A view that producers insert into, and nobody reads.
INBOX = "job_inbox"
# Functions that only the owner may call; the roles that their functions need are given by name.
OWNERS = {"set_owner", *(f"grant_{capability}" for capability in CAPABILITIES)}
# Functions that views and `work` call with the rights of their caller.
INNER = {
    "_list_jobs": SEEING,
    "_list_terminal": SEEING,
    "_list_dlq": SEEING,
    "_list_queues": SEEING,
    "_list_instances": SEEING,
    "_list_settings": SEEING,
    "_sql_handler": "worker",
}
# Who may call each function, and a call that does its whole work and answers with something true.
# The names with a dollar are what Stage prepares.
CALLS = {
    "insert_job": ("producer", "(awa.insert_job('k', queue => '$queue')).job_id"),
    "insert_jobs": ("producer", """(awa.insert_jobs('[{"kind": "k", "queue": "new"}]')).job_id"""),
    "insert_many": ("producer", "awa.insert_many('k', '{1,2}', 'new')"),
    "ordering_shard": ("producer", "awa.ordering_shard('key', 4) + 1"),
    "unique_key": ("producer", "awa.unique_key('k', NULL, '{}', NULL)"),
    "concurrency_digest": ("producer", "awa.concurrency_digest('key')"),
    "cancel_by_unique_key": ("producer", "awa.cancel_by_unique_key('$key')"),
    "register_instance": ("worker", "awa.register_instance('$worker') IS NOT NULL"),
    "heartbeat": ("worker", "(awa.heartbeat('$worker')).drain = false"),
    "claim_ready_runtime": (
        "worker",
        "(awa.claim_ready_runtime('$filled', 9, '$worker')).attempt",
    ),
    "claim_status": ("worker", "(awa.claim_status('q', arm => true)).channel"),
    "complete_jobs": (
        "worker",
        "(awa.complete_jobs('$worker', $batch)).result = 'done'",
    ),
    "finish_jobs": ("worker", "(awa.finish_jobs('$worker', '$outcomes')).result = 'done'"),
    "complete_job": ("worker", "(awa.complete_job($token)).outcome = 'completed'"),
    "attempt_status": ("worker", "awa.attempt_status($token) = 'open'"),
    "set_progress": ("worker", "awa.set_progress($token, '1')"),
    "work": ("worker", "(awa.work('$bound')).completed = 1"),
    "tick": ("worker operator", "(awa.tick()).outcome <> 'failed'"),
    "declare_queue": ("operator", "awa.declare_queue('$queue', '{}') IS NOT NULL"),
    "pause_queue": ("operator", "awa.pause_queue('$filled')"),
    "resume_queue": ("operator", "awa.resume_queue('$paused')"),
    "drain_queue": ("operator", "awa.drain_queue('$filled') = 1"),
    "cancel_job": ("operator", "awa.cancel_job($running) = 'cancelled_running'"),
    "retry_job": ("operator", "(awa.retry_job($later)).job_id"),
    "update_job": ("operator", """awa.update_job($waiting, '{"priority": 3}')"""),
    "retry_dlq": ("operator", "(awa.retry_dlq($dead)).job_id"),
    "purge_dlq": ("operator", "awa.purge_dlq($dead)"),
    "set_setting": ("operator", "awa.set_setting('rescue_rows', '500') IS NOT NULL"),
    "register_sql_handler": (
        "operator",
        "awa.register_sql_handler('k', 'public.handle(jsonb)') IS NOT NULL",
    ),
    "verify": ("operator", "(awa.verify()).outcome = 'done'"),
    "job": (SEEING, "(awa.job($running)).state = 'running'"),
    "explain_job": (SEEING, "(awa.explain_job($waiting)).sentence"),
    "queue_counts": (SEEING, "(awa.queue_counts('$filled')).available = 1"),
    "queue_depths": (SEEING, "(awa.queue_depths()).queue"),
    "ring_status": (SEEING, "(awa.ring_status()).ring"),
    "api": (SEEING, "(awa.api()).name"),
    "version": (EVERYBODY, "awa.version()"),
    "schema_version": (EVERYBODY, "awa.schema_version()"),
    "error_codes": (EVERYBODY, "(awa.error_codes()).name"),
}
# Nothing is granted on these but what VIEWS say.
WRITES = ("INSERT INTO {} DEFAULT VALUES", "UPDATE {} SET {} = NULL", "DELETE FROM {}")
NO_SUCH_WRITE = ("55000", "42809")  # of a view, whoever tries

FUNCTIONS = """
    SELECT p.proname, format('awa.%I(%s)', p.proname, (
        -- A sublink, since a strict function of a constant NULL is never called.
        SELECT string_agg(format('(SELECT NULL::%s)', a.type::regtype), ', ' ORDER BY a.n)
        FROM unnest(p.proargtypes) WITH ORDINALITY a (type, n)))
    FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace
"""
RELATIONS = """
    SELECT c.relname, c.relkind::text, (
        SELECT a.attname FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = 1)
    FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind NOT IN ('i', 'I', 'c')
"""
TYPES = """
    SELECT t.typname, t.typtype = 'e' OR c.relkind = 'c' FROM pg_type t
    LEFT JOIN pg_class c ON c.oid = t.typrelid
    WHERE t.typnamespace = 'awa'::regnamespace AND t.typcategory <> 'A'
"""
# What format() may write into a statement: numbers of slots and lanes, names of leaves, sequences
# and roles that come from the catalog, and fragments made of those. No text of a caller.
OPERANDS = {
    *("p_slot", "v_slot", "v_done.slot", "p_from", "p_leaf", "p_seen.leaves[i]"),
    "v_claim_slot",
    *("p_lane", "v_id", "v_lane.position_seq", "v_hint", "p_sequence", "p_table"),
    *("v_table", "v_used", "p_mode", "v_query"),
    *("owner", "p_owner", "p_role", "v_object.class", "v_object.name", "v_object.object_name"),
    "awa._lane_base(v_id) + 1",
    "awa._lane_base(v_id + 1) - 1",
    "format('', p_slot)::regclass",
    "(SELECT string_agg(format('', l), '') FROM unnest(p_lanes) l)",
    "CASE p_ring WHEN '' THEN '' WHEN '' THEN '' ELSE '' END || p_slot",
    "(SELECT string_agg('' || t.name || '' || p_slot, '' ORDER BY t.o)"
    " FROM unnest(awa._ring_tables(p_ring)) WITH ORDINALITY t (name, o))",
    "(SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = ''::regnamespace"
    " AND p.proname = v_object.object_name)",
    # Of the install and of set_owner.
    *("v_leaf", "v_type", "format('', v_slot, p_table)"),
    "format(v_index.definition, quote_ident(v_leaf || '' || v_index.suffix),"
    " '' || quote_ident(v_leaf))",
}
LITERAL = re.compile(r"'(?:[^']|'')*'|\$query\$.*?\$query\$", re.DOTALL)


def operands(source: str) -> list[str]:
    """The arguments of each format() that is executed, literals emptied; or what is executed."""
    found = []
    text = " ".join(LITERAL.sub("''", source).split())
    for call in re.finditer(r"\bEXECUTE (format\()?", text):
        depth, start = 0, call.end()
        for end in range(start, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if (depth < 0 and call[1]) or text[end] == ";":
                found.append(text[start:end].strip())
                break
            if depth == 0 and text[end] == "," and call[1]:
                found.append(text[start:end].strip())
                start = end + 1
    return [operand for operand in found if operand != "''"]


@dataclass(frozen=True, slots=True)
class Roles:
    """A database, and a role per capability and one without any."""

    database: Database
    names: dict[str, str]


class Stage:
    """What the calls need, made by the superuser when it is asked for."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self.conn = conn

    def __getitem__(self, name: str) -> object:
        conn = self.conn
        queue = uuid.uuid4().hex
        if name == "worker":
            return WORKER
        if name in ("queue", "filled", "bound", "waiting"):
            job_id = insert(conn, queue) if name != "queue" else 0
            if name == "bound":
                conn.execute("SELECT awa.register_sql_handler('k', 'public.handle(jsonb)')")
            return job_id if name == "waiting" else queue
        if name == "paused":
            conn.execute("SELECT awa.pause_queue(%s)", [queue])
            return queue
        if name == "later":
            return insert(conn, queue, opts={"delay_seconds": 3600})
        if name == "key":
            insert(conn, queue, opts={"unique": {"key": queue}})
            return f"\\x{queue}"
        conn.execute("SELECT awa.declare_queue(%s, '{\"dlq\": true}')", [queue])
        insert(conn, queue)
        [attempt] = claim_all(conn, queue)
        if name == "dead":
            assert finish(conn, [attempt.item("fail")]) == ["done"]
        return {
            "dead": attempt.job_id,
            "running": attempt.job_id,
            "token": ", ".join(map(str, attempt.token)),
            "batch": f"{attempt.claim_slot}, {attempt.batch_id}, '{{{attempt.position}}}'",
            "outcomes": str([attempt.item("completed")]).replace("'", '"'),
        }[name]


@pytest.fixture(scope="module")
def roles(server: DatabaseServer, template: Database) -> Iterator[Roles]:
    names = {c: f"awa_{c}_{uuid.uuid4().hex[:12]}" for c in (*CAPABILITIES, "nobody")}
    with server.fresh(template.name) as database:
        with database.connect() as conn:
            conn.execute("CREATE FUNCTION handle(args jsonb) RETURNS void LANGUAGE sql AS ''")
            # A queue that exists brings sequences that were made after the install.
            insert(conn)
            for capability, name in names.items():
                conn.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
                if capability in CAPABILITIES:
                    conn.execute("SET ROLE awa_owner")
                    conn.execute(f"SELECT awa.grant_{capability}('{name}')".encode())
                    conn.execute("RESET ROLE")
        yield Roles(database, names)
    for name in names.values():
        server.admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture(params=[*CAPABILITIES, "nobody"])
def capability(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def conn(roles: Roles) -> Iterator[psycopg.Connection]:
    with roles.database.connect() as conn:
        yield conn


@pytest.fixture
def caller(roles: Roles, capability: str) -> Iterator[psycopg.Connection]:
    """A session with the rights of one capability alone."""
    with roles.database.connect() as conn:
        conn.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(roles.names[capability])))
        yield conn


def outcome(caller: psycopg.Connection, statement: str) -> str:
    """The SQLSTATE of a statement in a transaction of its own."""
    try:
        caller.execute(statement.encode())
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return "00000"


def test_every_function_is_given_to_somebody_or_to_nobody(conn: psycopg.Connection) -> None:
    installed = {name for name, _ in conn.execute(FUNCTIONS)}
    public = {name for name in installed if not name.startswith("_")}
    assert public == {*CALLS, *OWNERS}
    assert set(INNER) < installed


def test_every_relation_is_a_view_or_internal(conn: psycopg.Connection) -> None:
    relations = conn.execute(RELATIONS).fetchall()
    assert {name for name, kind, _ in relations if kind == "v"} == {*VIEWS, INBOX}
    assert {kind for _, kind, _ in relations} == {"v", "r", "p", "S"}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_works_with_one_capability_alone(
    roles: Roles, conn: psycopg.Connection, name: str
) -> None:
    """Broken by a function of the chain that is not SECURITY DEFINER, or whose owner lacks it."""
    allowed, call = CALLS[name]
    assert f"awa.{name}(" in call
    for capability in allowed.split():
        statement = string.Template(f"SELECT {call}").substitute(Stage(conn))  # type: ignore[arg-type]
        with roles.database.connect() as caller:
            role = sql.Identifier(roles.names[capability])
            caller.execute(sql.SQL("SET ROLE {}").format(role))
            row = caller.execute(statement.encode()).fetchone()
        assert row, statement
        assert row[0], statement


def test_every_other_call_is_refused(
    conn: psycopg.Connection, caller: psycopg.Connection, capability: str
) -> None:
    """Broken by a GRANT, and by EXECUTE for PUBLIC."""
    allowed = {name for name, (who, _) in CALLS.items() if capability in who.split()}
    allowed |= {name for name, who in INNER.items() if capability in who.split()}
    calls = conn.execute(FUNCTIONS).fetchall()
    answers = {name: outcome(caller, f"SELECT {call}") for name, call in calls}
    assert {name for name, state in answers.items() if state != "42501"} == allowed


def test_tables_views_and_sequences_are_closed(
    conn: psycopg.Connection, caller: psycopg.Connection, capability: str
) -> None:
    may_see = set(VIEWS) if capability in SEEING.split() else set()
    wrong = []
    for name, kind, column in conn.execute(RELATIONS).fetchall():
        expected = "00000" if name in may_see else "42501"
        if kind == "S":
            reads = [f"SELECT nextval('awa.{name}')", f"SELECT setval('awa.{name}', 1)"]
            writes = []
        else:
            reads = []
            writes = [statement.format(f"awa.{name}", column) for statement in WRITES]
            writes += [f"TRUNCATE awa.{name}"]
        for statement in [f"SELECT * FROM awa.{name} LIMIT 1", *reads]:
            if outcome(caller, statement) != expected:
                wrong.append(statement)
        refusals = ("42501", *(NO_SUCH_WRITE if kind == "v" else ()))
        if name == INBOX and capability == "producer":
            assert outcome(caller, writes.pop(0)) == "22023"  # a job without a kind
        wrong += [s for s in writes if outcome(caller, s) not in refusals]
    assert wrong == []


def test_a_producer_loads_jobs_and_nobody_else_does(
    caller: psycopg.Connection, capability: str
) -> None:
    state = outcome(caller, "INSERT INTO awa.job_inbox (kind, queue) VALUES ('k', 'inbox')")
    assert state == ("00000" if capability == "producer" else "42501")


def test_public_types_come_with_every_capability(
    conn: psycopg.Connection, caller: psycopg.Connection, capability: str
) -> None:
    """Broken by what PostgreSQL grants: a column of a type of ours would hold up an upgrade."""
    allowed = set()
    for name, _ in conn.execute(TYPES).fetchall():
        state = outcome(caller, f"CREATE TEMP TABLE of_{name} (value awa.{name})")
        assert state in ("00000", "42501")
        if state == "00000":
            allowed.add(name)
    public = {n for n, is_own in conn.execute(TYPES) if is_own and not n.startswith("_")}
    assert allowed == (set() if capability == "nobody" else public)


def test_nothing_else_is_granted_to_anybody(roles: Roles, conn: psycopg.Connection) -> None:
    """Broken by any right that the calls above would not need."""
    expected = set()
    functions = {name: who for name, (who, _) in CALLS.items()} | INNER
    for capability in CAPABILITIES:
        role = roles.names[capability]
        expected.add(("schema", "awa", role, "USAGE"))
        expected |= {
            ("function", name, role, "EXECUTE")
            for name, who in functions.items()
            if capability in who.split()
        }
        expected |= {
            ("type", name, role, "USAGE")
            for name, is_own in conn.execute(TYPES)
            if is_own and not name.startswith("_")
        }
        if capability in SEEING.split():
            expected |= {("relation", view, role, "SELECT") for view in VIEWS}
        if capability == "producer":
            expected.add(("relation", INBOX, role, "INSERT"))
    assert grants(conn) == expected


def test_nothing_is_left_to_default_privileges(
    server: DatabaseServer, empty_database: Database
) -> None:
    """A database that gives PUBLIC everything made later does not give it the engine."""
    with empty_database.connect() as conn:
        for kind in ("TABLES", "SEQUENCES", "FUNCTIONS", "TYPES"):
            conn.execute(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO PUBLIC".encode())
        conn.execute("CREATE EXTENSION awa")
        conn.execute("SELECT awa.set_owner('awa_owner')")
        insert(conn)
        tick(conn)
        assert grants(conn) == set()
        assert not value(conn, "SELECT has_schema_privilege('public', 'awa', 'USAGE')")


def test_no_text_of_a_caller_becomes_part_of_a_statement(conn: psycopg.Connection) -> None:
    """Values go in by USING; work() calls the function that an operator bound, by its oid.

    `_create_for_slots` runs definitions of the install script, and nobody is granted it.
    """
    sources = conn.execute(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
    ).fetchall()
    found = {(name, operand) for name, source in sources for operand in operands(source)}
    others = {(name, operand) for name, operand in found if operand not in OPERANDS}
    assert {other for other in others if other[0] != "_create_for_slots"} == {
        ("work", "v_query INTO v_result USING v_job.args, v_job")
    }
    assert len(others) == 2
    assert {operand for _, operand in found} >= OPERANDS
    assert operands("EXECUTE format('SELECT ''; %I', p_text, f(a, b)) USING x;") == [
        "p_text",
        "f(a, b)",
    ]
