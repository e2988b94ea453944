"""AwaError and one class per SQLSTATE that the SQL interface raises on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg


class AwaError(Exception):
    """An error raised by the queue; `__cause__` is the database error when there is one."""

    sqlstate: str | None = None

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        if self.detail:
            parts.append(self.detail)
        if self.hint:
            parts.append(f"Hint: {self.hint}")
        return "\n".join(parts)


class StaleAttempt(AwaError):
    """The attempt is no longer current: drop its result, another worker owns the job."""

    sqlstate = "JQ001"


class Backpressure(AwaError):
    """The queue is fuller than the insert allowed."""

    sqlstate = "JQ003"


class ParentFailed(AwaError):
    """A job this one depends on failed."""

    sqlstate = "JQ004"


class CallbackUnknown(AwaError):
    """The callback token is unknown or was used."""

    sqlstate = "JQ005"


class VersionMismatch(AwaError):
    """The schema in the database and this client do not fit."""

    sqlstate = "JQ006"


class NotEnabled(AwaError):
    """The feature is not enabled in this installation."""

    sqlstate = "JQ007"


class InvalidArgument(AwaError):
    """An argument has a bad value, or an option is unknown."""

    sqlstate = "22023"


class LimitExceeded(AwaError):
    """A value is longer, larger or deeper than allowed."""

    sqlstate = "23514"


class UniqueConflict(AwaError):
    """Another job holds the unique key and the insert asked for an error."""

    sqlstate = "23505"


class SerializationFailure(AwaError, psycopg.errors.SerializationFailure):
    """The snapshot is older than a change of the same job: repeat the transaction.

    Also a psycopg error, so that an application's own retry loop catches it.
    """

    sqlstate = "40001"


class NotFound(AwaError):
    """The queue, job, setting or step is unknown."""

    sqlstate = "42704"


class WrongState(AwaError):
    """The job, the queue or the server is in a state that does not allow the call."""

    sqlstate = "55000"


class WrongIsolation(AwaError):
    """The call needs a READ COMMITTED transaction."""

    sqlstate = "25001"


BY_SQLSTATE: dict[str, type[AwaError]] = {
    cls.sqlstate: cls
    for cls in (
        StaleAttempt,
        Backpressure,
        ParentFailed,
        CallbackUnknown,
        VersionMismatch,
        NotEnabled,
        InvalidArgument,
        LimitExceeded,
        UniqueConflict,
        SerializationFailure,
        NotFound,
        WrongState,
        WrongIsolation,
    )
    if cls.sqlstate is not None
}

# Serialization failure, deadlock, lock not available, query cancelled, read-only server.
_TRANSIENT_CODES = frozenset({"40001", "40P01", "55P03", "57014", "25006", "25P03", "25P04"})
# Connection trouble, insufficient resources, operator intervention (restart, shutdown, failover).
_TRANSIENT_CLASSES = frozenset({"08", "53", "57"})


# What a server says, before there is a session, that no later try changes. libpq passes no SQLSTATE
# on for these.
_REFUSED = re.compile(
    r'FATAL:\s+(database ".*" does not exist|role ".*" (does not exist|is not permitted to log in)'
    r"|.* authentication failed|no pg_hba\.conf entry|permission denied for database)"
    r"|no password supplied"
)


def translate(error: BaseException) -> AwaError | None:
    """The AwaError for a driver's error, or None when it is not one of ours.

    SQLAlchemy and Django wrap what the driver raised, SQLAlchemy's asyncpg even twice: the
    innermost one knows the most.
    """
    found: BaseException | None = None
    inner: BaseException | None = error
    while inner is not None:
        if getattr(inner, "sqlstate", None) in BY_SQLSTATE:
            found = inner
        inner = getattr(inner, "orig", None) or inner.__cause__
    if found is None:
        return None
    cls = BY_SQLSTATE[found.sqlstate]  # type: ignore[attr-defined]
    diag = getattr(found, "diag", None)
    if diag is None:  # asyncpg
        return cls(
            getattr(found, "message", None) or str(found),
            detail=getattr(found, "detail", None),
            hint=getattr(found, "hint", None),
        )
    return cls(
        diag.message_primary or str(found),
        detail=diag.message_detail,
        hint=diag.message_hint,
    )


@contextmanager
def translated() -> Iterator[None]:
    """Raises our classes for the codes we own; every other error passes through untouched."""
    try:
        yield
    except AwaError:
        raise
    except Exception as error:
        ours = translate(error)
        if ours is None:
            raise
        raise ours from error


def is_refusal(error: BaseException) -> bool:
    """Whether a server would not let us in: a wrong database, role or password."""
    if not isinstance(error, psycopg.OperationalError):
        return False
    if error.sqlstate is not None:
        return error.sqlstate == "3D000" or error.sqlstate[:2] == "28"
    # Only as good as the server's language is English; in any other, the worker tries again.
    return _REFUSED.search(str(error)) is not None


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later without anybody changing anything."""
    if isinstance(error, AwaError):
        error = error.__cause__ or error
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return code in _TRANSIENT_CODES or code[:2] in _TRANSIENT_CLASSES
