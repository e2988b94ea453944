"""The command line does its work, speaks JSON, and fails with one line and a hint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from awa.cli import main
from awa.client import Client
from conftest import Database, DatabaseServer

HANDLERS = """
import awa

handlers = awa.Handlers()

@handlers.task(keep_result=True)
def add(a: int, b: int) -> int:
    return a + b
"""


@dataclass(frozen=True)
class Answer:
    """What one run of the command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def environment(dsn: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "AWA_", "DATABASE_"))}
    return {**clean, "AWA_DSN": dsn, "PYTHONUNBUFFERED": "1"}


def awa(dsn: str, *arguments: object, cwd: Path | None = None) -> Answer:
    done = subprocess.run(
        [sys.executable, "-m", "awa", *map(str, arguments)],
        env=environment(dsn),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@contextmanager
def running(
    dsn: str, *arguments: object, cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on, ended by SIGTERM; it must then end well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "awa", *map(str, arguments)],
        env=environment(dsn),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))


@pytest.mark.parametrize("path", list(commands(main)), ids=lambda path: " ".join(("awa", *path)))
def test_help_explains_each_command(path: tuple[str, ...]) -> None:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    with click.Context(command, info_name="awa") as ctx:
        text = command.get_help(ctx)
    assert "--json" in text
    assert command.help
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_an_unreachable_server_is_one_line_and_a_hint() -> None:
    answer = awa("postgresql://127.0.0.1:1/app", "jobs")
    assert answer.code == 1
    first, *rest = answer.err.splitlines()
    assert first.startswith("error: connection")
    assert rest == ["hint: Say which database by --dsn, AWA_DSN or DATABASE_URL."]


def test_a_database_without_awa_is_told_apart(empty_database: Database) -> None:
    answer = awa(empty_database.dsn, "queues")
    assert answer.code == 1
    assert answer.err.splitlines() == [
        'error: awa is not installed in schema "awa" here',
        "hint: Run `awa install`.",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["insert"], "Missing argument 'KIND'"),
        (["insert", "k", "{'a': 1}"], "not JSON"),
        (["insert", "k", "--run-at", "2030-01-01T00:00:00"], "no offset from UTC"),
        (["insert", "k", "--run-at", "tomorrow"], "not an ISO 8601 time"),
        (["worker", "module:handlers", "-q", "default=x"], "not NAME or NAME=N"),
        (["worker", "module:handlers", "--grace", "nan"], "not a finite number"),
        (["worker", "module:handlers", "--grace", "inf"], "not a finite number"),
        (["worker", "module:handlers", "--grace", "-1"], "not in the range"),
        (["tick", "--every", "nan"], "not a finite number"),
        (["queues", "--watch", "--every", "inf"], "not a finite number"),
        (["queues", "declare", "q", "--aging", "nan"], "not a finite number"),
        (["queues", "declare", "q", "--deadline", "-1"], "not in the range"),
        (["insert", "k", "--delay", "nan"], "not a finite number"),
        (["insert", "k", "--deadline", "inf"], "not a finite number"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    answer = awa("", *arguments)
    assert answer.code == 2
    assert message in answer.err


def test_an_error_of_the_database_keeps_its_hint(database: Database) -> None:
    answer = awa(database.dsn, "insert", "k", "--priority", "9")
    assert answer.code == 1
    first, second = answer.err.splitlines()
    assert first.startswith("error: ")
    assert "priority" in first
    assert second.startswith("hint: ")


# install


def test_install_is_done_once(empty_database: Database) -> None:
    first = awa(empty_database.dsn, "install")
    assert first.code == 0, first.err
    assert first.out.startswith("installed version ")
    again = awa(empty_database.dsn, "install")
    assert again.code == 0
    assert "already" in again.out
    assert awa(empty_database.dsn, "install", "--json").json["installed"] is False
    job = awa(empty_database.dsn, "insert", "k", "--json").json
    assert job["state"] == "available"


def test_install_sees_the_extension(database: Database) -> None:
    assert "already as an extension" in awa(database.dsn, "install").out


def test_two_installations_at_once_both_end_well(empty_database: Database) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "awa", "install", "--json"],
            env=environment(empty_database.dsn),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert sorted(answer["installed"] for answer in answers) == [False, False, True]


