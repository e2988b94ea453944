"""Install the engine into a database as plain SQL, without CREATE EXTENSION or superuser rights.

Upgrades are for both forms: plain SQL by the scripts of this package, an extension by its own.
"""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from ._session import Backoff
from ._version import __version__

# The name is put into quoted bodies, into literals and into patterns of format().
_FORBIDDEN_CHARACTERS = "\"$'\\%"
_MAX_NAME_BYTES = 63
# The scripts wait for a lock for half a second; others wait behind them no longer.
_BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
PATIENCE_SECONDS = 60.0


class InstallError(Exception):
    """The database cannot take the installation; `hint` says what can be done."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Installation:
    """What `install` found or made."""

    schema: str
    version: str
    installed: bool
    extension: bool


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What `upgrade` found and made of it."""

    schema: str
    version_before: str
    version: str
    extension: bool

    @property
    def upgraded(self) -> bool:
        """Whether anything was changed."""
        return self.version != self.version_before


def install(
    conn: psycopg.Connection[Any], *, schema: str = "awa", owner: str | None = None
) -> Installation:
    """Install the version that this package brings into a schema; a second call changes nothing.

    It is one transaction (a savepoint inside the caller's own). Installations into the same
    database wait for each other. With `owner` the objects are given to that role.
    """
    _check_name(schema)
    version = __version__
    scripts = _scripts()
    with _turn(conn):
        found, extension = _look(conn, schema)
        if found is None:
            _make_schema(conn, schema)
            _run(conn, schema, scripts[version])
        elif found != version:
            raise InstallError(
                f'schema "{schema}" holds version {found}, this package brings {version}',
                "Run `awa upgrade`."
                if _number(found) < _number(version)
                else "Use the package of the installed version, or another schema.",
            )
        if owner is not None:
            set_owner = sql.SQL("SELECT {}.set_owner(quote_ident(%s)::regrole)")
            conn.execute(set_owner.format(sql.Identifier(schema)), [owner])
    return Installation(schema, version, installed=found is None, extension=extension)


def upgrade(
    conn: psycopg.Connection[Any], *, schema: str = "awa", patience: float = PATIENCE_SECONDS
) -> Upgrade:
    """Bring a schema to the version of this package; a second call changes nothing.

    An extension gets the version that the server has files of. It is one transaction: all or
    nothing. Where somebody holds on to a table or view for long, it gives way and tries again, for
    `patience` seconds.
    """
    _check_name(schema)
    scripts = _scripts()
    backoff = Backoff(first=0.2, most=5.0)
    deadline = time.monotonic() + patience
    while True:
        try:
            with _turn(conn):
                return _upgrade_once(conn, schema, scripts)
        except _BUSY as error:
            wait = backoff.next()
            if time.monotonic() + wait > deadline:
                raise InstallError(
                    f'the upgrade of schema "{schema}" waits in vain: {error.diag.message_primary}',
                    "Nothing was changed. Somebody's transaction uses it for long: see"
                    " pg_stat_activity. Then run it again.",
                ) from error
        time.sleep(wait)


def installed_version(conn: psycopg.Connection[Any], schema: str) -> str | None:
    """The version in a schema, None where there is no awa."""
    return _look(conn, schema)[0]


