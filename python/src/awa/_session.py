"""Connections of a worker: session settings, reconnecting, and waits between tries."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection, IsolationLevel
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import ByteaBinaryLoader

from ._pooler import BACKEND, PREPARED_ELSEWHERE, Preparing, is_pooled
from .errors import is_transient

logger = logging.getLogger("awa")

# A dead peer is noticed in well under a third of the default staleness of 90 s.
_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
READ_ONLY = "25006"
# Nor may the role's defaults end a connection that waits for work.
KEEP_IDLE = "SET idle_session_timeout = 0"
_SET_UP = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; " + KEEP_IDLE
# For statements that do much, such as emptying a slot: a limit for short ones would cut them off
# each time. The server may not know transaction_timeout.
OWN_LIMITS = (
    "SELECT set_config(name, CASE name WHEN 'statement_timeout' THEN '{seconds}s' ELSE '0' END, "
    "{is_local}) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')"
)


class Backoff:
    """Growing waits with jitter: half to the whole of first * 2^n, at most `most` seconds."""

    def __init__(self, first: float = 0.05, most: float = 1.0) -> None:
        self._first = first
        self._most = most
        self._next = first

    def reset(self) -> None:
        """The next wait is the first again."""
        self._next = self._first

    def next(self) -> float:
        """Seconds to wait now."""
        wait = self._next * (0.5 + random.random() / 2)
        self._next = min(self._next * 2, self._most)
        return wait


class Outage:
    """Logs the trouble of several connections together, ever less often while it lasts."""

    def __init__(self, first: float = 1.0, most: float = 10.0) -> None:
        self._lock = threading.Lock()
        self._first = first
        self._most = most
        self._pause = first
        self._next_line = 0.0
        self._last_trouble = 0.0
        self._silent = 0

    def report(self, what: str, error: BaseException) -> None:
        """Say that something failed and will be tried again."""
        with self._lock:
            now = time.monotonic()
            if now - self._last_trouble > self._most:
                self._pause, self._next_line = self._first, now
            self._last_trouble = now
            if now < self._next_line:
                self._silent += 1
                return
            self._next_line = now + self._pause
            self._pause = min(self._pause * 2, self._most)
            silent, self._silent = self._silent, 0
        more = f" ({silent} more messages left out)" if silent else ""
        text = "; ".join(line.strip() for line in str(error).splitlines())
        if getattr(error, "sqlstate", None) == READ_ONLY:
            text = "the server is read-only, a standby perhaps, or not the primary any more"
        logger.warning("%s: %s: %s; trying again%s", what, type(error).__name__, text, more)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a worker's connections are made, and what was learnt about them."""

    conninfo: str
    application_name: str
    preparing: Preparing = field(default_factory=Preparing)

    def conninfo_for(self, role: str) -> str:
        """The connection string of one of the worker's connections."""
        given = conninfo_to_dict(self.conninfo)
        extra = {key: value for key, value in _DEFAULTS.items() if key not in given}
        extra.setdefault("application_name", f"{self.application_name} {role}")
        if "application_name" in given:
            extra.pop("application_name")
        # Whatever the role or the environment says: JSON is UTF-8.
        extra["client_encoding"] = "UTF8"
        return make_conninfo(self.conninfo, **extra)

    @property
    def prepare_threshold(self) -> int | None:
        """For connections without a pooler: every statement of a worker comes again."""
        return 1 if self.preparing.works else None