def test_install_takes_any_schema_that_is_free(empty_database: Database) -> None:
    with empty_database.connect() as conn:
        conn.execute('CREATE TABLE public.taken (); CREATE SCHEMA "Tenant 7"')
    refused = awa(empty_database.dsn, "install", "--schema", "public")
    assert refused.code == 1
    assert refused.err.startswith('error: schema "public" holds something else\nhint: ')
    assert awa(empty_database.dsn, "install", "--schema", "a'b").code == 1
    for schema in ("Tenant 7", "other"):
        assert awa(empty_database.dsn, "install", "--schema", schema).code == 0
        awa(empty_database.dsn, "insert", "k", "--schema", schema)
        [job] = awa(empty_database.dsn, "--schema", schema, "jobs", "--json").json
        assert job["kind"] == "k"


def test_install_needs_no_superuser(server: DatabaseServer, empty_database: Database) -> None:
    role = sql.Identifier(f"{empty_database.name}_user")
    owner = f"{empty_database.name}_owner"
    with empty_database.connect() as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        conn.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(owner)))
        conn.execute(
            sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(
                sql.Identifier(empty_database.name), role
            )
        )
    try:
        dsn = make_conninfo(empty_database.dsn, user=f"{empty_database.name}_user")
        done = awa(dsn, "install")
        assert done.code == 0, done.err
        assert awa(dsn, "insert", "k", "--json").json["state"] == "available"
        given = awa(empty_database.dsn, "install", "--owner", owner)
        assert given.code == 0, given.err
        with empty_database.connect() as conn:
            found = conn.execute(
                "SELECT DISTINCT proowner::regrole::text FROM pg_proc"
                " WHERE pronamespace = 'awa'::regnamespace"
            ).fetchall()
        assert found == [(owner,)]
    finally:
        with empty_database.connect() as conn:
            names = sql.SQL("{}, {}").format(role, sql.Identifier(owner))
            conn.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(names))
            conn.execute(sql.SQL("DROP ROLE {}").format(names))


# jobs


def test_a_job_is_inserted_listed_shown_and_cancelled(database: Database) -> None:
    made = awa(
        database.dsn, "insert", "send", '{"to": "a", "n": 12345678901234567890.10}', "-q", "mail",
        "-p", 3, "--max-attempts", 7, "--tag", "x", "--tag", "y", "--metadata", '{"by": "me"}',
        "--json",
    ).json  # fmt: skip
    job_id = made["job_id"]
    assert made["state"] == "available"
    shown = awa(database.dsn, "jobs", "show", job_id, "--json").json
    expected = {"kind": "send", "queue": "mail", "priority": 3, "max_attempts": 7}
    assert expected.items() <= shown.items()
    assert (shown["tags"], shown["metadata"]) == (["x", "y"], {"by": "me"})
    with database.connect() as conn:
        row = conn.execute("SELECT args ->> 'n' FROM awa.job(%s)", [job_id]).fetchone()
        assert row == ("12345678901234567890.10",)

    assert [j["job_id"] for j in awa(database.dsn, "jobs", "-q", "mail", "--json").json] == [job_id]
    assert awa(database.dsn, "jobs", "-q", "other", "--json").json == []
    header, line = awa(database.dsn, "jobs", "-s", "available", "-k", "send").out.splitlines()
    assert header.split()[:3] == ["job_id", "state", "kind"]
    assert line.split()[:3] == [str(job_id), "available", "send"]

    assert awa(database.dsn, "jobs", "cancel", job_id, "--reason", "no").out == "cancelled\n"
    again = awa(database.dsn, "jobs", "cancel", job_id, "--json").json
    assert again == {"job_id": job_id, "answer": "already_cancelled"}


