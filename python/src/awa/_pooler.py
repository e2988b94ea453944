"""Connections that lead through a pooler such as PgBouncer, where no session can be relied upon."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection

logger = logging.getLogger("awa")

BACKEND = "SELECT pg_backend_pid()"
# What a prepared statement meets on a server connection that is not the one it was prepared on.
# Nothing was executed then.
PREPARED_ELSEWHERE = (
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.DuplicatePreparedStatement,
)


def is_pooled(conn: Connection[Any] | AsyncConnection[Any], backend: int) -> bool:
    """Whether the backend that answers is not the one whose id came with the greeting.

    In any mode of the pooler: it gives its clients keys of its own.
    """
    return conn.info.backend_pid != backend


class Preparing:
    """Whether statements are prepared: until one gets lost, which is said once."""

    def __init__(self) -> None:
        self.works = True

    def stop(self, error: psycopg.Error) -> None:
        """There is a pooler after all."""
        if not self.works:
            return
        self.works = False
        logger.warning(
            "prepared statements get lost (%s): there is a pooler that shares server connections. "
            "Statements are not prepared any more",
            str(error).partition("\n")[0],
        )
