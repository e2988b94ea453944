"""The application's own connection in each library, for tests: one face over all of them."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import django
import django.conf
import django.db
import psycopg
import sqlalchemy
import sqlalchemy.ext.asyncio
import sqlalchemy.orm
from psycopg.conninfo import conninfo_to_dict

import awa
from awa._adapters import is_async

# Scenarios are asyncio code also around blocking libraries.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
_django_settings = threading.Lock()


async def resolved(value: Any) -> Any:
    """What a blocking or an asyncio call returned."""
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def entered(context: Any) -> AsyncIterator[None]:
    """Enter a context manager of either kind."""
    if hasattr(context, "__aenter__"):
        async with context:
            yield
    else:
        with context:
            yield


class Application:
    """A connection with a client over it; transactions and savepoints as its library has them."""

    def __init__(
        self, conn: Any, execute: Callable[[str], Any], begin: Callable[[], Any], nest: Any = None
    ) -> None:
        self.conn = conn
        self._execute = execute
        self._begin = begin
        self._nest = nest or begin
        self.client: Any = awa.AsyncClient(conn) if is_async(conn) else awa.Client(conn)

    def transaction(self) -> AbstractAsyncContextManager[None]:
        """Begin; commit at the end or roll back what raised."""
        return entered(self._begin())

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Set a savepoint; roll back to it when something is raised."""
        return entered(self._nest())

    async def execute(self, query: str) -> None:
        """Run a statement of the application."""
        await resolved(self._execute(query))

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the client."""
        return await resolved(getattr(self.client, name)(*args, **options))


def url(dsn: str, driver: str) -> sqlalchemy.URL:
    given = conninfo_to_dict(dsn)
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(given["user"]),
        host=str(given["host"]),
        port=int(given["port"] or 5432),
        database=str(given["dbname"]),
    )


def django_connection(dsn: str) -> Any:
    """Django's default connection, to this database."""
    given = conninfo_to_dict(dsn)
    if not django.conf.settings.configured:
        database = {"ENGINE": "django.db.backends.postgresql", "NAME": "later"}
        django.conf.settings.configure(DATABASES={"default": database}, USE_TZ=False)
        django.setup()
    with _django_settings:  # shared by the threads, the connection is not
        connection = django.db.connections["default"]
        connection.settings_dict.update(
            NAME=given["dbname"], USER=given["user"], HOST=given["host"], PORT=str(given["port"])
        )
        connection.ensure_connection()
    return connection


@asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Application]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield Application(conn, lambda q: conn.execute(q.encode()), conn.transaction)


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Application]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        yield Application(conn, lambda q: conn.execute(q.encode()), conn.transaction)


@asynccontextmanager
async def asyncpg_plain(dsn: str) -> AsyncIterator[Application]:
    given = conninfo_to_dict(dsn)
    conn = await asyncpg.connect(
        user=given["user"], host=given["host"], port=given["port"], database=given["dbname"]
    )
    try:
        yield Application(conn, conn.execute, conn.transaction)
    finally:
        with contextlib.suppress(Exception):
            await conn.close(timeout=2)


@asynccontextmanager
async def sqlalchemy_connection(dsn: str) -> AsyncIterator[Application]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    try:
        with engine.connect() as conn:
            yield Application(conn, conn.exec_driver_sql, conn.begin, conn.begin_nested)
    finally:
        engine.dispose()


@asynccontextmanager
async def sqlalchemy_session(dsn: str) -> AsyncIterator[Application]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    try:
        with sqlalchemy.orm.Session(engine) as session:

            def execute(query: str) -> Any:
                return session.execute(sqlalchemy.text(query))

            yield Application(session, execute, session.begin, session.begin_nested)
    finally:
        engine.dispose()


def sqlalchemy_async(driver: str) -> Any:
    @asynccontextmanager
    async def make(dsn: str) -> AsyncIterator[Application]:
        engine = sqlalchemy.ext.asyncio.create_async_engine(url(dsn, driver))
        try:
            async with engine.connect() as conn:
                yield Application(conn, conn.exec_driver_sql, conn.begin, conn.begin_nested)
        finally:
            await engine.dispose()

    return make


@asynccontextmanager
async def sqlalchemy_async_session(dsn: str) -> AsyncIterator[Application]:
    engine = sqlalchemy.ext.asyncio.create_async_engine(url(dsn, "asyncpg"))
    try:
        async with sqlalchemy.ext.asyncio.AsyncSession(engine) as session:

            def execute(query: str) -> Any:
                return session.execute(sqlalchemy.text(query))

            yield Application(session, execute, session.begin, session.begin_nested)
    finally:
        await engine.dispose()


@asynccontextmanager
async def django_default(dsn: str) -> AsyncIterator[Application]:
    connection = django_connection(dsn)

    def execute(query: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(query)

    try:
        yield Application(connection, execute, django.db.transaction.atomic)
    finally:
        with contextlib.suppress(Exception):
            connection.close()


Make = Callable[[str], AbstractAsyncContextManager[Application]]
LIBRARIES: dict[str, Make] = {
    "psycopg": psycopg_sync,
    "psycopg async": psycopg_async,
    "asyncpg": asyncpg_plain,
    "sqlalchemy": sqlalchemy_connection,
    "sqlalchemy session": sqlalchemy_session,
    "sqlalchemy async psycopg": sqlalchemy_async("psycopg"),
    "sqlalchemy async asyncpg": sqlalchemy_async("asyncpg"),
    "sqlalchemy async session": sqlalchemy_async_session,
    "django": django_default,
}