def test_a_job_can_be_scheduled(database: Database) -> None:
    dsn = database.dsn
    at = "2090-01-31T12:00:00+01:00"
    for option in (["--run-at", at], ["--delay", 3600]):
        assert awa(dsn, "insert", "later", *option, "--json").json["state"] == "scheduled"
    rows = awa(dsn, "jobs", "--state", "scheduled", "--json").json
    times = {datetime.fromisoformat(row["run_at"]) for row in rows}
    assert len(times) == 2
    assert datetime.fromisoformat(at) in times


def test_an_unknown_job_is_an_error(database: Database) -> None:
    for command in (["jobs", "show"], ["jobs", "cancel"], ["dlq", "retry"]):
        answer = awa(database.dsn, *command, 5)
        assert answer.code == 1
        assert answer.err.startswith("error: ")


def test_text_from_jobs_cannot_steer_the_terminal(database: Database) -> None:
    made = awa(database.dsn, "insert", "k", json.dumps({"x": "a\x1b[2Jb"}), "--json").json
    shown = awa(database.dsn, "jobs", "show", made["job_id"])
    assert "\x1b" not in shown.out


# queues


def test_queues_are_declared_counted_paused_and_resumed(database: Database) -> None:
    dsn = database.dsn
    declared = awa(dsn, "queues", "declare", "mail", "--shards", 4, "--dlq", "--aging", 30)
    assert declared.out == "declared\n"
    for _ in range(3):
        awa(dsn, "insert", "k", "-q", "mail")
    [counts] = awa(dsn, "queues", "--json").json
    assert (counts["queue"], counts["available"], counts["completed"]) == ("mail", 3, 0)
    header, line = awa(dsn, "queues").out.splitlines()
    assert dict(zip(header.split(), line.split(), strict=True))["available"] == "3"
    assert sum(lane["depth"] for lane in awa(dsn, "queues", "lanes", "--json").json) == 3
    said = [awa(dsn, "queues", verb, "mail").out for verb in ("pause", "pause", "resume", "resume")]
    assert said == ["paused\n", "was paused already\n", "resumed\n", "was not paused\n"]


def test_queues_can_be_watched(database: Database) -> None:
    awa(database.dsn, "insert", "k")
    with running(database.dsn, "queues", "--watch", "--every", 0.1, "--json") as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert first == second
        assert first[0]["available"] == 1


def fail_all(dsn: str, queue: str) -> None:
    instance = uuid4()
    with Client(dsn) as client:
        client.register_instance(instance)
        claimed = client.claim_ready_runtime(queue, 10, instance)
        token = ("job_id", "run_lease", "claim_slot", "batch_id", "position")
        client.finish_jobs(
            instance,
            [
                {"outcome": "fail", **{name: getattr(job, name) for name in token}}
                for job in claimed
            ],
        )


def test_a_job_is_changed_and_retried(database: Database) -> None:
    job_id = awa(database.dsn, "insert", "report", "--json").json["job_id"]
    changes = '{"priority": 1, "args": {"page": 2}}'
    assert awa(database.dsn, "jobs", "update", job_id, changes).out == "available\n"
    shown = awa(database.dsn, "jobs", "show", job_id, "--json").json
    assert (shown["priority"], shown["args"]) == (1, {"page": 2})
    assert awa(database.dsn, "jobs", "retry", job_id).code == 1
    explained = awa(database.dsn, "jobs", "explain", job_id)
    assert explained.out.startswith(f"Job {job_id} is available, but no live worker")
    awa(database.dsn, "jobs", "cancel", job_id)
    assert awa(database.dsn, "jobs", "retry", job_id, "-q", "slow").out == f"{job_id}  available\n"
    assert awa(database.dsn, "jobs", "show", job_id, "--json").json["queue"] == "slow"


