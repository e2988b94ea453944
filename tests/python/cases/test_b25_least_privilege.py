"""Case b25: the least rights, and hosts that are managed by others.

Shown elsewhere: each role can do exactly its list, every function, view and table of the schema
(test_rights.py); one plain script makes what the extension makes, in any schema, for a role without
attributes (test_install.py); from pip install to a finished job on a managed server
(test_managed_server.py); every test's database belongs to a role without attributes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import awa
from conftest import Database, DatabaseServer
from engine import install_plain, value

SCHEMA = "Jobs of ours"
NEEDED = (
    *("attempt_status", "claim_ready_runtime", "claim_status", "complete_jobs", "finish_jobs"),
    *("heartbeat", "register_instance", "schema_version", "set_progress", "tick"),
)


class Roles:
    """Login roles with one capability each, in a database where nothing is granted to PUBLIC."""

    def __init__(self, server: DatabaseServer, database: Database) -> None:
        self.server = server
        self.database = database
        self.names = {
            c: f"awa_{c}_{uuid.uuid4().hex[:12]}"
            for c in ("producer", "worker", "reader", "nobody")
        }

    def dsn(self, capability: str) -> str:
        return make_conninfo(self.database.dsn, user=self.names[capability])

    def create(self) -> None:
        with self.database.connect() as conn:
            conn.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            schema = sql.Identifier(SCHEMA)
            for capability, name in self.names.items():
                role = sql.Identifier(name)
                conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
                if capability != "nobody":
                    grant = sql.Identifier(f"grant_{capability}")
                    conn.execute(
                        sql.SQL("SELECT {}.{}({})").format(schema, grant, sql.Literal(name))
                    )

    def drop(self) -> None:
        for name in self.names.values():
            self.server.admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture(scope="module")
def roles(server: DatabaseServer) -> Iterator[Roles]:
    with server.fresh() as database:
        with database.connect() as conn:
            install_plain(conn, f'"{SCHEMA}"')
        roles = Roles(server, database)
        roles.create()
        yield roles
    roles.drop()


@pytest.fixture
def conn(roles: Roles) -> Iterator[psycopg.Connection]:
    """The owner's connection."""
    with roles.database.connect() as connection:
        yield connection


async def run_one(roles: Roles, capability: str, **options: Any) -> None:
    """Run one job that a producer has enqueued."""
    done = asyncio.Event()

    async def k(n: int) -> None:
        assert n == 1
        done.set()

    async with awa.Worker(roles.dsn(capability), {"k": k}, schema=SCHEMA, **options):
        with awa.Client(roles.dsn("producer"), schema=SCHEMA) as producer:
            await asyncio.to_thread(producer.insert_job, "k", {"n": 1})
        async with asyncio.timeout(20):
            await done.wait()


def test_b25_the_least_rights_are_enough_to_enqueue_and_to_work(
    roles: Roles, conn: psycopg.Connection
) -> None:
    asyncio.run(run_one(roles, "worker"))
    with awa.Client(roles.dsn("reader"), schema=SCHEMA) as reader:
        counts = reader.queue_counts("default")
    assert (counts.completed, counts.running, counts.available) == (1, 0, 0)
    # No role has an attribute, and the owner cannot even log in.
    plain = "SELECT bool_or(rolsuper OR rolcreaterole OR rolcreatedb) FROM pg_roles r"
    names = [*roles.names.values(), "awa_owner"]
    assert value(conn, f"{plain} WHERE rolname = ANY (%s)", names) is False


# Broken by a worker that does not ask for its rights when it starts: it would claim for ever, or
# run handlers whose results it cannot store.
@pytest.mark.parametrize("missing", NEEDED)
def test_b25_a_worker_says_at_its_start_which_right_is_missing(
    roles: Roles, conn: psycopg.Connection, missing: str
) -> None:
    schema, role = sql.Identifier(SCHEMA), sql.Identifier(roles.names["worker"])
    [(arguments,)] = conn.execute(
        "SELECT pg_get_function_identity_arguments(p.oid) FROM pg_proc p"
        " WHERE p.pronamespace = %s::regnamespace AND p.proname = %s",
        [f'"{SCHEMA}"', missing],
    ).fetchall()
    function = sql.SQL("{}.{}({})").format(schema, sql.Identifier(missing), sql.SQL(arguments))
    conn.execute(sql.SQL("REVOKE EXECUTE ON FUNCTION {} FROM {}").format(function, role))
    try:
        with pytest.raises((awa.AwaError, psycopg.errors.InsufficientPrivilege), match=missing):
            asyncio.run(run_one(roles, "worker"))
        if missing == "tick":
            asyncio.run(run_one(roles, "worker", maintenance=False))
    finally:
        conn.execute(sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(function, role))


@pytest.mark.parametrize("capability", ["producer", "reader", "nobody"])
def test_b25_a_worker_without_its_capability_does_not_start(roles: Roles, capability: str) -> None:
    with pytest.raises((awa.AwaError, psycopg.errors.InsufficientPrivilege)) as error:
        asyncio.run(run_one(roles, capability))
    missing = f"schema {SCHEMA}" if capability == "nobody" else "claim_ready_runtime"
    assert missing in str(error.value)
