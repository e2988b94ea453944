"""Install the engine into a database as plain SQL, without CREATE EXTENSION or superuser rights."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

# The name is put into quoted bodies, into literals and into patterns of format().
_FORBIDDEN_CHARACTERS = "\"$'\\%"
_MAX_NAME_BYTES = 63


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


def install(
    conn: psycopg.Connection[Any], *, schema: str = "awa", owner: str | None = None
) -> Installation:
    """Install the version that this package brings into a schema; a second call changes nothing.

    It is one transaction (a savepoint inside the caller's own). Installations into the same
    database wait for each other. With `owner` the objects are given to that role.
    """
    _check_name(schema)
    version, script = install_script()
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa install', 0))")
        found, extension = _look(conn, schema)
        if found is None:
            _make_schema(conn, schema)
            _run(conn, schema, script)
        elif found != version:
            raise InstallError(
                f'schema "{schema}" holds version {found}, this package brings {version}',
                "Use the package of the installed version, or another schema.",
            )
        if owner is not None:
            set_owner = sql.SQL("SELECT {}.set_owner(quote_ident(%s)::regrole)")
            conn.execute(set_owner.format(sql.Identifier(schema)), [owner])
    return Installation(schema, version, installed=found is None, extension=extension)


def _check_name(schema: str) -> None:
    good = schema.isprintable() and not set(schema) & set(_FORBIDDEN_CHARACTERS)
    if not good or not 0 < len(schema.encode()) <= _MAX_NAME_BYTES or schema.startswith("pg_"):
        raise InstallError(
            f"{schema!r} cannot be the schema's name",
            f"It has 1 to {_MAX_NAME_BYTES} bytes, does not start with pg_, and has neither"
            f" unprintable characters nor one of {_FORBIDDEN_CHARACTERS}",
        )


def install_script() -> tuple[str, str]:
    """The version and the text of the install script in this package."""
    folder = importlib.resources.files("awa") / "_sql"
    scripts = [f for f in folder.iterdir() if f.name.endswith(".sql")] if folder.is_dir() else []
    if len(scripts) != 1:
        raise InstallError(
            "this copy of the package holds no install script",
            "In a source checkout, run `make build`.",
        )
    version = scripts[0].name.removeprefix("awa--").removesuffix(".sql")
    return version, scripts[0].read_text(encoding="utf-8")


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
