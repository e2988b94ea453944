"""A released version is upgraded in place: the catalog of a fresh install, and no job the worse."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa._install import InstallError, Upgrade, install, upgrade
from conftest import Database, DatabaseServer
from engine import (
    BUILD,
    claim,
    claim_all,
    complete,
    counts,
    insert,
    tick,
    value,
    wait_until_blocked,
)
from test_dump_restore import all_counts, all_jobs, check_that_all_goes_on, job_in_every_state
from test_install import OWNER, PGTLE, REPO, become_owner, catalog, difference, objects
from tools.api_manifest import manifest

RELEASED = REPO / "extension/released"
# Released files never change. A new version adds its install script, and how it was upgraded to.
CHECKSUMS = {
    "awa--0.1.0.sql": "578b57cfe2be7b376fb75c1605da17b9bdfae6809ab704a50487ecfb3cd72712",
}
OLD = "0.1.0"
OLD_COMMIT = "86c4d7f"  # its client
# Functions that the new version has not. A call under way at the commit goes on with its old
# body, so none of them may be called from inserts, claims, finishes or heartbeats of the old one.
GONE = {
    "awa._cancel_running(bigint,integer,text,timestamp with time zone)",
    "awa._close_types()",
    "awa._count_waiting(integer,integer,bigint)",
    "awa._deferred_status(timestamp with time zone)",
    "awa._slot_holder(text,integer,timestamp with time zone)",
    "awa._unclaimed_lane(integer)",
}
# Sequences that only maintenance reads.
CLOCKS = ("_released", "_taken", "_look", "_until", "_clock")
CAPABILITIES = ("producer", "worker", "operator", "reader")
# What belongs to the extension, what pg_dump keeps of it, and which rights it takes for given.
MEMBERS = """
SELECT 'member ' || pg_describe_object(d.classid, d.objid, d.objsubid)
FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
WHERE d.refclassid = 'pg_extension'::regclass AND e.extname = 'awa' AND d.deptype = 'e'
UNION ALL
SELECT format('dumped %s where %s', u.relation::regclass, u.condition)
FROM pg_extension e, unnest(e.extconfig, e.extcondition) u (relation, condition)
WHERE e.extname = 'awa'
UNION ALL
SELECT format('extension %s schema %s', e.extversion, e.extnamespace::regnamespace)
FROM pg_extension e WHERE e.extname = 'awa'
UNION ALL
SELECT format('initial rights on %s: %s',
              pg_describe_object(i.classoid, i.objoid, i.objsubid), i.initprivs)
FROM pg_init_privs i WHERE i.privtype = 'e'
"""
# Of the user's own, over what is public here.
USER_OBJECTS = """
CREATE VIEW public.waiting AS SELECT j.job_id, j.kind FROM awa.jobs j WHERE j.state = 'available';
CREATE FUNCTION public.greet(name text) RETURNS awa.insert_result LANGUAGE sql
BEGIN ATOMIC
    SELECT awa.insert_job('greet', jsonb_build_object('name', name), queue => 'greetings');
