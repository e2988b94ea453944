"""A dump holds every job, and after restore and verify() each continues where it was (G1)."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo

from conftest import TEMPLATE_SCRIPT, Database, DatabaseServer
from engine import (
    PRUNE_AT_ONCE,
    SCRIPT,
    Attempt,
    claim,
    claim_all,
    complete,
    counts,
    finish,
    grants,
    insert,
    insert_many,
    install_plain,
    open_transaction,
    prune_all,
    rotate,
    set_settings,
    tick,
    value,
)
from tools.servers import VERSIONS, Cluster, ensure_tree, free_port

SUPERUSER, OWNER = "postgres", "awa_dump_owner"
QUEUES = ("default", "dead", "paused", "sharded")


@dataclass
class Kept:
    """What the test remembers of the database that is dumped."""

    running: list[Attempt] = field(default_factory=list)
    leased: int = 0
    numbers: dict[str, int] = field(default_factory=dict)


def job_in_every_state(conn: psycopg.Connection) -> Kept:
    """Bring jobs into every state, over several generations of both rings."""
    kept = Kept()
    conn.execute("SELECT awa.declare_queue('dead', '{\"dlq\": true}')")
    conn.execute("SELECT awa.declare_queue('sharded', '{\"enqueue_shards\": 4}')")
    # A generation that is pruned, so that counts and claim heads live in their own tables only.
    insert_many(conn, 10)
    complete(conn, claim(conn))
    for ring in ("queue", "claim"):
        rotate(conn, ring)
        assert prune_all(conn, ring) == 1
    set_settings(conn, terminal_retention_seconds=86400, attempt_evidence_seconds=86400)
    for _ in range(3):
        insert_many(conn, 20)
        insert_many(conn, 5, "sharded")
        attempts = claim(conn, limit=12)
        outcomes = ("cancel", "fail", "retry", "snooze", "released")
        complete(conn, attempts[5:])
        items = [
            attempt.item(outcome, delay_seconds=86400, error="on purpose")
            for attempt, outcome in zip(attempts, outcomes, strict=False)
        ]
        assert set(finish(conn, items)) == {"done"}
        for ring in ("queue", "claim"):
            rotate(conn, ring)
    insert_many(conn, 3, "dead")
    finish(conn, [a.item("fail", error="dead") for a in claim(conn, "dead", limit=2)])
    kept.leased = insert(conn, "sharded", opts={"ordering_key": "a"})
    [attempt] = [a for a in claim_all(conn, "sharded") if a.job_id == kept.leased]
    finish(conn, [attempt.item("retry", delay_seconds=0)])
    assert tick(conn, "promote") == {"promote": "done"}
    insert(conn, "paused")
    conn.execute("SELECT awa.pause_queue('paused')")
    insert(conn, run_at="2999-01-01Z", opts={"tags": ["late"]})
    # A job in each leaf of the deferred ones; in which one it lies decides nothing.
    for slot in range(17):
        late = insert(conn, run_at="2999-01-01Z")
        conn.execute("UPDATE awa.deferred_jobs SET slot = %s WHERE job_id = %s", [slot, late])
    waiting = insert(conn)
    conn.execute("SELECT awa.cancel_job(%s)", [waiting])
    result = insert(conn, "dead", opts={"keep_result": True})
    finish(conn, [a.item("completed", result={"is": 42}) for a in claim(conn, "dead", limit=1)])
    assert result
    # Gaps, with a horizon of this cluster; a deadline; progress.
    for _ in range(2):
        with conn.transaction(force_rollback=True):
            insert_many(conn, 3)
        insert_many(conn, 2)
    kept.running = claim(conn, limit=25) + claim(conn, limit=4, deadline_seconds=3600)
    conn.execute(
        "SELECT awa.set_progress(%s, %s, %s, %s, %s, '{\"half\": true}')", kept.running[-1].token
    )
    conn.execute("SELECT awa.heartbeat(%s)", [uuid.uuid4()])
    kept.numbers = numbers(conn)
    return kept


def numbers(conn: psycopg.Connection) -> dict[str, int]:
    """The highest batch id and positions ever given out."""
    lanes = conn.execute("SELECT lane_id FROM awa.queue_lanes").fetchall()
    names = ["claim_batch_ids", "job_ids", "lane_ids", *(f"lane_{lane}" for (lane,) in lanes)]
    last = "SELECT last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM awa.{}"
    return {name: value(conn, last.format(name)) for name in names}


def contents(conn: psycopg.Connection, kinds: str = "rS") -> dict[str, list[str]]:
    """Rows of every table and the state of every sequence, or of the one kind alone."""
    relations = conn.execute(
        "SELECT c.relname, c.relkind FROM pg_class c"
        " WHERE c.relnamespace = 'awa'::regnamespace AND strpos(%s, c.relkind::text) > 0",
        [kinds],
    ).fetchall()
    found = {}
    for name, kind in relations:
        columns = "t::text" if kind == "r" else "(last_value, is_called)::text"
        rows = conn.execute(f"SELECT {columns} FROM awa.{name} t ORDER BY 1").fetchall()
        found[name] = [row for (row,) in rows]
    return found


def all_counts(conn: psycopg.Connection) -> dict[str, dict[str, int]]:
    return {queue: counts(conn, queue) for queue in QUEUES}


def all_jobs(conn: psycopg.Connection) -> list[str]:
    rows = conn.execute(
        "SELECT to_jsonb(j)::text FROM awa.jobs j ORDER BY job_id, state"
    ).fetchall()
    return [row for (row,) in rows]


@dataclass(frozen=True, slots=True)
class Way:
    """How a database is dumped and restored."""

    packaging: str
    form: str = "custom"
    role: str = SUPERUSER
    elsewhere: bool = False

    @property
    def name(self) -> str:
        where = "elsewhere" if self.elsewhere else "here"
        return f"{self.packaging}-{self.form}-{self.role}-{where}"


# Every packaging, form, role and place; elsewhere is a server of the newest version whose
# transaction ids are lower.
WAYS = (
    Way("extension"),
    Way("plain", "script", OWNER),
    Way("extension", "apart", OWNER),
    Way("extension", "parallel", elsewhere=True),
    Way("plain", "custom", OWNER, elsewhere=True),
)
# Pairs of dump and restore; what psql restores has no restore.
FORMS: dict[str, list[tuple[list[str], list[str] | None]]] = {
    "custom": [(["-Fc"], [])],
    "script": [(["-Fp"], None)],
    "parallel": [(["-Fd", "-j2"], ["-j2"])],
    "apart": [(["-Fc", "--schema-only"], []), (["-Fc", "--data-only"], ["--data-only"])],
}


def become(conn: psycopg.Connection, database: Database, role: str) -> Database:
    """Give a database to a role; return it as the role sees it."""
    if value(conn, "SELECT to_regrole(%s) IS NULL", role):
        conn.execute(f"CREATE ROLE {role} LOGIN")
    conn.execute(f"ALTER DATABASE {database.name} OWNER TO {role}")
    return Database(database.name, make_conninfo(database.dsn, user=role))


@contextmanager
def source_database(server: DatabaseServer, way: Way) -> Iterator[Database]:
    """A database into which the role has installed the engine."""
    with server.fresh() as fresh:
        database = become(server.admin, fresh, way.role)
        with database.connect() as conn:
            if way.role == SUPERUSER and way.packaging == "extension":
                conn.execute(TEMPLATE_SCRIPT.read_bytes())
            elif way.role == SUPERUSER:
                install_plain(conn)
            elif way.packaging == "extension":
                conn.execute("CREATE EXTENSION awa")
            else:
                conn.execute("CREATE SCHEMA awa")
                conn.execute(SCRIPT.read_text().replace("@extschema@", "awa").encode())
        yield database


@contextmanager
def target_database(
    server: DatabaseServer, way: Way
) -> Iterator[tuple[Database, Mapping[str, str]]]:
    """An empty database of the role, and the environment of its server."""
    if not way.elsewhere:
        with server.fresh() as fresh:
            yield become(server.admin, fresh, way.role), os.environ
        return
    with Cluster(ensure_tree(VERSIONS[-1])) as cluster:
        database = Database("postgres", cluster.dsn)
        with database.connect() as conn:
            conn.execute("CREATE ROLE awa_owner NOLOGIN")
            yield become(conn, database, way.role), cluster.environment


def copy(
    source: Database,
    target: Database,
    folder: Path,
    form: str = "custom",
    programs: Mapping[str, str] = os.environ,
) -> None:
    """Dump one database by the programs of its server, and restore it by those of the other."""
    dump: list[str | Path] = [Path(os.environ["AWA_PG_BIN"]) / "pg_dump", "-d", source.dsn]
    folder_of_new = Path(programs["AWA_PG_BIN"])
    for number, (how, restores) in enumerate(FORMS[form]):
        file = folder / f"dump{number}"
        restore: list[str | Path] = [
            folder_of_new / "pg_restore",
            "--exit-on-error",
            *(restores or []),
        ]
        if restores is None:
            restore = [folder_of_new / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-f"]
        commands = [
            ([*dump, *how, "-f", file], os.environ),
            ([*restore, file, "-d", target.dsn], programs),
        ]
        for command, env in commands:
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            assert done.returncode == 0, done.stderr


def owners(conn: psycopg.Connection) -> set[tuple[str, str]]:
    """The owner of the schema and of everything in it."""
    catalogs = {"pg_class": "rel", "pg_proc": "pro", "pg_type": "typ"}
    query = "SELECT 'schema', nspowner::regrole::text FROM pg_namespace WHERE nspname = 'awa'"
    for catalog, prefix in catalogs.items():
        query += f""" UNION ALL SELECT {prefix}name, {prefix}owner::regrole::text FROM {catalog}
                      WHERE {prefix}namespace = 'awa'::regnamespace"""
    rows = conn.execute(query.encode()).fetchall()
    return {(row[0], row[1]) for row in rows}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_jobs_continue_after_dump_and_restore(
    server: DatabaseServer, way: Way, tmp_path: Path
) -> None:
    with source_database(server, way) as source, target_database(server, way) as (target, programs):
        with source.connect() as conn:
            kept = job_in_every_state(conn)
            before, jobs, state, owned = (
                contents(conn),
                all_jobs(conn),
                all_counts(conn),
                owners(conn),
            )
        check_that_nothing_is_empty(before)
        copy(source, target, tmp_path, way.form, programs)
        with target.connect() as conn:
            after = contents(conn)
            assert {name for name in before if before[name] != after.get(name)} == set()
            assert set(after) == set(before)
            assert owners(conn) == owned
            # Whoever comes first, a tick or an operator.
            if way.elsewhere:
                assert tick(conn, "verify") == {"verify": "done"}
            else:
                steps = conn.execute("SELECT step, outcome FROM awa.verify()").fetchall()
                assert {outcome for _, outcome in steps} == {"done"}
            assert all_counts(conn) == state
            assert all_jobs(conn) == jobs
            check_that_all_goes_on(conn, kept)


def check_that_nothing_is_empty(before: Mapping[str, list[str]]) -> None:
    """Fail where a table that a dump must hold has no row to show it."""
    filled = {name.rstrip("0123456789") for name, rows in before.items() if rows}
    families = {"ready_entries_", "done_entries_", "lease_claim_batches_", "lease_claim_closures_"}
    families |= {"ready_tombstones_", "ready_claim_attempt_batches_", "attempt_state"}
    families |= {"receipt_completion_batches_", "deferred_jobs_", "dlq_entries", "queue_meta"}
    families |= {"queue_claim_heads", "queue_terminal_rollups", "setting_overrides"}
    families |= {"queue_ring_rotations", "claim_ring_rotations", "runtime_instances"}
    assert families <= filled
    assert all(before[f"deferred_jobs_{slot}"] for slot in range(17))


class Upgraded(Cluster):
    """The newest version, with the data of another server that pg_upgrade has brought over."""

    def __init__(self, old: Cluster) -> None:
        super().__init__(ensure_tree(VERSIONS[-1]))
        self.old = old

    def _make_data(self) -> Sequence[str]:
        data, old_data = self.directory / "data", self.old.directory / "data"
        # What a version does by itself, the other may not know: checksums came on with 18.
        without = ["--no-data-checksums"] if self.old.tree.version < 18 else []
        assert self._spawn([*super()._make_data(), *without, "-D", str(data)]).wait() == 0
        ports = ("-p", str(free_port()), "-P", str(free_port()))
        bins = ("-b", str(self.old.tree.bin), "-d", str(old_data), "-U", "postgres")
        return ("pg_upgrade", *bins, *ports)


def test_jobs_continue_after_pg_upgrade(server_version: int) -> None:
    with Cluster(ensure_tree(server_version)) as old:
        with psycopg.connect(old.dsn, autocommit=True) as conn:
            conn.execute(TEMPLATE_SCRIPT.read_bytes())
            newer = "SELECT count(*) FROM pg_attribute WHERE attoptions::text LIKE '%%pg_attver%%'"
            if server_version < 18 and value(conn, newer):
                pytest.skip("skipped because 18.6 does not know the option pg_attver of 15.20")
            kept = job_in_every_state(conn)
            before, jobs, state, owned = (
                contents(conn),
                all_jobs(conn),
                all_counts(conn),
                owners(conn),
            )
        old.shut_down()
        with Upgraded(old) as new, psycopg.connect(new.dsn, autocommit=True) as conn:
            assert "Upgrade Complete" in (log := new.log_file.read_text(errors="replace")), log
            after = contents(conn)
            assert {name for name in before if before[name] != after.get(name)} == set()
            assert owners(conn) == owned
            assert tick(conn, "verify") == {"verify": "done"}
            assert (all_counts(conn), all_jobs(conn)) == (state, jobs)
            check_that_all_goes_on(conn, kept)


@pytest.mark.parametrize("packaging", ["extension", "plain"])
def test_verify_repairs_sequences_that_lag_behind_their_rows(
    server: DatabaseServer, packaging: str, tmp_path: Path
) -> None:
    way = Way(packaging)
    with source_database(server, way) as source, target_database(server, way) as (target, programs):
        with source.connect() as conn:
            kept = job_in_every_state(conn)
            state = all_counts(conn)
        copy(source, target, tmp_path, way.form, programs)
        with target.connect() as conn:
            # As a copy whose sequences are from an earlier moment than its rows.
            for name in kept.numbers:
                least = "SELECT seqmin FROM pg_sequence WHERE seqrelid = %s::regclass"
                conn.execute(f"SELECT setval(%s, ({least}))", [f"awa.{name}"] * 2)
            conn.execute("SELECT setval('awa.queue_ring', 0), setval('awa.claim_ring', 0)")
            conn.execute("SELECT awa.verify()")
            assert all_counts(conn) == state
            check_that_all_goes_on(conn, kept)


@pytest.mark.parametrize("packaging", ["extension", "plain"])
def test_grants_survive_dump_and_restore(
    server: DatabaseServer, packaging: str, tmp_path: Path
) -> None:
    capabilities = ("producer", "worker", "operator", "reader")
    names = {capability: f"awa_{capability}_{uuid.uuid4().hex[:12]}" for capability in capabilities}
    way = Way(packaging)
    with source_database(server, way) as source, target_database(server, way) as (target, programs):
        with source.connect() as conn:
            for capability, name in names.items():
                conn.execute(
                    f"CREATE ROLE {name}; SELECT awa.grant_{capability}('{name}')".encode()
                )
            insert(conn)
            before = grants(conn)
            assert {role for _, _, role, _ in before} == set(names.values())
        copy(source, target, tmp_path, way.form, programs)
        with target.connect() as conn:
            # The rights of the types of rows, which no dump holds.
            conn.execute("SELECT awa.set_owner('awa_owner')")
            assert grants(conn) == before
            for name in names.values():
                conn.execute(f"DROP OWNED BY {name}".encode())
        with source.connect() as conn:
            for name in names.values():
                conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def check_that_all_goes_on(conn: psycopg.Connection, kept: Kept) -> None:
    """Open receipts end by their tokens, waiting jobs run, and no number is used twice."""
    state = all_counts(conn)
    info = value(conn, "SELECT to_jsonb(awa.job(%s))", kept.running[-1].job_id)
    assert (info["state"], info["progress"]) == ("running", {"half": True})
    assert set(complete(conn, kept.running[:-1])) == {"done"}
    assert finish(conn, [kept.running[-1].item("completed")]) == ["done"]
    assert finish(conn, [kept.running[-1].item("fail")]) == ["stale"]
    fresh = insert_many(conn, 5) + [insert(conn, queue) for queue in ("sharded", "dead")]
    later = insert(conn, opts={"delay_seconds": 3600})
    known = {job_id for (job_id,) in conn.execute("SELECT job_id FROM awa.jobs").fetchall()}
    assert len(known & {*fresh, later}) == len(fresh) + 1
    assert later > kept.numbers["job_ids"]
    conn.execute("SELECT awa.resume_queue('paused')")
    claimed = {queue: claim_all(conn, queue) for queue in QUEUES}
    attempts = [attempt for found in claimed.values() for attempt in found]
    assert {queue: len(found) for queue, found in claimed.items()} == {
        queue: state[queue].get("available", 0) + {"default": 5, "paused": 0}.get(queue, 1)
        for queue in QUEUES
    }
    assert set(fresh) <= {attempt.job_id for attempt in attempts}
    assert [a.run_lease for a in attempts if a.job_id == kept.leased] == [2]
    assert min(attempt.batch_id for attempt in attempts) > kept.numbers["claim_batch_ids"]
    positions = [attempt.position for attempt in attempts]
    assert len({*positions, *(a.position for a in kept.running)}) == len(positions) + len(
        kept.running
    )
    for job_id in fresh:
        assert job_id > kept.numbers.get(f"lane_{job_id >> 42}", 0)
    assert set(complete(conn, attempts)) == {"done"}
    done = {queue: counts(conn, queue).get("completed", 0) for queue in QUEUES}
    assert done == {
        queue: state[queue].get("completed", 0)
        + len(claimed[queue])
        + (len(kept.running) if queue == "default" else 0)
        for queue in QUEUES
    }
    dead = value(conn, "SELECT job_id FROM awa.dlq LIMIT 1")
    row = conn.execute("SELECT * FROM awa.retry_dlq(%s)", [dead]).fetchone()
    assert row
    [again] = claim_all(conn, "dead")
    assert (again.job_id, again.attempt, again.run_lease) == (dead, 1, 2)
    rotate(conn)
    rotate(conn, "claim")
    assert "failed" not in tick(conn).values()


def fill_old_slots(conn: psycopg.Connection) -> list[Attempt]:
    """Leave jobs that wait, and attempts that run, in slots that are so old that they must move."""
    insert_many(conn, 5, "paused")
    conn.execute("SELECT awa.pause_queue('paused')")
    insert_many(conn, 6)
    attempts = claim(conn)
    insert_many(conn, 3)
    for ring, turns in (("queue", 13), ("claim", 6)):
        for _ in range(turns):
            rotate(conn, ring)
            insert(conn, "busy")
            complete(conn, claim_all(conn, "busy"))
    return attempts


# Broken by a prune that does not wait (_is_past_dumps is true), or does not look whether its slot
# was released (_prune_slot): the snapshot finds jobs in no place.
def test_g1_a_dump_finds_what_left_its_slot_before_it_had_its_locks(
    database: Database, conn: psycopg.Connection
) -> None:
    set_settings(conn, **{**PRUNE_AT_ONCE, "dump_lock_seconds": 60})
    set_settings(conn, evacuate_attempt_seconds=0)
    attempts = fill_old_slots(conn)
    with open_transaction(database, IsolationLevel.REPEATABLE_READ) as dump:
        dump.execute("SELECT 1")  # its snapshot; its locks come with what it reads
        before = contents(conn, "r")
        # Whatever takes a job out of the slots where it waits or runs; one attempt runs on.
        outcomes = ("completed", "fail", "retry", "snooze", "cancel")
        ends = [a.item(o, delay_seconds=99) for a, o in zip(attempts, outcomes, strict=False)]
        assert finish(conn, ends) == ["done"] * 5
        complete(conn, claim_all(conn))
        moved = 0
        while tick(conn, "evacuate") == {"evacuate": "moved"}:
            moved += 1
        assert moved >= 2
        said: Counter[str] = Counter()
        for _ in range(20):
            said.update(
                f"{s} {o}"
                for s, o in (tick(conn, "prune_queue") | tick(conn, "prune_claim")).items()
            )
        assert contents(dump, "r") == before
        assert said["prune_queue released"] >= 13, said
        assert said["prune_claim released"] >= 6, said
    # A dump of now finds them where they are, so the slots go.
    set_settings(conn, dump_lock_seconds=0.01)
    assert [tick(conn, step)[step] for step in ("prune_queue", "prune_claim") * 3] == ["pruned"] * 6