@contextmanager
def _turn(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that has waited for whoever installs or upgrades in this database now."""
    is_outermost = conn.info.transaction_status == TransactionStatus.IDLE
    with conn.transaction():
        if is_outermost:
            # Whatever the database's defaults are: see what the one before us did, and wait for it.
            conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE")
        conn.execute("SET LOCAL lock_timeout = 0")
        conn.execute("SET LOCAL statement_timeout = 0")
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa install', 0))")
        yield


def _upgrade_once(conn: psycopg.Connection[Any], schema: str, scripts: dict[str, str]) -> Upgrade:
    _check_owner(conn, schema)
    before, extension = _look(conn, schema)
    if before is None:
        raise InstallError(f'awa is not installed in schema "{schema}" here', "Run `awa install`.")
    if extension:
        conn.execute("ALTER EXTENSION awa UPDATE")
    elif before != __version__:
        for script in _way(before, scripts):
            _run(conn, schema, script)
    after, _ = _look(conn, schema)
    assert after is not None
    if _number(after) < _number(__version__):
        raise InstallError(
            f"the server has files of version {after}, this package brings {__version__}",
            "Put the new files there first: `make install`, or the script for pg_tle.",
        )
    return Upgrade(schema, before, after, extension)


def _way(version: str, scripts: dict[str, str]) -> list[str]:
    """The scripts that lead from a version to this one, in order."""
    way = []
    at = version
    while at != __version__:
        steps = [name for name in scripts if name.startswith(f"{at}--")]
        if not steps:
            raise InstallError(
                f"no way leads from the installed version {version} to {__version__}",
                "Use a package that is newer."
                if _number(version) > _number(__version__)
                else "Upgrade by the package of a version in between first.",
            )
        way.append(scripts[steps[0]])
        at = steps[0].partition("--")[2]
    return way


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _check_owner(conn: psycopg.Connection[Any], schema: str) -> None:
    """Say whom an upgrade needs, before the server says it function by function."""
    rights = """
        SELECT quote_ident(current_user), p.owner::regrole::text
        FROM (
            SELECT coalesce(
                (SELECT e.extowner FROM pg_extension e
                 WHERE e.extname = 'awa' AND e.extnamespace = n.oid),
                (SELECT f.proowner FROM pg_proc f
                 WHERE f.pronamespace = n.oid AND f.proname = 'schema_version'))
            FROM pg_namespace n WHERE n.nspname = %s
        ) p (owner)
        WHERE NOT pg_has_role(p.owner, 'USAGE')
    """
    for user, owner in conn.execute(rights, [schema]).fetchall():
        raise InstallError(
            f'role {user} may not change what is in schema "{schema}"',
            f"It belongs to {owner}: upgrade as a member of that role, or as superuser.",
        )


def _check_name(schema: str) -> None:
    good = schema.isprintable() and not set(schema) & set(_FORBIDDEN_CHARACTERS)
    if not good or not 0 < len(schema.encode()) <= _MAX_NAME_BYTES or schema.startswith("pg_"):
        raise InstallError(
            f"{schema!r} cannot be the schema's name",
            f"It has 1 to {_MAX_NAME_BYTES} bytes, does not start with pg_, and has neither"
            f" unprintable characters nor one of {_FORBIDDEN_CHARACTERS}",
        )


def extension_files() -> dict[str, str]:
    """What `CREATE EXTENSION` and `ALTER EXTENSION` look for, but for the control file."""
    return {f"awa--{name}.sql": text for name, text in _scripts().items()}


def _scripts() -> dict[str, str]:
    """The scripts of this package: to install by version, to upgrade by FROM--TO."""
    folder = importlib.resources.files("awa") / "_sql"
    files = folder.iterdir() if folder.is_dir() else ()
    scripts = {
        file.name.removeprefix("awa--").removesuffix(".sql"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".sql")
    }
    if __version__ not in scripts:
        raise InstallError(
            "this copy of the package holds no install script",
            "In a source checkout, run `make build`.",
        )
    return scripts


def _look(conn: psycopg.Connection[Any], schema: str) -> tuple[str | None, bool]:
    """The version in the schema, if any, and whether it came by CREATE EXTENSION."""
    row = conn.execute(
        """
        SELECT
            EXISTS (
                SELECT FROM pg_proc f
                WHERE f.pronamespace = n.oid AND f.proname = 'schema_version'
            ),
            EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = n.oid)
                OR EXISTS (SELECT FROM pg_proc f WHERE f.pronamespace = n.oid)
                OR EXISTS (SELECT FROM pg_type t WHERE t.typnamespace = n.oid),
            EXISTS (SELECT FROM pg_extension e WHERE e.extnamespace = n.oid AND e.extname = 'awa')
        FROM pg_namespace n
        WHERE n.nspname = %s
        """,
        [schema],
    ).fetchone()
    is_ours, has_objects, is_extension = row or (False, False, False)
    if is_ours:
        version = sql.SQL("SELECT {}.version()").format(sql.Identifier(schema))
        return conn.execute(version).fetchall()[0][0], is_extension
    if has_objects:
        raise InstallError(
            f'schema "{schema}" holds something else', "Choose another one by --schema."
        )
    return None, False


def _make_schema(conn: psycopg.Connection[Any], schema: str) -> None:
    """Make the schema unless it is there: one's own schema needs no right to make another."""
    rights = """
        SELECT n.oid IS NOT NULL, has_schema_privilege(n.oid, 'CREATE'),
               has_database_privilege(d.oid, 'CREATE'), quote_ident(d.datname), quote_ident(%s),
               quote_ident(current_user)
        FROM pg_database d LEFT JOIN pg_namespace n ON n.nspname = %s
        WHERE d.datname = current_database()
    """
    [row] = conn.execute(rights, [schema, schema]).fetchall()
    exists, may_use, may_make, database, name, user = row
    if exists and not may_use:
        raise InstallError(
            f'role {user} may not create anything in schema "{schema}"',
            f"Its owner or a superuser runs: ALTER SCHEMA {name} OWNER TO {user}",
        )
    if not exists and not may_make:
        raise InstallError(
            f"role {user} may not create a schema in database {database}",
            f"The database's owner runs: CREATE SCHEMA {name} AUTHORIZATION {user}",
        )
    if not exists:
        conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))


def _run(conn: psycopg.Connection[Any], schema: str, script: str) -> None:
    name = sql.Identifier(schema)
    # What CREATE EXTENSION sets while it runs a script.
    conn.execute("SET LOCAL client_min_messages = warning")
    conn.execute("SET LOCAL check_function_bodies = off")
    conn.execute(sql.SQL("SET LOCAL search_path = {}, pg_temp").format(name))
    [[quoted]] = conn.execute("SELECT quote_ident(%s)", [schema]).fetchall()
    conn.execute(script.replace("@extschema@", quoted).encode())
