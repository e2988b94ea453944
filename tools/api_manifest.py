"""Write docs/api-manifest.json: the public SQL surface, from the catalog of a fresh installation.

A test compares the file with what is installed, so a change of a signature, a default, a result or
a right is made twice: in the sources, and here on purpose.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psycopg

from tools.servers import REPO, Cluster, ensure_tree, exit_on_sigterm

MANIFEST = REPO / "docs/api-manifest.json"
VERSION = 18
FUNCTIONS = """
    SELECT a.name, jsonb_build_object(
        'arguments', a.arguments, 'returns', a.returns, 'capabilities', a.capabilities)
    FROM awa.api() a
"""
TYPES = """
    SELECT t.typname, jsonb_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod))
                                ORDER BY a.attnum)
    FROM pg_type t
    JOIN pg_class c ON c.oid = t.typrelid AND c.relkind = '{}'
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
    WHERE t.typnamespace = 'awa'::regnamespace AND NOT starts_with(t.typname, '_')
    GROUP BY t.typname
"""
ENUMS = """
    SELECT t.typname, jsonb_agg(e.enumlabel ORDER BY e.enumsortorder)
    FROM pg_type t JOIN pg_enum e ON e.enumtypid = t.oid
    WHERE t.typnamespace = 'awa'::regnamespace GROUP BY t.typname
"""
ERRORS = "SELECT c.sqlstate, c.name FROM awa.error_codes() c"


def manifest(conn: psycopg.Connection[Any]) -> dict[str, dict[str, Any]]:
    """What is installed: functions by name, row types, enums, views, SQLSTATEs."""
    conn.execute("SET search_path = pg_catalog")  # so that types are written in full
    found = {
        "functions": conn.execute(FUNCTIONS).fetchall(),
        "types": conn.execute(TYPES.replace("{}", "c").encode()).fetchall(),
        "enums": conn.execute(ENUMS).fetchall(),
        "views": conn.execute(TYPES.replace("{}", "v").encode()).fetchall(),
        "errors": conn.execute(ERRORS).fetchall(),
    }
    return {name: dict(sorted(rows)) for name, rows in found.items()}


def text(content: dict[str, dict[str, Any]]) -> str:
    """The file for a manifest."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    exit_on_sigterm()
    with Cluster(ensure_tree(VERSION)) as cluster, psycopg.connect(cluster.dsn) as conn:
        conn.execute("CREATE EXTENSION awa")
        MANIFEST.write_text(text(manifest(conn)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
