"""The demo's handlers: each writes its result and its own completion in one transaction."""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from psycopg_pool import AsyncConnectionPool, ConnectionPool

import awa

RECORD = """
    UPDATE files
    SET problem = %(problem)s, size = %(size)s, compressed = %(compressed)s, sha256 = %(sha256)s,
        changed_ns = %(changed_ns)s, packed_by = %(packed_by)s, packed_at = clock_timestamp()
    WHERE path = %(path)s
"""
NOTE = "INSERT INTO notes (kind, attempt) VALUES (%s, %s)"


@dataclass(slots=True)
class Packed:
    """What one pass over a file found."""

    problem: str | None = None
    size: int | None = None
    compressed: int | None = None
    sha256: bytes | None = None
    changed_ns: int | None = None


def pack(path: Path) -> Packed:
    """Checksum and compress a file; that it cannot be read is a result too, not a failure."""
    digest, compressor, read, written = hashlib.sha256(), zlib.compressobj(level=1), 0, 0
    try:
        with path.open("rb") as file:
            changed_ns = os.fstat(file.fileno()).st_ctime_ns
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                read += len(chunk)
                written += len(compressor.compress(chunk))
    except OSError as error:
        return Packed(problem=error.strerror)
    written += len(compressor.flush())
    return Packed(None, read, written, digest.digest(), changed_ns)


def make_handlers(
    root: Path, pool: ConnectionPool, async_pool: AsyncConnectionPool
) -> awa.Handlers:
    """The handlers, over the application's two connection pools."""
    handlers = awa.Handlers()

    @handlers.task(queue="files", completes_itself=True)
    async def pack_small(job: awa.Job, path: str) -> None:
        """Runs in the event loop: a small file takes less time than a change of thread."""
        packed = pack(root / path)
        async with async_pool.connection() as conn:
            await conn.execute(RECORD, {**asdict(packed), "path": path, "packed_by": job.kind})
            await job.complete(conn)

    @handlers.task(queue="files", completes_itself=True)
    def pack_large(job: awa.Job, path: str) -> None:
        """Runs in a thread: hashing and compressing release the interpreter lock."""
        packed = pack(root / path)
        with pool.connection() as conn:
            conn.execute(RECORD, {**asdict(packed), "path": path, "packed_by": job.kind})
            job.complete(conn)

    @handlers.task(queue="files", priority=1, completes_itself=True, retry=[0.5, 1.0])
    def flaky(job: awa.Job) -> None:
        """Fails twice, like a service that is down for a moment."""
        with pool.connection() as conn:
            conn.execute(NOTE, [job.kind, job.attempt])
            if job.attempt <= 2:
                raise ConnectionError("the service is down")  # rolls the note back
            job.complete(conn)

    @handlers.task(queue="files", priority=1, completes_itself=True)
    async def planned(job: awa.Job) -> None:
        """Was scheduled ahead."""
        async with async_pool.connection() as conn:
            await conn.execute(NOTE, [job.kind, job.attempt])
            await job.complete(conn)

    @handlers.task(queue="files", priority=1, max_attempts=3, retry=[0.2])
    async def poison(job: awa.Job) -> None:
        """Can never succeed, and ends as a dead letter."""
        raise ValueError("nobody can process this")

    return handlers
