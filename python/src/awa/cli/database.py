"""Calls of awa's functions and reads of its views, with rows as dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.abc import Buffer
from psycopg.rows import DictRow, dict_row
from psycopg.types.datetime import TimestamptzLoader

from .._codec import JsonLoader
from .._maintenance import STATEMENT_SECONDS
from .._session import OWN_LIMITS
from .._version import check_schema

Row = dict[str, Any]


class _TimeLoader(TimestamptzLoader):
    """Leaves times that Python cannot express as the server's text: one must not hide all."""

    def load(self, data: Buffer) -> Any:
        try:
            return super().load(data)
        except psycopg.DataError:
            return bytes(data).decode()


class Database:
    """One connection, to an installation in one schema; each call is a transaction."""

    def __init__(self, conn: psycopg.Connection[DictRow], schema: str) -> None:
        self._conn = conn
        self._schema = sql.Identifier(schema)

    @classmethod
    def connect(cls, conninfo: str, *, schema: str) -> Database:
        """Connect, with a name that shows up in `pg_stat_activity`; an older schema is refused."""
        conn = psycopg.connect(
            conninfo,
            autocommit=True,
            row_factory=dict_row,
            fallback_application_name="awa",
            client_encoding="UTF8",
        )
        # Whatever the default of the database is: many calls decide on what is committed now.
        conn.isolation_level = IsolationLevel.READ_COMMITTED
        conn.adapters.register_loader("timestamptz", _TimeLoader)
        conn.adapters.register_loader("jsonb", JsonLoader)
        database = cls(conn, schema)
        try:
            check_schema(schema, database.ask("schema_version"))
        except BaseException:
            conn.close()
            raise
        return database

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._conn.close()

    def call(self, function: str, /, **arguments: object) -> list[Row]:
        """Call a function by named arguments; JSON is given as text.

        Numbers too, so that the server says which of them is out of range.
        """
        given = {
            name: str(value) if type(value) is int else value for name, value in arguments.items()
        }
        query = sql.SQL("SELECT answer.* FROM {}.{}({}) AS answer").format(
            self._schema,
            sql.Identifier(function),
            sql.SQL(", ").join(
                sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name))
                for name in arguments
            ),
        )
        return self._fetch(query, given, with_own_limits=function == "tick")

    def _fetch(
        self,
        query: sql.Composed,
        given: Mapping[str, object] | None = None,
        *,
        with_own_limits: bool = False,
    ) -> list[Row]:
        with self._conn.transaction():
            if with_own_limits:
                limits = OWN_LIMITS.format(seconds=STATEMENT_SECONDS, is_local=True)
                self._conn.execute(limits.encode())
            return self._conn.execute(query, given).fetchall()

    def ask(self, function: str, /, **arguments: object) -> Any:
        """Call a function that answers one value."""
        [row] = self.call(function, **arguments)
        return row["answer"]

    def view(
        self,
        view: str,
        *,
        where: Mapping[str, object] | None = None,
        order_by: str,
        descending: bool = False,
        limit: int | None = None,
    ) -> list[Row]:
        """Read a view; a column of `where` that is None does not filter."""
        given = present(**(where or {}))
        conditions = [
            sql.SQL("{}::text = {}").format(sql.Identifier(name), sql.Placeholder(name))
            for name in given
        ]
        query = sql.SQL("SELECT * FROM {}.{} WHERE {} ORDER BY {} {} LIMIT {}").format(
            self._schema,
            sql.Identifier(view),
            sql.SQL(" AND ").join([sql.SQL("true"), *conditions]),
            sql.Identifier(order_by),
            sql.SQL("DESC NULLS LAST" if descending else "ASC"),
            sql.Literal(limit),
        )
        return self._fetch(query, given)

    def counts(self) -> list[Row]:
        """The exact counts of every queue."""
        query = sql.SQL(
            "SELECT counts.* FROM {0}.queues q, {0}.queue_counts(q.queue) counts ORDER BY q.queue"
        ).format(self._schema)
        return self._fetch(query)


def present(**values: object) -> dict[str, object]:
    """The values that are given, so that SQL keeps its defaults for the others."""
    return {name: value for name, value in values.items() if value is not None}
