"""All packagings of the one source give the same catalog; schemas of one database are apart."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import awa
from awa._install import InstallError, install
from conftest import Database
from engine import BUILD, SCRIPT, WORKER, install_plain, value

REPO = Path(__file__).parents[2]
CONTROL = REPO / "extension/awa.control"
OWNER = "awa_owner"
# What pg_tle offers to scripts, but for keeping them as functions.
PGTLE = """
CREATE SCHEMA pgtle;
CREATE TABLE pgtle.calls (name text, version text, description text, ext text, requires text[]);
CREATE FUNCTION pgtle.install_extension(
    name text, version text, description text, ext text, requires text[] DEFAULT NULL)
RETURNS boolean LANGUAGE sql
AS 'INSERT INTO pgtle.calls VALUES ($1, $2, $3, $4, $5); SELECT true';
CREATE TABLE pgtle.updates (name text, fromvers text, tovers text, ext text);
CREATE FUNCTION pgtle.install_update_path(name text, fromvers text, tovers text, ext text)
RETURNS boolean LANGUAGE sql
AS 'INSERT INTO pgtle.updates VALUES ($1, $2, $3, $4); SELECT true';
CREATE TABLE pgtle.defaults (name text, version text);
CREATE FUNCTION pgtle.set_default_version(name text, version text)
RETURNS boolean LANGUAGE sql
AS 'INSERT INTO pgtle.defaults VALUES ($1, $2); SELECT true';
"""
# A schema's name goes into identifiers, literals, comments and format() alike.
NAMES = ["Tenant 7", "select", "a.b", "x;y", "--x", "/*x", "{x}", "naïve", "n" * 63]
BAD_NAMES = ["", "a'b", 'a"b', "a$b", "a\\b", "a%b", "a\nb", "n" * 64, "ï" * 32, "pg_x"]

CHANGES = """
ALTER FUNCTION awa.tick COST 7
CREATE OR REPLACE FUNCTION awa.version() RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT NULL::text'
ALTER FUNCTION awa.version() STABLE
ALTER FUNCTION awa.tick SET search_path = awa
GRANT EXECUTE ON FUNCTION awa.version() TO PUBLIC
COMMENT ON FUNCTION awa.version() IS 'other'
ALTER TABLE awa.queue_meta ADD COLUMN more integer
ALTER TABLE awa.queue_meta ALTER COLUMN queue SET DEFAULT 'x'
ALTER TABLE awa.queue_meta ALTER COLUMN queue SET STORAGE PLAIN
ALTER TABLE awa.setting_overrides DROP CONSTRAINT setting_overrides_pkey
ALTER TABLE awa.ready_entries_0 SET (autovacuum_enabled = on)
ALTER TABLE awa.ready_entries_0 SET (toast.autovacuum_enabled = on)
COMMENT ON TABLE awa.ready_entries_0 IS NULL
COMMENT ON COLUMN awa.queue_meta.queue IS 'other'
GRANT SELECT (queue) ON awa.queue_meta TO PUBLIC
ALTER TABLE awa.ready_entries DETACH PARTITION awa.ready_entries_0
CREATE INDEX ON awa.ready_entries_0 (kind)
ALTER SEQUENCE awa.job_ids CACHE 7
ALTER TYPE awa.job_state RENAME VALUE 'running' TO 'walking'
GRANT USAGE ON TYPE awa.job_state TO PUBLIC
ALTER VIEW awa.settings SET (security_barrier)
CREATE OR REPLACE VIEW awa.queues AS SELECT q.* FROM awa._list_queues() q WHERE true
DROP TRIGGER end_load ON awa.job_inbox
GRANT USAGE ON SCHEMA awa TO PUBLIC
ALTER DEFAULT PRIVILEGES IN SCHEMA awa GRANT SELECT ON TABLES TO PUBLIC
ALTER TABLE awa.deferred_jobs_0 REPLICA IDENTITY FULL
INSERT INTO awa.setting_overrides VALUES ('a', 'b')
""".strip().splitlines()
# Everything about the schema but who is a member of what, one line of text each.
CATALOG = """
SELECT format('function %s owner %s acl %s comment %s', pg_get_functiondef(p.oid),
              p.proowner::regrole, p.proacl, obj_description(p.oid, 'pg_proc'))
FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
UNION ALL
SELECT format('relation %s kind %s persistence %s options %s owner %s acl %s comment %s bound %s'
              ' key %s view %s parent %s toast %s replica identity %s',
              c.oid::regclass, c.relkind, c.relpersistence, c.reloptions, c.relowner::regrole,
              c.relacl, obj_description(c.oid, 'pg_class'), pg_get_expr(c.relpartbound, c.oid),
              CASE c.relkind WHEN 'p' THEN pg_get_partkeydef(c.oid) END,
              CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) END,
              (SELECT array_agg(i.inhparent::regclass) FROM pg_inherits i WHERE i.inhrelid = c.oid),
              (SELECT t.reloptions FROM pg_class t WHERE t.oid = c.reltoastrelid), c.relreplident)
