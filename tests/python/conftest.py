"""A database per test, made from a template that has the extension.

AWA_TEST_DSN names a superuser's connection to a running test server; `make test` sets it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import awa

TEMPLATE_SCRIPT = Path(__file__).parents[2] / "tools/template.sql"


@dataclass(frozen=True, slots=True)
class Database:
    """A fresh database, gone after the test."""

    name: str
    dsn: str

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection:
        """Open one more connection; the caller closes it."""
        return psycopg.connect(self.dsn, autocommit=autocommit)


class DatabaseServer:
    """The test server: makes databases and drops them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.admin = psycopg.connect(dsn, autocommit=True)

    def create(self, name: str, template: str = "template0") -> Database:
        names = (sql.Identifier(name), sql.Identifier(template))
        self.admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
        return Database(name, make_conninfo(self.dsn, dbname=name))

    def drop(self, name: str) -> None:
        self.admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextmanager
    def fresh(self, template: str = "template0") -> Iterator[Database]:
        """A database of its own, for as long as the block lasts."""
        database = self.create(f"test_{uuid.uuid4().hex[:12]}", template)
        yield database
        self.drop(database.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")
    parser.addoption("--share", metavar="I/N", help="of the chosen tests each Nth, from the Ith on")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs only with --long")


@pytest.hookimpl(trylast=True)  # -k and -m have chosen by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        first, number = map(int, share.split("/"))
        items[:] = items[first - 1 :: number]
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="runs only with --long"))


@pytest.fixture(scope="session")
def server() -> Iterator[DatabaseServer]:
    """The running test server."""
    dsn = os.environ.get("AWA_TEST_DSN")
    if dsn is None:
        pytest.fail("AWA_TEST_DSN is not set: use make test-one VERSION=18 K=name")
    server = DatabaseServer(dsn)
    yield server
    server.admin.close()


@pytest.fixture(scope="session")
def server_version(server: DatabaseServer) -> int:
    """The server's major version."""
    return server.admin.info.server_version // 10000


@pytest.fixture(scope="session")
def pg_bin() -> Path:
    """The folder of the server's own programs: psql, pg_dump, pg_restore."""
    return Path(os.environ["AWA_PG_BIN"])


@pytest.fixture(scope="session")
def template(server: DatabaseServer) -> Iterator[Database]:
    """The database that others are copied from; nobody may stay connected to it."""
    database = server.create(f"awa_template_{uuid.uuid4().hex[:12]}")
    with database.connect() as connection:
        connection.execute(TEMPLATE_SCRIPT.read_bytes())
    yield database
    server.drop(database.name)


@pytest.fixture
def database(server: DatabaseServer, template: Database) -> Iterator[Database]:
    """A fresh database with the extension in it."""
    with server.fresh(template.name) as database:
        yield database


@pytest.fixture
def empty_database(server: DatabaseServer) -> Iterator[Database]:
    """A fresh database without the extension."""
    with server.fresh() as database:
        yield database


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection]:
    """An autocommit connection to the fresh database."""
    with database.connect() as connection:
        yield connection


@pytest.fixture
def client(conn: psycopg.Connection) -> awa.Client:
    """A client over the connection."""
    return awa.Client(conn)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the server can read, which has a user of its own."""
    folder = Path(tempfile.mkdtemp(prefix="awa-install-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
