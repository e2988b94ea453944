"""The caller's own connection, of psycopg, SQLAlchemy, Django or asyncpg.

Calls run through the library that owns the connection, so that its idea of the transaction stays
true: a statement behind SQLAlchemy's back would be rolled back with the connection's return to the
pool. None of the libraries is imported here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from types import NoneType
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, cast
from uuid import UUID

import psycopg

from ._calls import Call
from ._codec import load_json
from .errors import translated

T = TypeVar("T")


class _Result(Protocol):
    def scalars(self) -> Any: ...


class SQLAlchemyConnection(Protocol):
    """sqlalchemy.Connection."""

    def exec_driver_sql(self, statement: str, parameters: Any, /) -> _Result: ...


class SQLAlchemySession(Protocol):
    """sqlalchemy.orm.Session, and the scoped one."""

    def connection(self) -> SQLAlchemyConnection: ...


class DjangoConnection(Protocol):
    """django.db.connection, or one of django.db.connections."""

    vendor: str

    def cursor(self) -> Any: ...

    def get_autocommit(self) -> bool: ...


class SQLAlchemyAsyncConnection(Protocol):
    """sqlalchemy.ext.asyncio.AsyncConnection."""

    def exec_driver_sql(
        self, statement: str, parameters: Any, /
    ) -> Coroutine[Any, Any, _Result]: ...


class SQLAlchemyAsyncSession(Protocol):
    """sqlalchemy.ext.asyncio.AsyncSession, and the scoped one."""

    def connection(self) -> Coroutine[Any, Any, SQLAlchemyAsyncConnection]: ...


class AsyncpgConnection(Protocol):
    """asyncpg.Connection, also one from a pool."""

    def fetch(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...

    def is_in_transaction(self) -> bool: ...


ForeignConnection: TypeAlias = SQLAlchemyConnection | SQLAlchemySession | DjangoConnection
AsyncForeignConnection: TypeAlias = (
    SQLAlchemyAsyncConnection | SQLAlchemyAsyncSession | AsyncpgConnection
)
CallerConnection: TypeAlias = psycopg.Connection[Any] | ForeignConnection
AsyncCallerConnection: TypeAlias = psycopg.AsyncConnection[Any] | AsyncForeignConnection


def is_foreign(conn: object) -> TypeGuard[ForeignConnection]:
    """Whether this is a blocking connection of SQLAlchemy or Django."""
    method = _sqlalchemy_method(conn)
    if method is not None:
        return not inspect.iscoroutinefunction(method)
    return getattr(conn, "vendor", None) == "postgresql" and hasattr(conn, "cursor")


def is_async_foreign(conn: object) -> TypeGuard[AsyncForeignConnection]:
    """Whether this is an asyncio connection of SQLAlchemy or asyncpg."""
    method = _sqlalchemy_method(conn)
    if method is not None:
        return inspect.iscoroutinefunction(method)
    return _is_asyncpg(conn)


def is_async(conn: object) -> TypeGuard[AsyncCallerConnection]:
    """Whether this is an asyncio connection."""
    return isinstance(conn, psycopg.AsyncConnection) or is_async_foreign(conn)


def _sqlalchemy_method(conn: object) -> Callable[..., Any] | None:
    method = getattr(conn, "exec_driver_sql", None)
    if method is None and hasattr(conn, "get_bind"):
        method = getattr(conn, "connection", None)
    return cast("Callable[..., Any] | None", method)


def portion_size(conn: object, most: int) -> int | None:
    """How many jobs of a load to send at once; None, for all, where each statement commits."""
    if _is_asyncpg(conn):
        return most if cast(AsyncpgConnection, conn).is_in_transaction() else None
    if _sqlalchemy_method(conn) is None and cast(DjangoConnection, conn).get_autocommit():
        return None
    return most


def _is_asyncpg(conn: object) -> bool:
    return type(conn).__module__.partition(".")[0] == "asyncpg" and hasattr(conn, "fetch")


def fetch(conn: ForeignConnection, call: Call[T]) -> list[T]:
    """All rows of a call."""
    with translated():
        if _sqlalchemy_method(conn) is None:
            with cast(DjangoConnection, conn).cursor() as cursor:
                cursor.execute(_wrapped(call.sql), call.params)
                return _decoded([text for (text,) in cursor.fetchall()], call.row_type)
        if not hasattr(conn, "exec_driver_sql"):
            conn = cast(SQLAlchemySession, conn).connection()
        connection = cast(SQLAlchemyConnection, conn)
        result = connection.exec_driver_sql(*_for_driver(connection, call))
        return _decoded(result.scalars().all(), call.row_type)


async def fetch_async(conn: AsyncForeignConnection, call: Call[T]) -> list[T]:
    """All rows of a call."""
    with translated():
        if _is_asyncpg(conn):
            sql, params = numbered(_wrapped(call.sql), call.params)
            records = await cast(AsyncpgConnection, conn).fetch(sql, *params)
            return _decoded([record[0] for record in records], call.row_type)
        if not hasattr(conn, "exec_driver_sql"):
            conn = await cast(SQLAlchemyAsyncSession, conn).connection()
        connection = cast(SQLAlchemyAsyncConnection, conn)
        result = await connection.exec_driver_sql(*_for_driver(connection, call))
        return _decoded(result.scalars().all(), call.row_type)


def _for_driver(
    conn: SQLAlchemyConnection | SQLAlchemyAsyncConnection, call: Call[Any]
) -> tuple[str, Any]:
    driver = conn.dialect.driver  # type: ignore[union-attr]
    if driver == "psycopg":
        return _wrapped(call.sql), call.params
    if driver == "asyncpg":
        return numbered(_wrapped(call.sql), call.params)
    raise TypeError(
        f"an engine for postgresql+psycopg or postgresql+asyncpg is needed, not {driver}"
    )


# Statements. Every library reads types in its own way, some by the application's settings: so rows
# come as the text of one JSON object each, and JSON is sent as text.


def _wrapped(sql: str) -> str:
    sql = re.sub(r"::jsonb(\[\])?", r"::text\1::jsonb\1", sql)
    return f"SELECT to_jsonb(r)::text FROM ({sql}) AS r"


def numbered(sql: str, params: Mapping[str, object]) -> tuple[str, tuple[object, ...]]:
    """The statement with $1, $2, ... for its named parameters."""
    numbers = {name: number for number, name in enumerate(params, 1)}

    def replace(match: re.Match[str]) -> str:
        return "%" if match[1] is None else f"${numbers[match[1]]}"

    return re.sub(r"%\((\w+)\)s|%%", replace, sql), tuple(params.values())


def _decoded(texts: Sequence[str], row_type: type[T]) -> list[T]:
    rows = [load_json(text) for text in texts]
    if row_type is NoneType:
        return cast("list[T]", [None] * len(rows))
    if not dataclasses.is_dataclass(row_type):
        values = [next(iter(row.values())) for row in rows]
        if row_type is bytes:
            values = [bytes.fromhex(value.removeprefix("\\x")) for value in values]
        return values
    readers = _readers(row_type)
    return [
        row_type(**{k: v if v is None else readers[k](v) for k, v in row.items()}) for row in rows
    ]


def _interval(text: str) -> timedelta:
    days, _, clock = text.rpartition(" ")
    hours, minutes, seconds = clock.split(":")
    sign = -1 if hours.startswith("-") else 1
    seconds_of_day = abs(int(hours)) * 3600 + int(minutes) * 60 + float(seconds)
    return timedelta(days=int(days.split()[0]) if days else 0, seconds=sign * seconds_of_day)


_READERS: dict[Any, Callable[[Any], Any]] = {
    datetime: datetime.fromisoformat,
    UUID: UUID,
    timedelta: _interval,
    float: float,
}


@cache
def _readers(row_type: type[Any]) -> dict[str, Callable[[Any], Any]]:
    def reader(hint: Any) -> Callable[[Any], Any]:
        for candidate in (hint, *typing.get_args(hint)):
            if candidate in _READERS:
                return _READERS[candidate]
        return lambda value: value

    hints = typing.get_type_hints(row_type)
    return {name: reader(hint) for name, hint in hints.items()}
