"""Checksum and compress every file of a directory tree through the queue, on a private PostgreSQL.

The exit status is 0 if at the end the application's table agrees with the files on disk, and the
jobs that were meant to be retried, to run later and to die have done so.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import stat
import sys
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import psycopg
from handlers import make_handlers
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import awa
from awa.embedded import Postgres

SCHEMA = Path(__file__).with_name("schema.sql")
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
BATCH = 200
SMALL_FILE = 64 * 1024
AHEAD = timedelta(seconds=3)
AGREE, CHANGED = "files agree with their row", "files came, went or changed meanwhile"

AsyncConnection = psycopg.AsyncConnection[Any]
Show = Callable[[int, int, str], None]


def main() -> int:
    """Run the demo; 0 means that everything is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=STANDARD_LIBRARY,
        help="the files to work on (default: Python's standard library)",
    )
    root = parser.parse_args().directory.resolve()
    if not root.is_dir():
        parser.error(f"{root} is not a directory")
    with Postgres() as server:
        return 0 if asyncio.run(demo(root, server.dsn)) else 1


async def demo(root: Path, dsn: str) -> bool:
    """Install, enqueue while a worker runs, wait until all is done, compare."""
    started = time.time_ns()
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
        AsyncConnectionPool(dsn, max_size=8, open=False) as async_pool,
    ):
        await conn.execute("CREATE EXTENSION awa")
        await conn.execute(SCHEMA.read_bytes())
        await awa.AsyncClient(conn).declare_queue("files", opts={"dlq": True})
        with ConnectionPool(dsn, max_size=4, open=True) as pool, progress_view() as show:
            handlers = make_handlers(root, pool, async_pool)
            async with awa.Worker(dsn, handlers, queues={"files": 32}):
                due = datetime.now(UTC) + AHEAD
                flaky = await handlers["flaky"].insert(conn)
                planned = await handlers["planned"].options(run_at=due).insert(conn)
                poison = await handlers["poison"].insert(conn)
                total = 3 + await enqueue_files(conn, handlers, root, show)
                await wait_until_done(conn, total, show)
        check = Checklist()
        await check_files(check, conn, root, started)
        await check_jobs(check, conn, [flaky.job_id, planned.job_id, poison.job_id], due)
        return check.all_passed


async def enqueue_files(
    conn: AsyncConnection, handlers: awa.Handlers, root: Path, show: Show
) -> int:
    """Record the files, and enqueue a job for each in the transaction that records it."""
    client, skipped, total = awa.AsyncClient(conn), Counter[str](), 0
    small, large = handlers["pack_small"], handlers["pack_large"]
    files = scan(root, skipped)
    while batch := dict(islice(files, BATCH)):
        jobs = [(small if s.st_size <= SMALL_FILE else large).item(p) for p, s in batch.items()]
        async with conn.transaction():
            await conn.execute("INSERT INTO files (path) SELECT unnest(%s::text[])", [[*batch]])
            await client.insert_jobs(jobs)
        total += len(batch)
        show(0, total, "recording files")
    for reason, count in skipped.items():
        print(f"skipped {count} files: {reason}")
    return total


async def wait_until_done(conn: AsyncConnection, total: int, show: Show) -> None:
    """Follow the queue until nothing is left in it."""
    client, left = awa.AsyncClient(conn), 1
    while left:
        await asyncio.sleep(0.2)
        counts = await client.queue_counts("files")
        later = counts.scheduled + counts.retryable
        left = counts.available + counts.running + later
        what = f"{counts.available} waiting, {counts.running} running, {later} for later"
        show(counts.completed + counts.dead_lettered, total, what)