def test_a_queue_is_drained(database: Database) -> None:
    for _ in range(3):
        awa(database.dsn, "insert", "report", "-q", "mail")
    assert awa(database.dsn, "queues", "drain", "mail").code == 1  # nobody said yes
    drained = awa(database.dsn, "queues", "drain", "mail", "--yes", "--reason", "moved", "--json")
    assert drained.json == {"queue": "mail", "cancelled": 3}
    assert awa(database.dsn, "queues", "drain", "mail", "--yes").out == "0 cancelled\n"


def test_dead_letters_are_listed_retried_and_purged(database: Database) -> None:
    dsn = database.dsn
    awa(dsn, "queues", "declare", "mail", "--dlq")
    ids = [awa(dsn, "insert", "k", "-q", "mail", "--json").json["job_id"] for _ in range(2)]
    fail_all(dsn, "mail")
    letters = awa(dsn, "dlq", "--json").json
    assert {letter["job_id"] for letter in letters} == set(ids)
    assert len(awa(dsn, "dlq", "-q", "mail", "-n", 1).out.splitlines()) == 2
    assert awa(dsn, "dlq", "retry", ids[0], "--json").json["state"] == "available"
    assert awa(dsn, "dlq", "purge", ids[1]).out == "purged\n"
    assert awa(dsn, "dlq", "--json").json == []


# tick, settings


def test_tick_reports_each_step(database: Database) -> None:
    reports = awa(database.dsn, "tick", "--json").json
    assert {"step", "outcome", "rows", "milliseconds"} <= reports[0].keys()
    one = awa(database.dsn, "tick", "--step", "promote", "--rows", 10, "--json").json
    assert {report["step"] for report in one} == {"promote"}
    assert awa(database.dsn, "tick", "--step", "nonsense").code == 1


def test_tick_goes_on_until_it_is_stopped(database: Database) -> None:
    with running(database.dsn, "tick", "--every", 0.05, "--json") as process:
        assert process.stdout is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())


def test_settings_are_shown_set_and_reset(database: Database) -> None:
    dsn = database.dsn
    before = {row["name"]: row["value"] for row in awa(dsn, "settings", "--json").json}
    assert awa(dsn, "settings", "set", "aging_seconds", 7).out == "aging_seconds = 7\n"
    reset = awa(dsn, "settings", "reset", "aging_seconds", "--json").json
    assert reset["value"] == before["aging_seconds"]
    answer = awa(dsn, "settings", "set", "nonsense", 1)
    assert (answer.code, answer.err.splitlines()[1][:6]) == (1, "hint: ")


# worker, dev


def wait_until_completed(dsn: str, job_id: int) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    with psycopg.connect(dsn, autocommit=True) as conn:
        while time.monotonic() < deadline:
            row = conn.execute("SELECT to_jsonb(j) FROM awa.job(%s) j", [job_id]).fetchone()
            assert row is not None
            if row[0]["state"] == "completed":
                job: dict[str, Any] = row[0]
                return job
            time.sleep(0.05)
    pytest.fail("the job was not completed in time")


def test_a_worker_finds_its_module_in_the_current_folder(
    database: Database, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(HANDLERS)
    made = awa(database.dsn, "insert", "add", '{"a": 2, "b": 3}', "--keep-result", "--json").json
    with running(
        database.dsn, "worker", "tasks:handlers", "-q", "default=5", "--grace", 5, cwd=tmp_path
    ):
        job = wait_until_completed(database.dsn, made["job_id"])
    assert job["result"] == 5


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing:handlers", 'there is no module "missing"'),
        ("tasks:missing", 'module "tasks" has no "missing"'),
    ],
)
def test_a_worker_without_handlers_is_an_error(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "tasks.py").write_text(HANDLERS)
    answer = awa("", "worker", target, cwd=tmp_path)
    assert answer.code == 1
    assert answer.err.startswith(f"error: {message}\n")