FROM pg_class c WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('column %s %s %s %s not null %s default %s storage %s acl %s comment %s kind %s %s'
              ' compression %s collation %s target %s',
              c.oid::regclass, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
              a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attstorage, a.attacl,
              col_description(c.oid, a.attnum), a.attidentity, a.attgenerated, a.attcompression,
              a.attcollation::regcollation, a.attstattarget)
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('index %s valid %s replica identity %s', pg_get_indexdef(i.indexrelid), i.indisvalid,
              i.indisreplident)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('constraint %s on %s %s %s comment %s', k.conname, k.conrelid::regclass, k.contype,
              pg_get_constraintdef(k.oid), obj_description(k.oid, 'pg_constraint'))
FROM pg_constraint k WHERE k.connamespace = $1::regnamespace
UNION ALL
SELECT format('type %s owner %s acl %s comment %s labels %s', t.oid::regtype, t.typowner::regrole,
              t.typacl, obj_description(t.oid, 'pg_type'),
              (SELECT array_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e
               WHERE e.enumtypid = t.oid))
FROM pg_type t WHERE t.typnamespace = $1::regnamespace
UNION ALL
SELECT format('sequence %s %s', s.seqrelid::regclass, (to_jsonb(s) - 'seqrelid')::text)
FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('trigger %s enabled %s comment %s', pg_get_triggerdef(t.oid), t.tgenabled,
              obj_description(t.oid, 'pg_trigger'))
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = $1::regnamespace AND NOT t.tgisinternal
UNION ALL
SELECT format('event trigger %s', e.evtname) FROM pg_event_trigger e
UNION ALL
SELECT format('role %s %s', r.rolname, (to_jsonb(r) - 'oid' - 'rolpassword')::text)
FROM pg_roles r WHERE r.rolname = 'awa_owner'
UNION ALL
SELECT format('schema owner %s acl %s', n.nspowner::regrole, n.nspacl)
FROM pg_namespace n WHERE n.nspname = $1
UNION ALL
SELECT format('default acl %s %s %s', d.defaclrole::regrole, d.defaclobjtype, d.defaclacl)
FROM pg_default_acl d WHERE d.defaclnamespace = $1::regnamespace
"""

TABLES = """
SELECT c.oid::regclass::text FROM pg_class c
WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'r'
"""


def catalog(conn: psycopg.Connection, schema: str = "awa") -> list[str]:
    """Describe all that a schema holds, rows too, with its name made "awa" everywhere."""
    found = objects(conn, schema)
    tables = conn.execute(TABLES, [schema]).fetchall()
    contents = " UNION ALL ".join(
        f"SELECT '{t}' || to_jsonb(t)::text FROM {t} t" for (t,) in tables
    )
    rows = conn.execute(contents.encode()).fetchall()
    return sorted([*found, *(row.replace(schema, "awa") for (row,) in rows)])


def objects(conn: psycopg.Connection, schema: str = "awa") -> list[str]:
    """Describe the objects alone."""
    conn.execute("SET search_path = pg_catalog")  # so that names are written in full
    query = CATALOG.replace("$1", f"'{schema}'")
    lines = conn.execute(query.replace("%", "%%"), []).fetchall()
    return sorted(line.replace(schema, "awa") for (line,) in lines)


def difference(left: list[str], right: list[str]) -> list[str]:
    lines = difflib.unified_diff(left, right, lineterm="", n=0)
    return [line[:500] for line in lines]


def become_owner(conn: psycopg.Connection, database: Database) -> None:
    """Go on as a role that has no attributes and may make schemas in this database."""
    if value(conn, "SELECT to_regrole(%s) IS NULL", OWNER):
        conn.execute(f"CREATE ROLE {OWNER} NOLOGIN")
    conn.execute(f"GRANT CREATE ON DATABASE {database.name} TO {OWNER}")
    conn.execute(f"SET SESSION AUTHORIZATION {OWNER}")


def make_install(pg_bin: Path, *words: str) -> None:
    """Run the documented command, free of what the make that runs us was told."""
    told = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VERSION", "K")
    done = subprocess.run(
        ["make", "install", f"PG_CONFIG={pg_bin / 'pg_config'}", *words],
        cwd=REPO,
        env={name: text for name, text in os.environ.items() if name not in told},
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def pgtle_call(empty_database: Database) -> dict[str, str]:
    """What the script for pg_tle passes to it."""
    script = REPO / f"build/pgtle-awa-{awa.__version__}.sql"
    with empty_database.connect() as conn:
        conn.execute(PGTLE)
        conn.execute(script.read_bytes())
        [call] = conn.execute("SELECT to_jsonb(c) FROM pgtle.calls c").fetchall()
        conn.execute("DROP SCHEMA pgtle CASCADE")
    return dict(call[0])


def test_the_comparison_sees_each_change(conn: psycopg.Connection) -> None:
    before = catalog(conn)
    unseen = []
    for change in CHANGES:
        with conn.transaction(force_rollback=True):
            conn.execute(change.encode())
            if before == catalog(conn):
                unseen.append(change)
    assert unseen == []
    assert difference(before, catalog(conn)) == []


def test_the_plain_script_makes_what_the_extension_makes(
    conn: psycopg.Connection, empty_database: Database
) -> None:
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        assert install(plain).installed
        found = catalog(plain)
    assert len(found) > 1000
    assert difference(catalog(conn), found) == []


def test_another_schema_holds_the_same(conn: psycopg.Connection, empty_database: Database) -> None:
    with empty_database.connect() as plain:
        assert install(plain, schema="tenant_7", owner=OWNER).installed
        found = catalog(plain, "tenant_7")
    assert difference(catalog(conn), found) == []


def test_pgxs_installs_the_control_file_and_the_scripts(pg_bin: Path, tmp_path: Path) -> None:
    make_install(pg_bin, f"DESTDIR={tmp_path}")
    files = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    built = {path.name: path for path in [CONTROL, SCRIPT, *BUILD.glob("awa--*--*.sql")]}
    assert files.keys() == built.keys()
    assert [n for n in files if files[n].read_bytes() != built[n].read_bytes()] == []
    share = subprocess.check_output([pg_bin / "pg_config", "--sharedir"], text=True).strip()
    assert {str(path.parent) for path in files.values()} == {f"{tmp_path}{share}/extension"}


def test_an_extension_in_a_folder_of_the_user_makes_the_same(
    conn: psycopg.Connection,
    empty_database: Database,
    server_version: int,
    pg_bin: Path,
    open_folder: Path,
) -> None:
    if server_version < 18:
        pytest.skip("extension_control_path came with PostgreSQL 18")
    make_install(pg_bin, f"prefix={open_folder}")
    [control] = open_folder.rglob(CONTROL.name)
    with empty_database.connect() as plain:
        # The server's own folder, which has the extension too, is left out.
        plain.execute(
            "SELECT set_config('extension_control_path', %s, false)", [str(control.parents[1])]
        )
        plain.execute("CREATE EXTENSION awa")
        plain.execute(f"SELECT awa.set_owner('{OWNER}')")
        found = catalog(plain)
        assert value(plain, "SELECT extversion FROM pg_extension WHERE extname = 'awa'")
    assert difference(catalog(conn), found) == []


def test_a_role_without_superuser_creates_the_trusted_extension(
    conn: psycopg.Connection, empty_database: Database
) -> None:
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        plain.execute("CREATE EXTENSION awa")
        plain.execute("RESET SESSION AUTHORIZATION")
        # What it makes is its own, SECURITY DEFINER functions too.
        schema = "FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
        assert value(plain, f"SELECT DISTINCT proowner::regrole::text {schema}") == OWNER
        plain.execute(f"SELECT awa.set_owner('{OWNER}')")
        found = catalog(plain)
    assert difference(catalog(conn), found) == []


def test_pg_tle_is_given_the_script_as_it_is(pgtle_call: dict[str, str]) -> None:
    control = dict(re.findall(r"^(\w+) = '(.*)'$", CONTROL.read_text(), re.MULTILINE))
    assert pgtle_call == {
        "name": "awa",
        "version": control["default_version"],
        "description": control["comment"],
        "ext": SCRIPT.read_text(),
        "requires": None,
    }


def test_the_script_for_pg_tle_makes_the_same(
    conn: psycopg.Connection, empty_database: Database, pgtle_call: dict[str, str]
) -> None:
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        plain.execute("CREATE SCHEMA awa")
        plain.execute("SET check_function_bodies = off")
        plain.execute("SET search_path = awa, pgtle, pg_temp")
        plain.execute(pgtle_call["ext"].replace("@extschema@", "awa").encode())
        found = catalog(plain)
    assert difference(catalog(conn), found) == []


def test_an_extension_as_pg_tle_declares_it_makes_the_same(
    conn: psycopg.Connection,
    empty_database: Database,
    server_version: int,
    open_folder: Path,
    pgtle_call: dict[str, str],
) -> None:
    """Its control has no schema and is not trusted, so the schema and the role are the caller's."""
    if server_version < 18:
        pytest.skip("extension_control_path came with PostgreSQL 18")
    folder = open_folder / "extension"
    folder.mkdir()
    version = pgtle_call["version"]
    (folder / "awa.control").write_text(
        f"default_version = '{version}'\nrelocatable = false\nsuperuser = false\ntrusted = false\n"
    )
    (folder / f"awa--{version}.sql").write_text(pgtle_call["ext"])
    with empty_database.connect() as plain:
        plain.execute("SELECT set_config('extension_control_path', %s, false)", [str(open_folder)])
        become_owner(plain, empty_database)
        plain.execute("CREATE SCHEMA awa")
        plain.execute("CREATE EXTENSION awa SCHEMA awa")
        found = catalog(plain)
        marked = "SELECT cardinality(extconfig) > 0 FROM pg_extension WHERE extname = 'awa'"
        assert value(plain, marked)
    assert difference(catalog(conn), found) == []