class AsyncSession:
    """One connection for short statements, each its own transaction; reconnects when used."""

    def __init__(
        self, settings: SessionSettings, role: str, *, statement_seconds: int | None = None
    ) -> None:
        self._settings = settings
        self._conninfo = settings.conninfo_for(role)
        # The longest statement; None leaves that to the role and the database.
        self._statement_seconds = statement_seconds
        self._conn: AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()

    @property
    def is_connected(self) -> bool:
        """Whether the connection stood when it was last used."""
        return self._conn is not None and not self._conn.closed

    @property
    def knows_one_server(self) -> bool:
        """Whether the connection string, as the environment completes it, names a single host."""
        assert self._conn is not None
        # psycopg tries hosts one by one, so that libpq knows of one, unless a service names more.
        given = conninfo_to_dict(self._conninfo)
        of_libpq = {option.keyword: option.val or b"" for option in self._conn.pgconn.info}
        hosts = (
            given.get("host")
            or given.get("hostaddr")
            or os.environ.get("PGHOST")
            or os.environ.get("PGHOSTADDR")
            or of_libpq[b"host"].decode()
        )
        return "," not in str(hosts)

    async def _connected(self) -> AsyncConnection[Any]:
        if self._conn is not None and not self._conn.closed:
            return self._conn
        conn = await AsyncConnection.connect(
            self._conninfo, autocommit=True, prepare_threshold=None
        )
        try:
            if is_pooled(conn, await backend_of(conn)):
                # A session setting would stay behind on a connection that others use.
                await conn.set_autocommit(False)
                await conn.set_isolation_level(IsolationLevel.READ_COMMITTED)
            else:
                await conn.execute(_SET_UP)
                await self._limit(conn, is_local=False)
                conn.prepare_threshold = self._settings.prepare_threshold
            # Left undecoded: most handlers never look at them.
            for name in ("timestamptz", "jsonb"):
                conn.adapters.register_loader(name, ByteaBinaryLoader)
        except BaseException:
            await conn.close()
            raise
        self._conn = conn
        return conn

    async def _limit(self, conn: AsyncConnection[Any], *, is_local: bool) -> None:
        if self._statement_seconds is not None:
            limits = OWN_LIMITS.format(seconds=self._statement_seconds, is_local=is_local)
            await conn.execute(limits.encode())

    async def fetch(
        self, sql: str, params: Sequence[object] | Mapping[str, object], *, binary: bool = False
    ) -> list[tuple[Any, ...]]:
        """Rows of one statement, committed."""
        async with self._lock:
            conn = await self._connected()
            try:
                if not conn.autocommit:
                    await self._limit(conn, is_local=True)
                async with conn.cursor(binary=binary) as cursor:
                    try:
                        await cursor.execute(sql.encode(), params)
                    except PREPARED_ELSEWHERE as error:
                        self._settings.preparing.stop(error)
                        conn.prepare_threshold = None
                        await cursor.execute(sql.encode(), params)
                    rows = await cursor.fetchall()
                if not conn.autocommit:
                    await conn.commit()
            except psycopg.Error as error:
                await self._recover(conn, error)
                raise
            return rows

    async def _recover(self, conn: AsyncConnection[Any], error: psycopg.Error) -> None:
        # A server that turned read-only may be a former primary: connect anew to find the next.
        if conn.closed or error.sqlstate in (None, READ_ONLY) or error.sqlstate[:2] == "57":
            await conn.close()
        elif not conn.autocommit:
            await conn.rollback()

    async def close(self) -> None:
        """Close the connection."""
        async with self._lock:
            if self._conn is not None:
                await self._conn.close()


async def backend_of(conn: AsyncConnection[Any]) -> int:
    """The process id of the backend that answers now."""
    row = await (await conn.execute(BACKEND)).fetchone()
    assert row is not None
    return int(row[0])


def connect_blocking(settings: SessionSettings, role: str) -> Connection[Any]:
    """A connection for a thread of the worker."""
    conn = Connection.connect(settings.conninfo_for(role), autocommit=True, prepare_threshold=None)
    try:
        row = conn.execute(BACKEND).fetchone()
        assert row is not None
        if is_pooled(conn, row[0]):
            conn.autocommit = False
            conn.isolation_level = IsolationLevel.READ_COMMITTED
        else:
            conn.execute(_SET_UP)
            conn.prepare_threshold = settings.prepare_threshold
    except BaseException:
        conn.close()
        raise
    return conn


__all__ = [
    "KEEP_IDLE",
    "OWN_LIMITS",
    "AsyncSession",
    "Backoff",
    "Outage",
    "SessionSettings",
    "connect_blocking",
    "is_transient",
    "logger",
]