def test_dev_runs_a_server_and_a_worker(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(HANDLERS)
    with running("", "dev", "--worker", "tasks", "--json", cwd=tmp_path) as process:
        assert process.stdout is not None
        dsn = json.loads(process.stdout.readline())["dsn"]
        made = awa(dsn, "insert", "add", '{"a": 1, "b": 1}', "--json").json
        wait_until_completed(dsn, made["job_id"])
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)


def test_dev_alone_prints_its_dsn_and_ends_by_a_signal() -> None:
    with running("", "dev") as process:
        assert process.stdout is not None
        dsn = process.stdout.readline().strip()
        assert awa(dsn, "queues", "--json").json == []


def test_dev_names_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = awa("", "dev", "--port", port)
    assert answer.code == 1
    assert answer.err == f"error: the server cannot listen on port {port}: Address already in use\n"


@pytest.mark.parametrize("words", [("jobs",), ("jobs", "--json"), ("--help",)])
def test_output_that_cannot_be_written_is_one_line(database: Database, words: list[str]) -> None:
    command = [sys.executable, "-m", "awa", *words]
    env = environment(database.dsn)
    for unbuffered in ("", "1"):
        env["PYTHONUNBUFFERED"] = unbuffered
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == 1
        assert done.stderr == "error: the output cannot be written: No space left on device\n"
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")


def test_numbers_that_are_too_large_are_named(database: Database) -> None:
    too_large = 99999999999999999999999
    for words in (
        ("insert", "k", "-p", 3_000_000_000),
        ("jobs", "show", too_large),
        ("dlq", "purge", too_large),
    ):
        answer = awa(database.dsn, *words)
        assert answer.code == 1
        assert "out of range" in answer.err


def test_arguments_that_are_not_text_are_refused(database: Database) -> None:
    for words in (("insert", "k", '{"a": "\udcff"}'), ("jobs", "-k", "\udcff")):
        answer = awa(database.dsn, *words)
        assert answer.code == 1
        assert answer.err.startswith("error: not valid text")
    assert awa(database.dsn, "insert", "k", "NaN").code == 2


def test_a_time_that_python_cannot_express_does_not_hide_the_other_jobs(
    database: Database, conn: psycopg.Connection
) -> None:
    # No call makes one, but a restored or repaired table may hold it.
    conn.execute("SELECT awa.insert_job('far', run_at => '9999-01-01 00:00+00')")
    conn.execute("UPDATE awa.deferred_jobs SET run_at = '10000-06-01 00:00+00'")
    conn.execute("SELECT awa.insert_job('near')")
    rows = awa(database.dsn, "jobs", "--json").json
    assert {row["kind"] for row in rows} == {"far", "near"}


def test_a_number_that_python_does_not_read_does_not_hide_the_other_jobs(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.insert_job('large', '[1e5000]'), awa.insert_job('small', '[1]')")
    rows = awa(database.dsn, "jobs", "--json").json
    assert {row["kind"]: row["args"] for row in rows} == {"large": ["1" + 5000 * "0"], "small": [1]}


def test_a_second_signal_ends_a_loop_whose_query_does_not_come_back(
    database: Database, conn: psycopg.Connection
) -> None:
    conn.execute("SELECT awa.insert_job('k')")  # else there is nothing to count
    with database.connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE awa.ready_entries")
        # As a job that a shell runs in the background, which starts with SIGINT ignored.
        ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
        process = subprocess.Popen(
            [*ignoring, sys.executable, "-m", "awa", "queues", "--watch"],
            env=environment(database.dsn),
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = ANY ("
                query += "SELECT oid FROM pg_database WHERE datname = current_database())"
                end = time.monotonic() + 20
                while conn.execute(query).fetchone() == (0,):
                    assert time.monotonic() < end
                    time.sleep(0.02)
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)  # the first one waits for the query to be cancelled
                process.send_signal(signal.SIGINT)
                assert process.wait(20) == 1
            finally:
                process.kill()
