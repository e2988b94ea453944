"""The pytest plugin: a database per test.

The server is the one of `--awa-dsn` or AWA_TEST_DSN, whose role may create databases. Without
either it is a private one, if the extra `embedded` is installed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from .._install import install
from ..client import Client
from . import Database


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("awa")
    group.addoption("--awa-dsn", help="server for test databases (default: AWA_TEST_DSN)")


@pytest.fixture(scope="session")
def awa_server(pytestconfig: pytest.Config) -> Iterator[str]:
    """Connection string of a server on which databases may be created."""
    dsn = pytestconfig.getoption("--awa-dsn") or os.environ.get("AWA_TEST_DSN")
    if dsn:
        yield dsn
        return
    from ..embedded import EmbeddedPostgresError, Postgres

    try:
        server = Postgres()
        server.start()
    except EmbeddedPostgresError as error:
        pytest.fail(
            f"{error}\nGive a server by --awa-dsn or AWA_TEST_DSN, or install awa-sql[embedded].",
            pytrace=False,
        )
    try:
        yield server.dsn
    finally:
        server.stop()


@pytest.fixture(scope="session")
def awa_prepare() -> Callable[[str], None]:
    """What else each database starts with: override it to run the application's migrations.

    It returns a function that is called once, with the connection string of the template.
    """
    return lambda dsn: None


@pytest.fixture(scope="session")
def awa_template(awa_server: str, awa_prepare: Callable[[str], None]) -> Iterator[str]:
    """Name of the database that each test gets a copy of."""
    name = f"awa_test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(awa_server, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            dsn = make_conninfo(awa_server, dbname=name)
            with psycopg.connect(dsn) as conn:
                install(conn)
            awa_prepare(dsn)
            yield name
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def awa_database(awa_server: str, awa_template: str) -> Iterator[Database]:
    """A fresh database with awa in it, gone after the test."""
    name = f"{awa_template}_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(awa_server, autocommit=True) as admin:
        names = (sql.Identifier(name), sql.Identifier(awa_template))
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
        try:
            yield Database(make_conninfo(awa_server, dbname=name))
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def awa_client(awa_database: Database) -> Iterator[Client]:
    """A client of the test's database; each call commits."""
    with Client(awa_database.dsn) as client:
        yield client