def scan(root: Path, skipped: Counter[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Every regular file that can be read and is named in UTF-8; the others are counted."""
    for folder, folders, names in os.walk(root, onerror=lambda _: skipped.update(["unreadable"])):
        if Path(folder) == STANDARD_LIBRARY and "site-packages" in folders:
            folders.remove("site-packages")  # lies in there, but is not part of it
        for file in (Path(folder, name) for name in names):
            try:
                path = str(file.relative_to(root)).encode().decode()
                status = file.stat(follow_symlinks=False)
            except UnicodeEncodeError:
                reason = "name is not UTF-8"
            except FileNotFoundError:
                reason = "vanished"
            else:
                if stat.S_ISREG(status.st_mode) and os.access(file, os.R_OK):
                    yield path, status
                    continue
                reason = "unreadable" if stat.S_ISREG(status.st_mode) else "not a regular file"
            skipped[reason] += 1


async def check_files(check: Checklist, conn: AsyncConnection, root: Path, started: int) -> None:
    """Hash every file on disk again, and hold it against its row."""
    cursor = await conn.cursor(row_factory=dict_row).execute("SELECT * FROM files")
    rows = {row["path"]: row async for row in cursor}
    size, packed = (sum(row[c] or 0 for row in rows.values()) for c in ("size", "compressed"))
    print(f"{len(rows)} files, {size / 1e6:.1f} MB, compressed to {packed / 1e6:.1f} MB")
    on_disk = dict(scan(root, Counter()))
    verdicts = defaultdict[str, list[str]](list)
    for path in sorted(rows.keys() | on_disk):
        verdict = judge(root / path, rows.get(path), on_disk.get(path), started)
        verdicts[verdict].append(path)
    for verdict, paths in verdicts.items():
        examples = "" if verdict == AGREE else f": {', '.join(paths[:5])}"
        check(verdict in (AGREE, CHANGED), f"{len(paths)} {verdict}{examples}")


def judge(file: Path, row: DictRow | None, status: os.stat_result | None, started: int) -> str:
    """What the disk says about a row; a change is believed only if the file's own times show it."""
    if row is not None and row["packed_at"] is None:
        return "files were recorded, but no job has written a result"
    if status is None:
        return CHANGED
    if row is None:
        return CHANGED if status.st_ctime_ns >= started else "files were not recorded"
    try:
        content = file.read_bytes()
    except OSError:
        return CHANGED
    if (len(content), hashlib.sha256(content).digest()) == (row["size"], row["sha256"]):
        return AGREE
    return CHANGED if status.st_ctime_ns != row["changed_ns"] else "files differ from their row"


async def check_jobs(
    check: Checklist, conn: AsyncConnection, job_ids: list[int], due: datetime
) -> None:
    """Hold the queue's own account against what was meant to happen."""
    client = awa.AsyncClient(conn)
    counts = await client.queue_counts("files")
    flaky, planned, poison = [await client.job(job_id) for job_id in job_ids]
    cursor = await conn.execute(
        "SELECT (SELECT count(packed_at) FROM files), made_at FROM notes WHERE kind = 'planned'"
    )
    [[files, made_at]] = await cursor.fetchall()
    check(
        (counts.completed, counts.failed, counts.cancelled) == (files + 2, 0, 0),
        f"{counts.completed} jobs completed: one per file, the flaky one and the planned one",
    )
    check(
        (flaky.state, flaky.attempt) == ("completed", 3),
        f"the flaky job {flaky.state} at attempt {flaky.attempt}",
    )
    check(
        planned.state == "completed" and made_at >= due,
        f"the planned job {planned.state} {(made_at - due).total_seconds():.3f} s after its time",
    )
    check(
        (poison.state, poison.attempt, counts.dead_lettered) == ("failed", 3, 1),
        f"the poison job {poison.state} at attempt {poison.attempt} and is a dead letter",
    )


class Checklist:
    """Prints what was checked, and remembers whether all of it held."""

    def __init__(self) -> None:
        self.all_passed = True

    def __call__(self, passed: bool, text: str) -> None:
        self.all_passed &= passed
        print(f"{'ok' if passed else 'WRONG':6}{text}", flush=True)


@contextmanager
def progress_view() -> Iterator[Show]:
    """A live bar on a terminal when rich is installed, else a line now and then."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        is_live = False
    else:
        is_live = sys.stdout.isatty()
    if is_live:
        columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), "{task.description}")
        with Progress(*columns) as progress:
            task = progress.add_task("starting", total=None)
            yield lambda done, total, text: progress.update(
                task, completed=done, total=total, description=text
            )
    else:
        last_second = None

        def show(done: int, total: int, text: str) -> None:
            nonlocal last_second
            if last_second != (last_second := int(time.monotonic())):
                print(f"{done} of {total} jobs done; {text}", flush=True)

        yield show


if __name__ == "__main__":
    sys.exit(main())
