"""`awa conformance`: the example workers and awa's own pass, faulty ones are told their rule."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import awa
from awa.conformance import RULES, Verdict, run
from conftest import Database, DatabaseServer
from engine import WORKER, value
from faulty_worker import FAULTS

REPO = Path(__file__).parents[2]
WORKERS = REPO / "examples/workers"
NODE_MODULES = REPO / "build/node/node_modules"
AWA = Path(sys.executable).parent / "awa"
COMMANDS = {
    "awa": f"{AWA} worker awa.conformance.handlers:handlers -q conformance",
    "bash": "./worker.sh conformance.sh",
    "python": f"{sys.executable} worker.py conformance",
    "node": "node worker.js ./conformance.js",
}
FAULTY = Path(__file__).parent / "faulty_worker.py"
FAULT_SECONDS = 6  # what a faulty worker never does is waited for so long
OWN = {"W17", "W18"}  # what the examples leave out

Verdicts = dict[str, dict[str, str]]


def install_pg() -> None:
    """Fetch Node's `pg` into build/, once, also when both versions are tested side by side."""
    folder = NODE_MODULES.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (NODE_MODULES / "pg").is_dir():
            shutil.copy(WORKERS / "package.json", folder)
            npm = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
            subprocess.run(npm, cwd=folder, check=True)


def url_of(database: Database) -> str:
    given = conninfo_to_dict(database.dsn)
    return f"postgresql://{given['user']}@{given['host']}:{given['port']}/{given['dbname']}"


def environment(psql: Path) -> dict[str, str]:
    """What the example workers find their tools by."""
    path = f"{psql}:{os.environ['PATH']}"
    return {**os.environ, "NODE_PATH": str(NODE_MODULES), "PATH": path}


