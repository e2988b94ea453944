"""What a run leaves in the tables: rewritten and dead rows, sizes, buffers, at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.cluster import Connection

SETTINGS = {"shared_preload_libraries": "pg_stat_statements"}
EXTENSIONS = ("pg_stat_statements", "pgstattuple")
# Of tables that hold something; catalogs included, which no system's schema is.
TABLES = """
    SELECT c.oid::regclass::text, n.nspname = 'pg_catalog', c.relispartition,
           s.n_tup_upd, s.n_tup_del, pg_total_relation_size(c.oid),
           CASE WHEN pg_relation_size(c.oid) > 0
                THEN (pgstattuple(c.oid::regclass)).dead_tuple_count ELSE 0 END
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_stat_all_tables s ON s.relid = c.oid
    WHERE c.relkind = 'r' AND n.nspname NOT IN ('information_schema', 'pg_toast')
"""
BUFFERS = """
    SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint,
           coalesce(sum(calls), 0)::bigint
    FROM pg_stat_statements
    WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND query LIKE %s AND query NOT LIKE '%%pgstattuple%%' AND query NOT LIKE '%%pg_stat_%%'
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table's counters."""

    is_catalog: bool
    is_partition: bool
    updated: int
    deleted: int
    size: int
    dead: int

    @property
    def rewritten(self) -> int:
        """Rows updated or deleted, ever."""
        return self.updated + self.deleted


@dataclass(frozen=True, slots=True)
class Sample:
    """The tables of a database, and buffers touched and calls made by statements up to now."""

    tables: dict[str, Table]
    buffers: int
    claim_buffers: int
    claims: int

    def own(self) -> dict[str, Table]:
        """The tables of the system."""
        return {name: table for name, table in self.tables.items() if not table.is_catalog}

    @property
    def dead(self) -> int:
        """Dead rows of the system's tables."""
        return sum(table.dead for table in self.own().values())

    @property
    def catalog_dead(self) -> int:
        """Dead rows of the catalog."""
        return sum(table.dead for table in self.tables.values() if table.is_catalog)

    @property
    def size(self) -> int:
        """Bytes of the system's tables, indexes and TOAST included."""
        return sum(table.size for table in self.own().values())


def prepare(conn: Connection) -> None:
    """Make what sample() needs."""
    for name in EXTENSIONS:
        conn.execute(f"CREATE EXTENSION {name}".encode())


def sample(conn: Connection, claim_like: str) -> Sample:
    """Look at the database; `claim_like` is a pattern that only claims match."""
    rows: list[Any] = conn.execute(TABLES).fetchall()
    tables = {name: Table(*rest) for name, *rest in rows if not name.startswith("pg_stat_")}
    ((buffers, _),) = _buffers(conn, "%")
    ((claim_buffers, claims),) = _buffers(conn, claim_like)
    return Sample(tables, buffers, claim_buffers, claims)


def _buffers(conn: Connection, pattern: str) -> list[Any]:
    return conn.execute(BUFFERS, [pattern]).fetchall()
