"""The extension and the same text as plain SQL give the same catalog; schemas are apart."""

from __future__ import annotations

import difflib

import psycopg
import pytest

from conftest import Database
from engine import WORKER, install_plain, value

# Everything about the schema but who is a member of what, one line of text each.
CATALOG = """
SELECT format('function %s owner %s acl %s comment %s', pg_get_functiondef(p.oid),
              p.proowner::regrole, p.proacl, obj_description(p.oid, 'pg_proc'))
FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
UNION ALL
SELECT format('relation %s kind %s persistence %s options %s owner %s acl %s comment %s bound %s'
              ' key %s view %s',
              c.oid::regclass, c.relkind, c.relpersistence, c.reloptions, c.relowner::regrole,
              c.relacl, obj_description(c.oid, 'pg_class'), pg_get_expr(c.relpartbound, c.oid),
              CASE c.relkind WHEN 'p' THEN pg_get_partkeydef(c.oid) END,
              CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) END)
FROM pg_class c WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('column %s %s %s %s not null %s default %s storage %s acl %s comment %s',
              c.oid::regclass, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
              a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attstorage, a.attacl,
              col_description(c.oid, a.attnum))
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('index %s valid %s', pg_get_indexdef(i.indexrelid), i.indisvalid)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT format('constraint %s on %s %s %s', k.conname, k.conrelid::regclass, k.contype,
              pg_get_constraintdef(k.oid))
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
SELECT format('trigger %s', pg_get_triggerdef(t.oid))
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = $1::regnamespace AND NOT t.tgisinternal
UNION ALL
SELECT format('schema owner %s acl %s', n.nspowner::regrole, n.nspacl)
FROM pg_namespace n WHERE n.nspname = $1
UNION ALL
SELECT format('default acl %s %s %s', d.defaclrole::regrole, d.defaclobjtype, d.defaclacl)
FROM pg_default_acl d WHERE d.defaclnamespace = $1::regnamespace
"""


def catalog(conn: psycopg.Connection, schema: str = "awa") -> list[str]:
    """Describe all that a schema holds, with its name made "awa" everywhere."""
    query = CATALOG.replace("$1", f"'{schema}'")
    rows = conn.execute(query.replace("%", "%%"), []).fetchall()
    return sorted(line.replace(schema, "awa") for (line,) in rows)


def difference(left: list[str], right: list[str]) -> list[str]:
    lines = difflib.unified_diff(left, right, lineterm="", n=0)
    return [line[:500] for line in lines]


@pytest.mark.parametrize("schema", ["awa", "tenant_7"])
def test_extension_and_plain_sql_give_the_same_catalog(
    conn: psycopg.Connection, empty_database: Database, schema: str
) -> None:
    with empty_database.connect() as plain:
        install_plain(plain, schema)
        installed = catalog(plain, schema)
    assert len(installed) > 1000
    assert difference(catalog(conn), installed) == []


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