def check(command: str, database: Database, psql: Path) -> tuple[int, Verdicts]:
    url = url_of(database)
    done = subprocess.run(
        [AWA, "conformance", "--json", "--timeout", "40", "--dsn", url, "--worker", command],
        cwd=WORKERS,
        env=environment(psql),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, {verdict["rule"]: verdict for verdict in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def results(
    server: DatabaseServer, template: Database, pg_bin: Path
) -> Iterator[dict[str, tuple[int, Verdicts]]]:
    """Every worker's run, all at once: most of their time is waiting."""
    commands = dict(COMMANDS)
    if shutil.which("npm"):
        install_pg()
    else:
        del commands["node"]
    databases = {name: server.create(f"conformance_{name}", template.name) for name in commands}
    try:
        with ThreadPoolExecutor(len(commands)) as pool:
            runs = {
                name: pool.submit(check, command, databases[name], pg_bin)
                for name, command in commands.items()
            }
        yield {name: run.result() for name, run in runs.items()}
    finally:
        for database in databases.values():
            server.drop(database.name)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_worker_keeps_every_rule(results: dict[str, tuple[int, Verdicts]], name: str) -> None:
    if name not in results:
        pytest.skip("needs node and npm")
    code, verdicts = results[name]
    assert list(verdicts) == [rule.number for rule in RULES]
    answers = {number: verdict["answer"] for number, verdict in verdicts.items()}
    cannot = set() if name == "awa" else OWN
    expected = {number: "cannot" if number in cannot else "ok" for number in answers}
    assert answers == expected, verdicts
    assert code == 0


def judge(fault: str, database: Database) -> tuple[str, dict[str, Verdict]]:
    rule, _ = FAULTS[fault]
    command = shlex.join([sys.executable, str(FAULTY), fault])
    verdicts = run(database.dsn, command, timeout=FAULT_SECONDS, rules=[rule])
    return fault, {verdict.rule.number: verdict for verdict in verdicts}


@pytest.fixture(scope="module")
def faulty(server: DatabaseServer, template: Database) -> Iterator[dict[str, dict[str, Verdict]]]:
    """Every faulty worker's verdict on the rule that it breaks; most of the time is waiting."""
    databases = {
        fault: server.create(f"fault_{uuid.uuid4().hex[:12]}", template.name) for fault in FAULTS
    }
    try:
        with ThreadPoolExecutor(8) as pool:
            yield dict(pool.map(judge, databases, databases.values()))
    finally:
        for database in databases.values():
            server.drop(database.name)


def test_each_rule_has_a_worker_that_breaks_it() -> None:
    assert {rule for rule, _ in FAULTS.values()} == {rule.number for rule in RULES}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_worker_is_told_the_rule_it_breaks(
    faulty: dict[str, dict[str, Verdict]], fault: str
) -> None:
    rule, answer = FAULTS[fault]
    verdicts = faulty[fault]
    assert set(verdicts) == {"W1", rule}
    if rule != "W1":
        assert verdicts["W1"].answer == "ok"
    assert (verdicts[rule].answer, bool(verdicts[rule].detail)) == (answer, True)


def test_the_command_says_what_is_broken_and_ends_with_status_1(database: Database) -> None:
    worker = shlex.join([sys.executable, str(FAULTY), "unknown kinds fail"])
    done = subprocess.run(
        [AWA, "conformance", "--rule", "W9", "--dsn", database.dsn, "--worker", worker],
        capture_output=True,
        text=True,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert re.match(r"W1 +must +ok ", first)
    assert re.match(r"W9 +must +failed .*: the job is failed", second)
    assert done.returncode == 1


def test_a_rule_that_does_not_exist_is_refused(database: Database) -> None:
    with pytest.raises(awa.InvalidArgument, match="names no rule: W99"):
        next(run(database.dsn, "true", rules=["W2", "W99"]))


def test_a_database_in_use_is_refused_and_left_as_it_was(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.register_instance(%s)", [WORKER])
    conn.execute("SELECT awa.heartbeat(%s)", [WORKER])
    before = conn.execute("SELECT * FROM awa.settings").fetchall()
    done = subprocess.run(
        [AWA, "conformance", "--dsn", database.dsn, "--worker", "false"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: a worker is connected to this database" in done.stderr
    assert conn.execute("SELECT * FROM awa.settings").fetchall() == before


# Handlers whose outcome is no JSON, no object, or refused by the database.
REFUSED = {
    "bash": """
        handle_text() { echo hello; }
        handle_number() { echo 5; }
        handle_snooze() { echo '{"outcome": "snooze"}'; }
        handle_fine() { :; }
    """,
    "python": """
text = lambda args: {"outcome": "completed", "result": float("nan")}
number = lambda args: 5
snooze = lambda args: {"outcome": "snooze"}
fine = lambda args: None
    """,
    "node": """
        exports.text = async () => ({ outcome: 'completed', result: 5n })
        exports.number = async () => 5
        exports.snooze = async () => ({ outcome: 'snooze' })
        exports.fine = async () => {}
    """,
}


def start_example(
    name: str, database: Database, pg_bin: Path, folder: Path, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """An example worker on the queue of its name."""
    handlers = folder / {"bash": "h.sh", "python": "h.py", "node": "h.js"}[name]
    handlers.write_text(REFUSED[name])
    command = {
        "bash": ["bash", f"{WORKERS}/worker.sh", str(handlers)],
        "python": [sys.executable, f"{WORKERS}/worker.py", "h"],
        "node": ["node", f"{WORKERS}/worker.js", str(handlers)],
    }[name]
    env = environment(pg_bin) | {"AWA_DSN": url_of(database), "AWA_QUEUE": name}
    return subprocess.Popen(command, env=env, cwd=folder, stderr=stderr)


@pytest.mark.parametrize("name", list(REFUSED))
def test_an_example_worker_refuses_an_older_schema(
    name: str, database: Database, conn: psycopg.Connection, pg_bin: Path, tmp_path: Path
) -> None:
    if name == "node":
        if not shutil.which("npm"):
            pytest.skip("this machine has no npm")
        install_pg()
    conn.execute(
        "CREATE OR REPLACE FUNCTION awa.schema_version() RETURNS integer LANGUAGE sql STABLE"
        " PARALLEL SAFE RETURN 1"
    )
    with start_example(name, database, pg_bin, tmp_path, subprocess.PIPE) as worker:
        try:
            _, said = worker.communicate(timeout=30)
        finally:
            worker.kill()
    assert worker.returncode == 1
    assert b"JQ006" in said
    assert value(conn, "SELECT count(*) FROM awa.instances") == 0


def test_the_example_workers_retry_what_has_a_refused_outcome(
    database: Database, conn: psycopg.Connection, pg_bin: Path, tmp_path: Path
) -> None:
    """Red when an example ends, stands still, or keeps the job running for ever."""
    names = [name for name in REFUSED if name != "node" or shutil.which("npm")]
    if "node" in names:
        install_pg()
    client = awa.Client(conn)
    bad = [
        client.insert_job(kind, queue=n).job_id
        for n in names
        for kind in ("text", "number", "snooze")
    ]
    fine = [client.insert_job("fine", queue=name).job_id for name in names]
    with contextlib.ExitStack() as stack:
        for name in names:
            worker = stack.enter_context(start_example(name, database, pg_bin, tmp_path))
            stack.callback(worker.kill)  # one that is broken ends by nothing else
        for job_id in fine:
            assert client.wait(job_id, timeout=20).state == "completed"
        for job_id in bad:
            end = time.monotonic() + 20  # Node's worker runs them beside the fine one
            while (info := client.job(job_id)).state == "running" and time.monotonic() < end:
                time.sleep(0.05)
            assert (info.state, info.attempt) == ("retryable", 1), info
            assert "refused" in info.errors[0]["error"]


def test_the_document_has_the_rules_that_are_checked() -> None:
    text = (REPO / "docs/conformance.md").read_text()
    described = re.findall(r"^\| (W\d+) \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    assert described == [(rule.number, rule.level, rule.text) for rule in RULES]
    suite = (REPO / "tests/sql/conformance/rules.sql").read_text()
    asserted = set(re.findall(r"'(S\d+): ", suite))
    assert asserted == set(re.findall(r"^\| (S\d+) \|", text, re.MULTILINE))
