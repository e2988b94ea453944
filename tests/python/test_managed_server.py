"""The README alone takes a role without rights from pip install to a finished job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from conftest import Database, DatabaseServer

REPO = Path(__file__).parents[2]
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "SSL_CERT_FILE")
WORKER = "awa worker tasks:handlers"


def section() -> str:
    """The README's text about managed servers."""
    text = (REPO / "README.md").read_text()
    return text.partition("### On a managed server\n")[2].partition("\n### ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(), re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """Each command that the section shows, with the output that it shows."""
    shown = re.split(r"^\$ ", "".join(blocks("console")), flags=re.MULTILINE)[1:]
    found = []
    for text in shown:
        command, _, output = text.partition("\n")
        found.append((command, output))
    return found


@pytest.fixture
def managed_dsn(server: DatabaseServer, empty_database: Database) -> Iterator[str]:
    """A role as a managed server hands it out, which may make a schema and nothing else."""
    role = f"{empty_database.name}_you"
    with empty_database.connect() as conn:
        conn.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEROLE NOCREATEDB")
        conn.execute(f"GRANT CREATE ON DATABASE {empty_database.name} TO {role}")
    yield make_conninfo(empty_database.dsn, user=role)
    with empty_database.connect() as conn:
        conn.execute(f"DROP OWNED BY {role} CASCADE")
        conn.execute(f"DROP ROLE {role}")


class Terminal:
    """Runs commands one by one; an `export` and an activated environment last, as in a shell."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.dsn = dsn
        told = {name: os.environ[name] for name in INHERITED if name in os.environ}
        told |= {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        self.environment = {**told, "HOME": os.environ["HOME"], "PYTHONUNBUFFERED": "1"}
        self.prelude = "set -euo pipefail\n"

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", self.prelude + "exec " + command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str) -> str:
        if command.startswith("export AWA_DSN="):
            command = f"export AWA_DSN='{self.dsn}'"
        done = subprocess.run(
            ["bash", "-c", self.prelude + command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if command.startswith("export "):
            self.prelude += command + "\n"
        elif "activate" in command:
            self.prelude += command.rpartition("&& ")[2] + "\n"
        return done.stdout


def test_the_commands_of_the_readme_finish_a_job(tmp_path: Path, managed_dsn: str) -> None:
    told = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VERSION", "K")
    subprocess.run(
        ["make", "wheel", f"WHEELS={tmp_path / 'dist'}"],
        cwd=REPO,
        env={name: text for name, text in os.environ.items() if name not in told},
        check=True,
    )
    [tasks] = blocks("python")
    (tmp_path / "tasks.py").write_text(tasks)
    terminal = Terminal(tmp_path, managed_dsn)
    ran = []
    for command, output in steps():
        ran.append(command.split()[0:2])
        if command == WORKER:
            with terminal.start(command) as worker:
                assert worker.stdout
                assert worker.stdout.readline() == output
                worker.send_signal(signal.SIGINT)
                assert worker.wait(timeout=30) == 0
        elif output:
            assert terminal.run(command) == output
        else:
            terminal.run(command)
    assert ["awa", "install"] in ran
    assert ["awa", "insert"] in ran
    assert ran[-1] == ["awa", "jobs"]
