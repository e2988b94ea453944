"""A throw-away durable server for a benchmark, with fresh databases on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import LiteralString
from urllib.parse import urlencode, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from bench.report import say
from tools.servers import REPO, Cluster, ensure_tree, exit_on_sigterm

VERSION = 18
TEMPLATE_SCRIPT = REPO / "tools/template.sql"
# Room for a run: without it the figures are those of checkpoints and evictions.
OPTIONS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}

Connection = psycopg.Connection[tuple[object, ...]]


class Server:
    """A running server; databases on it live as long as their `with` block."""

    def __init__(self, cluster: Cluster) -> None:
        self.dsn = cluster.socket_dsn
        self.log_file = cluster.log_file
        self._numbers = itertools.count(1)

    @contextmanager
    def awa_database(self) -> Iterator[str]:
        """A fresh database with the extension; its connection string."""
        with self.database() as dsn:
            with connect(dsn) as conn:
                conn.execute(TEMPLATE_SCRIPT.read_bytes(), prepare=False)
            yield dsn

    @contextmanager
    def database(self, ddl: LiteralString = "", template: str = "template1") -> Iterator[str]:
        """A fresh database in which `ddl` was run, or a copy; its URL, which all drivers read."""
        name = f"bench_{next(self._numbers)}"
        source = urlsplit(template).path.strip("/")
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        self._admin(create.format(sql.Identifier(name), sql.Identifier(source)))
        server = conninfo_to_dict(self.dsn)
        query = {key: server[key] for key in ("host", "port", "user")}
        dsn = f"postgresql:///{name}?{urlencode(query)}"
        if ddl:
            with connect(dsn) as conn:
                conn.execute(ddl, prepare=False)
        try:
            yield dsn
        finally:
            self._admin(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _admin(self, statement: sql.Composed) -> None:
        with connect(self.dsn) as conn:
            conn.execute(statement)


@contextmanager
def server(options: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that flushes as in production, on a disk; gone afterwards."""
    exit_on_sigterm()
    with Cluster(ensure_tree(VERSION), {**OPTIONS, **(options or {})}, durable=True) as cluster:
        say(f"PostgreSQL {VERSION} on {cluster.directory}")
        yield Server(cluster)


def connect(dsn: str) -> Connection:
    """An autocommit connection that prepares a statement when it is first used."""
    return psycopg.connect(dsn, autocommit=True, prepare_threshold=0)


def change_settings(conn: Connection, settings: Mapping[str, float]) -> None:
    """Change settings of awa."""
    for name, value in settings.items():
        conn.execute("SELECT awa.set_setting(%s, %s)", [name, str(value)])
