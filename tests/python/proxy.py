"""A loopback proxy that cuts connections to the server around their COMMIT."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import cast

from psycopg.conninfo import conninfo_to_dict, make_conninfo

# What becomes of a COMMIT on its way, besides that the client's connection is cut. The server:
CUTS = (
    "before",  # never gets it
    "sent",  # gets it, and may not be through with it when it is asked
    "answered",  # has answered, the answer is thrown away
    "late",  # gets it a moment after the cut
    "hanging",  # never gets it, and learns of the cut a moment later
)
# With these the server got the COMMIT, and the client no answer.
UNANSWERED = {"sent", "answered", "late"}
DELAY = 0.15
COMMIT = re.compile(rb"COMMIT(?!TED)", re.IGNORECASE)


class Proxy:
    """Listens on a port per kind of cut."""

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._dsn = dsn
        self._upstream = (str(given["host"]), int(given["port"] or 5432))
        self._ports: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()
        self.cuts: Counter[str] = Counter()

    def dsn(self, cut: str) -> str:
        """A connection string whose first COMMIT is cut this way."""
        return make_conninfo(self._dsn, host="127.0.0.1", port=self._ports[cut])

    async def start(self) -> None:
        for cut in CUTS:
            server = await asyncio.start_server(partial(self._serve, cut), "127.0.0.1", 0)
            self._servers.append(server)
            self._ports[cut] = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)

    async def _serve(
        self, cut: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        me = cast("asyncio.Task[None]", asyncio.current_task())
        self._serving.add(me)
        up_reader, up_writer = await asyncio.open_connection(*self._upstream)
        back = asyncio.create_task(self._copy(up_reader, writer))
        try:
            while data := await reader.read(65536):
                if COMMIT.search(data):
                    self.cuts[cut] += 1
                    back.cancel()
                    await asyncio.wait([back])
                    await self._cut(cut, data, writer, up_reader, up_writer)
                    break
                up_writer.write(data)
        except OSError:
            pass  # the client went away
        finally:
            back.cancel()
            await asyncio.wait([back])
            writer.transport.abort()
            up_writer.close()
            self._serving.discard(me)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def _cut(
        self,
        cut: str,
        commit: bytes,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        if cut == "answered":
            up_writer.write(commit)
            await up_reader.read(65536)
        writer.transport.abort()
        if cut in ("late", "hanging"):
            await asyncio.sleep(DELAY)
        if cut in ("sent", "late"):
            up_writer.write(commit)
            await up_writer.drain()


@contextlib.contextmanager
def proxy(dsn: str) -> Iterator[Proxy]:
    """A running proxy, in a thread and an event loop of its own."""
    running = Proxy(dsn)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(running.start(), loop).result(5)
    try:
        yield running
    finally:
        asyncio.run_coroutine_threadsafe(running.stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