def test_any_schema_name_works_or_is_refused_at_once(empty_database: Database) -> None:
    with empty_database.connect() as conn:
        become_owner(conn, empty_database)
        for name in NAMES:
            assert install(conn, schema=name).installed
            assert not install(conn, schema=name).installed
        for name in NAMES:
            schema = sql.Identifier(name)
            [[job]] = conn.execute(
                sql.SQL("SELECT ({}.insert_job('k')).job_id").format(schema)
            ).fetchall()
            taken = conn.execute(
                sql.SQL(
                    "SELECT c.job_id, c.run_lease, c.claim_slot, c.batch_id, c.position"
                    " FROM {}.claim_ready_runtime('default', 9, %s) c"
                ).format(schema),
                [WORKER],
            ).fetchall()
            assert [row[0] for row in taken] == [job]
            complete = sql.SQL(
                "SELECT result FROM {}.complete_jobs(%s, %s, %s, ARRAY[%s]::bigint[])"
            )
            answer = conn.execute(complete.format(schema), [WORKER, *taken[0][2:]]).fetchall()
            assert answer == [("done",)]
            outcomes = conn.execute(sql.SQL("SELECT outcome FROM {}.tick()").format(schema))
            assert ("failed",) not in outcomes.fetchall()
        for name in BAD_NAMES:
            with pytest.raises(InstallError, match="cannot be the schema's name"):
                install(conn, schema=name)