END;
CREATE FUNCTION public.states() RETURNS SETOF awa.job_state LANGUAGE plpgsql AS
'BEGIN RETURN QUERY SELECT unnest(enum_range(NULL::awa.job_state)); END';
CREATE TABLE public.answers (answer awa.finish_result);
"""


def members(conn: psycopg.Connection) -> list[str]:
    """Everything about the extension that is not in the objects themselves."""
    conn.execute("SET search_path = pg_catalog")
    return sorted(line for (line,) in conn.execute(MEMBERS).fetchall())


def at_home(lines: list[str]) -> list[str]:
    """Without the row that says where the rows are: a fresh database has none before its tick."""
    return [line for line in lines if not line.startswith("awa.database_identity{")]


def version(conn: psycopg.Connection, schema: str = "awa") -> str:
    return str(value(conn, f"SELECT {schema}.version()"))


def install_old(conn: psycopg.Connection, schema: str) -> None:
    """Install the released version as its `awa install` did."""
    conn.execute(f"CREATE SCHEMA {schema}")
    with conn.transaction():
        conn.execute("SET LOCAL check_function_bodies = off")
        script = (RELEASED / f"awa--{OLD}.sql").read_text()
        conn.execute(script.replace("@extschema@", schema).encode())


def update_extension(conn: psycopg.Connection) -> None:
    conn.execute("ALTER EXTENSION awa UPDATE")


@pytest.fixture(scope="session")
def old_template(server: DatabaseServer) -> Iterator[Database]:
    """A database with the released version as an extension, owned as in all tests."""
    with server.fresh() as database:
        with database.connect() as conn:
            conn.execute(f"CREATE EXTENSION awa VERSION '{OLD}'")
            if value(conn, "SELECT to_regrole(%s) IS NULL", OWNER):
                conn.execute(f"CREATE ROLE {OWNER} NOLOGIN")
            conn.execute(f"SELECT awa.set_owner('{OWNER}')")
        yield database


@pytest.fixture
def old(server: DatabaseServer, old_template: Database) -> Iterator[Database]:
    """A fresh database with the released version."""
    with server.fresh(old_template.name) as database:
        yield database


@pytest.fixture
def old_conn(old: Database) -> Iterator[psycopg.Connection]:
    with old.connect() as connection:
        yield connection


@pytest.fixture
def roles(conn: psycopg.Connection, old_conn: psycopg.Connection) -> Iterator[None]:
    """A role with each capability, in the fresh database and in the one of the old version."""
    names = {capability: f"awa_upgrade_{capability}" for capability in CAPABILITIES}
    for capability, name in names.items():
        conn.execute(f"CREATE ROLE {name}")
        for connection in (conn, old_conn):
            connection.execute(f"SELECT awa.grant_{capability}('{name}')")
    yield
    for name in names.values():
        for connection in (conn, old_conn):
            connection.execute(f"DROP OWNED BY {name}")
        conn.execute(f"DROP ROLE {name}")


def test_released_files_are_never_changed() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RELEASED.iterdir()
    }
    assert found == CHECKSUMS


# The catalog


def test_b24_an_updated_extension_is_what_a_fresh_one_is(
    conn: psycopg.Connection,
    old_conn: psycopg.Connection,
    roles: None,
    database: Database,
    old: Database,
    pg_bin: Path,
) -> None:
    assert difference(objects(old_conn), objects(conn)) != []
    update_extension(old_conn)
    assert difference(catalog(conn), at_home(catalog(old_conn))) == []
    assert difference(members(conn), members(old_conn)) == []
    # Rights that the script gave to itself would be left out of a dump, so compare dumps.
    fresh, updated = (dump_of_schema(d, pg_bin) for d in (database, old))
    assert sum("awa_upgrade_worker" in line for line in fresh) > 10
    assert difference(fresh, updated) == []


def without_roles(lines: list[str]) -> list[str]:
    return sorted(re.sub(r"\w*=(\w+)/\w+", r"=\1", line) for line in lines)


def dump_of_schema(database: Database, pg_bin: Path) -> list[str]:
    command = [str(pg_bin / "pg_dump"), "--schema-only", "-d", database.dsn]
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line for line in dump.splitlines() if not re.match(r"\\(un)?restrict ", line)]


def test_b24_a_role_without_superuser_updates_the_trusted_extension(
    conn: psycopg.Connection, empty_database: Database
) -> None:
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        plain.execute(f"CREATE EXTENSION awa VERSION '{OLD}'")
        update_extension(plain)
        plain.execute("RESET SESSION AUTHORIZATION")
        assert difference(catalog(conn), at_home(catalog(plain))) == []
        # Only who gave the rights is another.
        fresh, updated = (without_roles(members(c)) for c in (conn, plain))
        assert difference(fresh, updated) == []


def test_b24_plain_schemas_are_upgraded_one_by_one(
    conn: psycopg.Connection, empty_database: Database
) -> None:
    wanted = catalog(conn)
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        for schema in ("awa", "tenant_7"):
            install_old(plain, schema)
        assert upgrade(plain, schema="tenant_7") == Upgrade(
            "tenant_7", OLD, awa.__version__, extension=False
        )
        assert version(plain) == OLD
        assert upgrade(plain).upgraded
        assert not upgrade(plain).upgraded
        for schema in ("awa", "tenant_7"):
            assert difference(wanted, at_home(catalog(plain, schema))) == []


def test_b24_what_is_new_belongs_to_the_owner_whoever_upgrades(
    conn: psycopg.Connection, empty_database: Database
) -> None:
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        plain.execute("RESET SESSION AUTHORIZATION")
        install_old(plain, "awa")
        plain.execute(f"SELECT awa.set_owner('{OWNER}')")
        plain.execute("CREATE ROLE awa_upgrade_other")
        plain.execute("SET SESSION AUTHORIZATION awa_upgrade_other")
        with pytest.raises(InstallError, match="may not change what is in schema") as refused:
            upgrade(plain)
        assert OWNER in refused.value.hint
        plain.execute("RESET SESSION AUTHORIZATION")
        plain.execute("DROP ROLE awa_upgrade_other")
        assert upgrade(plain).upgraded
        assert difference(catalog(conn), at_home(catalog(plain))) == []


def test_b24_pg_tle_is_given_the_upgrade_script_as_it_is(
    conn: psycopg.Connection,
    empty_database: Database,
    server_version: int,
    open_folder: Path,
) -> None:
    """Where the server can look into a folder, as an extension with the control file of pg_tle."""
    name = f"awa--{OLD}--{awa.__version__}.sql"
    script = (BUILD / f"pgtle-{name.replace('--', '-', 1)}").read_bytes()
    with empty_database.connect() as plain:
        become_owner(plain, empty_database)
        plain.execute(PGTLE)
        plain.execute(script)
        [[call]] = plain.execute("SELECT to_jsonb(u) FROM pgtle.updates u").fetchall()
        text = (BUILD / name).read_text()
        assert call == {"name": "awa", "fromvers": OLD, "tovers": awa.__version__, "ext": text}
        defaults = plain.execute("SELECT * FROM pgtle.defaults").fetchall()
        assert defaults == [("awa", awa.__version__)]
        plain.execute("DROP SCHEMA pgtle CASCADE")
        if server_version < 18:
            return
        folder = open_folder / "extension"
        folder.mkdir()
        (folder / "awa.control").write_text(
            f"default_version = '{awa.__version__}'\n"
            "relocatable = false\nsuperuser = false\ntrusted = false\n"
        )
        (folder / f"awa--{OLD}.sql").write_bytes((RELEASED / f"awa--{OLD}.sql").read_bytes())
        (folder / name).write_text(call["ext"])
        plain.execute("RESET SESSION AUTHORIZATION")
        plain.execute("SELECT set_config('extension_control_path', %s, false)", [str(open_folder)])
        plain.execute(f"SET SESSION AUTHORIZATION {OWNER}")
        plain.execute("CREATE SCHEMA awa")
        plain.execute(f"CREATE EXTENSION awa SCHEMA awa VERSION '{OLD}'")
        update_extension(plain)
        assert difference(catalog(conn), at_home(catalog(plain))) == []


def test_b24_public_signatures_only_grow(
    conn: psycopg.Connection, old_conn: psycopg.Connection
) -> None:
    before, now = manifest(old_conn), manifest(conn)
    assert before.keys() == now.keys()
    for name, function in before["functions"].items():
        after = now["functions"][name]
        assert (after["arguments"], after["returns"]) == (
            function["arguments"],
            function["returns"],
        )
        assert set(function["capabilities"]) <= set(after["capabilities"])
    for kind in ("types", "enums", "views"):
        for name, parts in before[kind].items():
            assert now[kind][name][: len(parts)] == parts
    assert before["errors"].items() <= now["errors"].items()


def test_b24_functions_that_old_bodies_call_are_still_there(
    conn: psycopg.Connection, old_conn: psycopg.Connection
) -> None:
    before, now = function_results(old_conn), function_results(conn)
    assert {name for name in before if before[name] != now.get(name)} == GONE


def function_results(conn: psycopg.Connection) -> dict[str, str]:
    """The result type of each function, by its name and arguments."""
    rows = conn.execute(
        """
        SELECT p.oid::regprocedure::text, pg_get_function_result(p.oid) FROM pg_proc p
        WHERE p.pronamespace = 'awa'::regnamespace
        """
    )
    return {row[0]: row[1] for row in rows.fetchall()}


# Under load


def strong_locks(conn: psycopg.Connection, holder: psycopg.Connection) -> list[tuple[str, str]]:
    """What a transaction has locked against readers or writers, of relations others can see."""
    return conn.execute(
        """
        SELECT c.relname, l.mode FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
        WHERE l.pid = %s AND c.relnamespace = 'awa'::regnamespace
          AND l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                         'AccessExclusiveLock')
        ORDER BY 1
        """,
        [holder.info.backend_pid],
    ).fetchall()


def test_b24_an_update_waits_for_open_producers_and_holds_up_nobody_else(old: Database) -> None:
    """Jobs in every state; an update that is held open at its end, where it has all its locks."""
    with (
        old.connect() as conn,
        old.connect(autocommit=False) as updater,
        old.connect(autocommit=False) as producer,
    ):
        kept = job_in_every_state(conn)
        conn.execute(USER_OBJECTS)
        before, jobs = all_counts(conn), all_jobs(conn)
        greeted = value(conn, "SELECT (public.greet('before')).job_id")
        producer.execute("SELECT awa.insert_job('k', queue => 'open')")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            update_extension(updater)
        updater.rollback()
        assert version(conn) != awa.__version__
        producer.commit()
        during = [insert(conn, "during"), insert(conn, "during", opts={"delay_seconds": 0.001})]
        update_extension(updater)
        views = {"jobs", "terminal_jobs", "dlq", "queues", "instances", "settings", "job_inbox"}
        locked = {name for name, _ in strong_locks(conn, updater)} - views
        assert {n for n in locked if not n.startswith(("doorbell_", "deferred_"))} == {
            n for n in locked if n.endswith(CLOCKS)
        } - {n for n in locked if n.startswith("deferred_")}
        # Who claims and completes meets none of these.
        conn.execute("SET lock_timeout = '1s'")
        conn.execute("SELECT awa.heartbeat('00000000-0000-4000-8000-000000000001')")
        claimed = claim_all(conn, "during")
        assert set(complete(conn, claimed)) == {"done"}
        assert len(claimed) == 1
        said = tick(conn)
        assert set(said.values()) == {"contended"}, said
        updater.commit()
        conn.execute("RESET lock_timeout")
        # Where it was, and on from there.
        assert version(conn) == awa.__version__
        assert all_counts(conn) == before
        assert all_jobs_of(conn, jobs) == jobs
        assert value(conn, "SELECT job_id FROM waiting WHERE kind = 'greet'") == greeted
        conn.execute("SELECT public.greet('after')")
        assert conn.execute("SELECT public.states()").rowcount == 8
        assert counts(conn, "greetings") == {"available": 2}
        tick(conn, "promote")
        claimed = claim_all(conn, "during") + claim_all(conn, "open")
        assert set(complete(conn, claimed)) == {"done"}
        assert counts(conn, "during") == {"completed": len(during)}
        assert counts(conn, "open") == {"completed": 1}
        # The rows are at home: there is no need to read them all.
        at_home = """SELECT rows FROM awa.tick('{"steps": ["verify"]}')"""
        assert value(conn, at_home) == 0
        check_that_all_goes_on(conn, kept)


def all_jobs_of(conn: psycopg.Connection, jobs: list[str]) -> list[str]:
    """All jobs of the queues that a list of jobs has."""
    queues = {json.loads(job)["queue"] for job in jobs}
    return [job for job in all_jobs(conn) if json.loads(job)["queue"] in queues]


def test_b24_a_call_under_way_goes_on_through_an_update(old: Database) -> None:
    """The order of a strict queue makes an insert wait inside a function while the code changes."""
    with old.connect() as conn, old.connect(autocommit=False) as holder, old.connect() as producer:
        wanted = insert(conn)
        lane = value(conn, "SELECT lane_id FROM awa.queue_lanes WHERE queue = 'default'")
        holder.execute("SELECT pg_advisory_xact_lock(awa._lock_key('fifo', %s))", [lane])
        conn.execute("SELECT awa.declare_queue('default', '{\"strict_fifo\": true}')")
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(insert(producer)))
        thread.start()
        wait_until_blocked(conn, producer)
        update_extension(conn)
        holder.rollback()
        thread.join(20)
        assert len(answers) == 1
        claimed = claim_all(conn)
        assert [a.job_id for a in claimed] == [wanted, *answers]
        assert set(complete(conn, claimed)) == {"done"}


@pytest.fixture(scope="session")
def old_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released Python package, from the history of this repository."""
    folder = tmp_path_factory.mktemp("old")
    command = ["git", "archive", OLD_COMMIT, "python/src"]
    archive = subprocess.run(command, cwd=REPO, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"the history of this clone does not have {OLD_COMMIT}")
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder / "python/src"


