"""LISTEN on a connection of its own; where that does not work, the worker polls."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ._pooler import BACKEND, is_pooled
from ._session import KEEP_IDLE, AsyncSession, Backoff, Outage, SessionSettings, backend_of, logger

SELF_TEST_SECONDS = 5.0
SESSION_LOOKS = 10
UNHEARD = (
    "LISTEN hears nothing, most likely because of a pooler in transaction mode: the worker polls. "
    "Give it a DSN that leads to the server itself, or session mode, for faster pickup; "
    "listen=False silences this"
)


class Listener:
    """Passes notifications on: channel and payload.

    The socket is watched by the event loop, so a notification costs one callback. On connecting
    it is sent one over another connection: behind a pooler in transaction mode, LISTEN succeeds and
    hears nothing but what the same transaction sends.
    """

    def __init__(
        self,
        settings: SessionSettings,
        outage: Outage,
        *,
        elsewhere: AsyncSession,
        heard: Callable[[str, str], None],
        connected: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._outage = outage
        self._elsewhere = elsewhere
        self._heard = heard
        self._connected = connected
        self._wanted: set[str] = set()
        self._listening: set[str] = set()
        self._conn: AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()
        self._lost = asyncio.Event()
        self._test_channel = f"awa_test_{uuid.uuid4().hex}"
        self._test_heard = asyncio.Event()
        self._is_tested = False
        self.works = True
        """False when notifications do not arrive here."""
        self._fd = -1
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect and stay connected."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="awa listener")

    def hears(self, channel: str) -> bool:
        """Whether a notification on the channel will be passed on."""
        return channel in self._listening

    async def listen(self, channel: str) -> bool:
        """Listen on a channel from now on; false when that is not possible at the moment."""
        self._wanted.add(channel)
        if not self._is_tested:
            return False
        async with self._lock:
            if channel in self._listening:
                return True
            try:
                await self._execute_listen([channel])
            except (psycopg.Error, OSError) as error:
                self._outage.report("listening", error)
                self._lost.set()
                return False
        return True

    async def close(self) -> None:
        """Close the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._disconnect()

    async def _run(self) -> None:
        backoff = Backoff()
        while self.works:
            try:
                async with self._lock:
                    await self._connect()
                if not await self._self_test():
                    self.works = False
                    logger.warning(UNHEARD)
                    break
                async with self._lock:
                    await self._listen_to_wanted()
                backoff.reset()
                # Listening first, then a look: what was rung during the outage is found.
                self._connected()
                await self._lost.wait()
            except (psycopg.Error, OSError) as error:
                self._outage.report("listener", error)
            await self._disconnect()
            await asyncio.sleep(backoff.next())
        await self._disconnect()
        self._connected()

    async def _connect(self) -> None:
        self._lost.clear()
        conn = await AsyncConnection.connect(
            self._settings.conninfo_for("listener"), autocommit=True, prepare_threshold=None
        )
        self._conn = conn
        conn.add_notify_handler(self._notified)
        self._fd = conn.fileno()

    async def _has_own_session(self) -> bool:
        """Whether no pooler is seen to give the session's backend to others.

        A LISTEN there would stay behind on a server connection of the pool. With little else going
        on, both connections are given the one that was used last; else they get any.
        """
        conn = self._conn
        assert conn is not None
        backend = await backend_of(conn)
        if not is_pooled(conn, backend):
            return True
        for _ in range(SESSION_LOOKS):
            ((other,),) = await self._elsewhere.fetch(BACKEND, ())
            if other == backend or await backend_of(conn) != backend:
                return False
        return True

    async def _listen_to_wanted(self) -> None:
        # The session is our own, so it may keep a setting.
        assert self._conn is not None
        self._unwatch()
        await self._conn.execute(KEEP_IDLE)
        await self._execute_listen([*self._wanted])
        self._is_tested = True

    async def _execute_listen(self, channels: list[str]) -> None:
        conn = self._conn
        assert conn is not None
        self._unwatch()
        for channel in channels:
            await conn.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._listening.update(channels)
        self._watch()

    async def _self_test(self) -> bool:
        """Whether a notification arrives that is sent over another connection."""
        async with self._lock:
            if not await self._has_own_session():
                return False
            self._test_heard.clear()
            await self._execute_listen([self._test_channel])
        await self._elsewhere.fetch("SELECT pg_notify(%s, '')", (self._test_channel,))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SELF_TEST_SECONDS):
                await self._test_heard.wait()
        if self._lost.is_set():
            raise psycopg.OperationalError("the connection was lost")
        return self._test_heard.is_set()

    def _watch(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def _unwatch(self) -> None:
        # psycopg watches the same socket while it executes.
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)

    def _readable(self) -> None:
        conn = self._conn
        if conn is None:
            return
        try:
            conn.pgconn.consume_input()
            while notify := conn.pgconn.notifies():
                self._pass_on(notify.relname.decode(), notify.extra.decode())
        except psycopg.Error as error:
            # The number may be another socket's in a moment.
            self._unwatch()
            self._fd = -1
            self._listening.clear()
            self._is_tested = False
            self._outage.report("listener", error)
            self._lost.set()

    def _notified(self, notify: psycopg.Notify) -> None:
        self._pass_on(notify.channel, notify.payload)

    def _pass_on(self, channel: str, payload: str) -> None:
        if channel == self._test_channel:
            self._test_heard.set()
        else:
            self._heard(channel, payload)

    async def _disconnect(self) -> None:
        async with self._lock:
            self._listening.clear()
            self._is_tested = False
            conn, self._conn = self._conn, None
            if conn is not None:
                self._unwatch()
                self._fd = -1
                await conn.close()
