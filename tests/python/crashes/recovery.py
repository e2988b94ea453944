"""Killing a backend, and waiting until the server has recovered from it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psycopg

from tools.servers import Cluster

SERVER_SECONDS = 30


def kill_backend(cluster: Cluster, dsn: str, pid: int) -> None:
    """SIGKILL a backend: the server ends all others and recovers; wait for that."""
    before = _checkpointer(dsn)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + SERVER_SECONDS
    while _checkpointer(dsn) in (before, None):
        if not cluster.is_running:
            # An UNLOGGED sequence whose creation was rolled back just before: PostgreSQL fails to
            # start, and then starts (docs/architecture.md).
            cluster.restart()
        if time.monotonic() > end:
            raise TimeoutError("the server does not come back")
        time.sleep(0.01)


def _checkpointer(dsn: str) -> int | None:
    """A process that the server starts anew when it recovers; None while nobody is let in."""
    query = "SELECT max(pid) FROM pg_stat_activity WHERE backend_type = 'checkpointer'"
    with (
        contextlib.suppress(psycopg.OperationalError),
        psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=0") as conn,
    ):
        row = conn.execute(query).fetchone()
        return row[0] if row else None
    return None