WORKER_SCRIPT = """
import asyncio, sys
import psycopg, awa
dsn, mark = sys.argv[1:]
handlers = awa.Handlers()

@handlers.task()
async def note(job: awa.Job, n: int) -> None:
    conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    async with conn:
        await conn.execute("INSERT INTO runs VALUES (%s, %s, %s)", [n, job.attempt, mark])

print(awa.__version__, flush=True)
sys.exit(awa.run(handlers, dsn=dsn, queues={"default": 4, "other": 4}))
"""


@contextlib.contextmanager
def worker(database: Database, package: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker process of one version, ended by SIGTERM; it must then end well, without a word."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER_SCRIPT, database.dsn, log.stem],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with process:
        try:
            yield process
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    assert log.read_text() == ""


def test_b24_workers_and_producers_go_on_through_an_upgrade(
    old: Database, old_package: Path, tmp_path: Path
) -> None:
    """Workers of the old version run on, one of the new version comes; each job runs once."""
    stop, seconds, inserted = threading.Event(), 30.0, [0]

    def produce() -> None:
        with old.connect() as conn:
            conn.execute("SET lock_timeout = '2s'")
            while not stop.wait(0.01):
                queue = ("default", "other")[inserted[0] % 2]
                delay = {"delay_seconds": 0.1} if inserted[0] % 5 == 0 else {}
                insert(conn, queue, kind="note", args=json.dumps({"n": inserted[0]}), opts=delay)
                inserted[0] += 1

    with old.connect() as conn:
        conn.execute("CREATE TABLE runs (n integer, attempt integer, mark text)")
        producer = threading.Thread(target=produce)
        with contextlib.ExitStack() as stack:
            for number in range(2):
                process = stack.enter_context(worker(old, old_package, tmp_path / f"old{number}"))
                assert process.stdout
                assert process.stdout.readline() == f"{OLD}\n"
            producer.start()
            stack.callback(producer.join)
            stack.callback(stop.set)
            until(conn, "SELECT count(DISTINCT mark) = 2 FROM runs", seconds)
            with old.connect() as other:
                assert upgrade(other).upgraded
            so_far = value(conn, "SELECT max(n) FROM runs")
            stack.enter_context(worker(old, REPO / "python/src", tmp_path / "new"))
            until(conn, "SELECT count(DISTINCT mark) = 3 FROM runs", seconds)
            # The old ones work on after the upgrade.
            until(
                conn,
                "SELECT count(DISTINCT mark) = 2 FROM runs WHERE n > %s AND mark <> 'new'",
                seconds,
                so_far + 10,
            )
            stop.set()
            producer.join()
            until(conn, "SELECT count(*) = %s FROM runs", seconds, inserted[0])
            until(conn, "SELECT count(*) = 0 FROM awa.jobs WHERE state <> 'completed'", seconds)
        runs = conn.execute("SELECT n, attempt FROM runs").fetchall()
        assert Counter(runs) == Counter((n, 1) for n in range(inserted[0]))


def until(conn: psycopg.Connection, query: str, seconds: float, *parameters: object) -> None:
    """Wait until a query answers true."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    try:
        while not value(conn, query, *parameters):
            assert not stop.wait(0.02), f"after {seconds} s still not: {query}"
    finally:
        timer.cancel()


# All or nothing


def test_b24_an_upgrade_that_fails_changes_nothing_and_is_run_again(
    old: Database, old_conn: psycopg.Connection
) -> None:
    before = catalog(old_conn) + members(old_conn)
    with old.connect(autocommit=False) as reader, old.connect() as conn:
        reader.execute("SET idle_in_transaction_session_timeout = '20s'")
        reader.execute("SELECT FROM awa.settings")
        with pytest.raises(InstallError, match="waits in vain") as failed:
            upgrade(conn, patience=0)
        assert failed.value.hint.startswith("Nothing was changed")
        # What the script has set to wait for a moment only is as it was.
        assert value(conn, "SHOW lock_timeout") == "0"
        with pytest.raises(psycopg.errors.LockNotAvailable):
            update_extension(conn)
        assert difference(before, catalog(old_conn) + members(old_conn)) == []
        answers: list[Upgrade] = []
        thread = threading.Thread(target=lambda: answers.append(upgrade(conn)))
        thread.start()
        blockers = wait_until_blocked(old_conn, conn)
        assert blockers == [reader.info.backend_pid]
        reader.rollback()
        thread.join(30)
    assert [answer.upgraded for answer in answers] == [True]


def test_b24_two_upgrades_at_once_take_turns(old: Database, old_conn: psycopg.Connection) -> None:
    with (
        old.connect(autocommit=False) as first,
        old.connect() as second,
        old.connect() as third,
    ):
        update_extension(first)
        answers: list[Upgrade] = []
        thread = threading.Thread(target=lambda: answers.append(upgrade(second)))
        thread.start()
        assert wait_until_blocked(old_conn, second) == [first.info.backend_pid]
        # By hand one waits for the row of the extension, before any script runs.
        third.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            update_extension(third)
        first.commit()
        thread.join(30)
    assert answers == [Upgrade("awa", awa.__version__, awa.__version__, extension=True)]
    script = (BUILD / f"awa--{OLD}--{awa.__version__}.sql").read_text()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="upgrade is for") as late:
        old_conn.execute(script.replace("@extschema@", "awa").encode())
    assert late.value.diag.message_hint


TWENTY = """
import os, sys
from awa.cli import main
for number in range(20):
    if os.fork() == 0:
        main(["install", "--json"])
sys.exit(any([os.wait()[1] for number in range(20)]))
"""


def test_b24_twenty_installations_at_once(empty_database: Database) -> None:
    """Whatever the database's defaults are."""
    with empty_database.connect() as conn:
        for setting in ("default_transaction_isolation = 'serializable'", "lock_timeout = 10"):
            conn.execute(f"ALTER DATABASE {empty_database.name} SET {setting}")
    said = command(empty_database, "-c", TWENTY)
    assert said.returncode == 0, said.stderr
    assert Counter(re.findall(r'"installed": (\w+)', said.stdout)) == {"true": 1, "false": 19}
    with empty_database.connect() as conn:
        conn.execute("SET default_transaction_isolation = 'read committed'")
        insert(conn)
        assert complete(conn, claim(conn)) == ["done"]


def command(database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What Python says with a database to work on."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "AWA_DSN": database.dsn},
        capture_output=True,
        text=True,
        check=False,
    )


# Versions that do not fit


def test_b24_an_old_schema_is_refused_with_the_way_out(old: Database) -> None:
    with old.connect() as conn, pytest.raises(InstallError, match=f"holds version {OLD}") as found:
        install(conn)
    assert found.value.hint == "Run `awa upgrade`."
    with pytest.raises(awa.VersionMismatch, match="has number 1, this client needs") as refused:
        awa.run({"k": lambda: None}, dsn=old.dsn)
    assert refused.value.hint == "Upgrade it: awa upgrade, or ALTER EXTENSION awa UPDATE."
    jobs = command(old, "-m", "awa", "jobs")
    assert (jobs.returncode, jobs.stdout) == (1, "")
    assert "hint: Upgrade it: awa upgrade" in jobs.stderr
    done = command(old, "-m", "awa", "upgrade")
    versions = f"from version {OLD} to {awa.__version__}"
    assert done.stdout == f'upgraded schema "awa" {versions}, by ALTER EXTENSION\n', done.stderr
    done = command(old, "-m", "awa", "upgrade")
    assert done.stdout == f'schema "awa" has version {awa.__version__} already\n'


def test_b24_an_upgrade_says_what_is_in_its_way(
    old_conn: psycopg.Connection, conn: psycopg.Connection, empty_database: Database
) -> None:
    with empty_database.connect() as plain:
        with pytest.raises(InstallError, match="not installed") as nothing:
            upgrade(plain)
        assert nothing.value.hint == "Run `awa install`."
        install_old(plain, "awa")
        plain.execute(
            "CREATE OR REPLACE FUNCTION awa.version() RETURNS text LANGUAGE sql RETURN '0.0.9'"
        )
        with pytest.raises(InstallError, match=r"no way leads from the installed version 0\.0\.9"):
            upgrade(plain)
        plain.execute(
            "CREATE OR REPLACE FUNCTION awa.version() RETURNS text LANGUAGE sql RETURN '99.0.0'"
        )
        with pytest.raises(InstallError, match=r"version 99\.0\.0") as newer:
            upgrade(plain)
        assert newer.value.hint == "Use a package that is newer."