def test_a_schema_of_ones_own_is_enough(empty_database: Database) -> None:
    with empty_database.connect() as conn:
        become_owner(conn, empty_database)
        conn.execute("RESET SESSION AUTHORIZATION")
        conn.execute(f"REVOKE CREATE ON DATABASE {empty_database.name} FROM {OWNER}")
        conn.execute("CREATE SCHEMA other")
        conn.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        for schema in ("awa", "other"):
            with pytest.raises(InstallError, match=f"role {OWNER} may not create") as refused:
                install(conn, schema=schema)
            conn.execute("RESET SESSION AUTHORIZATION")
            conn.execute(refused.value.hint.partition(": ")[2])
            conn.execute(f"SET SESSION AUTHORIZATION {OWNER}")
            assert install(conn, schema=schema).installed


def test_schemas_in_one_database_are_apart(empty_database: Database) -> None:
    schemas = ("tenant_a", "tenant_b")
    claim = "SELECT job_id FROM {}.claim_ready_runtime('default', 10, %s)"
    with empty_database.connect() as conn, empty_database.connect(autocommit=False) as other:
        for schema in schemas:
            install_plain(conn, schema)
        jobs = {
            schema: value(conn, f"SELECT ({schema}.insert_job('k')).job_id") for schema in schemas
        }
        conn.execute("SELECT tenant_a.insert_job('k', queue => 'only_a')")
        counts = "SELECT (tenant_b.queue_counts('only_a')).available"
        assert value(conn, counts) == 0
        channels = {value(conn, f"SELECT ({s}.claim_status('default')).channel") for s in schemas}
        assert len(channels) == 2
        # An open claim, rotation and mutation of one tenant hold nothing of the other.
        conn.execute("SET statement_timeout = '5s'")
        assert other.execute(claim.format("tenant_a"), [WORKER]).fetchall() == [(jobs["tenant_a"],)]
        other.execute("SELECT tenant_a.cancel_job(%s)", [jobs["tenant_a"]])
        other.execute("SELECT tenant_a.tick()")
        assert conn.execute(claim.format("tenant_a"), [WORKER]).fetchall() == []
        assert conn.execute(claim.format("tenant_b"), [WORKER]).fetchall() == [(jobs["tenant_b"],)]
        assert (
            value(conn, "SELECT tenant_b.cancel_job(%s)", jobs["tenant_b"]) == "cancelled_running"
        )
        outcomes = conn.execute("SELECT outcome FROM tenant_b.tick()").fetchall()
        assert ("contended",) not in outcomes
        assert ("failed",) not in outcomes
