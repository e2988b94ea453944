"""The container files are well formed, and name only what the repository has.

No image is built: that needs a daemon and a registry.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import awa
from conftest import Database, DatabaseServer

REPO = Path(__file__).parents[2]
DOCKERFILES = sorted((REPO / "docker").glob("*Dockerfile"))
COMPOSE_FILE = REPO / "docker-compose.yml"
PASSWORDS = {"POSTGRES_PASSWORD": "administrator's", "APP_PASSWORD": "application's"}


def each_dockerfile(test: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)(test)


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which("docker-compose")
    if command is None:
        pytest.skip("docker-compose is not installed (Debian: apt-get install docker-compose)")
    return subprocess.run(
        [command, "-f", COMPOSE_FILE, *arguments],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables},
        capture_output=True,
        text=True,
        check=False,
    )


async def work_once(dsn: str) -> None:
    done = asyncio.Event()

    async def handler(job: awa.Job) -> None:
        done.set()

    async with awa.Worker(dsn, {"k": handler}):
        await asyncio.wait_for(done.wait(), 30)


@each_dockerfile
def test_hadolint_finds_nothing(file: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [program, "--no-color", file], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@each_dockerfile
def test_bases_are_pinned_and_the_last_user_is_not_root(file: Path) -> None:
    text = file.read_text()
    bases = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert bases
    assert all(re.fullmatch(r"[a-z]+:\d+\.\d+[\w.]*-[\w-]*bookworm", base) for base in bases)
    used = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(used) == {"${BASE}"}
    *_, last = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last)
    assert "USER" in text.rpartition("FROM")[2]


@each_dockerfile
def test_what_is_copied_exists_and_reaches_the_build(file: Path) -> None:
    shown = [
        line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    for line in re.findall(r"^COPY (?!--from)(.*)$", file.read_text(), re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert list(REPO.glob(source)), source
            assert any(
                fnmatch.fnmatch(source, pattern) or pattern.startswith(f"{source}/")
                for pattern in shown
            ), source
    for pattern in shown:
        assert list(REPO.glob(pattern)), pattern


def test_compose_accepts_its_file() -> None:
    done = compose("--profile", "demo", "config", "--services", **PASSWORDS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["demo", "postgres", "worker"]
    config = compose("config", **PASSWORDS)
    assert config.returncode == 0, config.stderr
    for name in re.findall(r"dockerfile: (\S+)", config.stdout):
        assert (REPO / name).exists()


@pytest.mark.parametrize("missing", PASSWORDS)
def test_compose_wants_passwords(missing: str) -> None:
    some = {name: text for name, text in PASSWORDS.items() if name != missing}
    done = compose("config", **some)
    assert done.returncode != 0
    assert missing in done.stderr


def test_the_database_of_the_container_serves_its_worker(
    server: DatabaseServer, empty_database: Database, pg_bin: Path
) -> None:
    """The script that the image runs at its first start, in a server whose roles are renamed."""
    owner, app = f"{empty_database.name}_owner", f"{empty_database.name}_app"
    text = (REPO / "docker/create_extension.sql").read_text()
    text = text.replace("awa_owner", owner).replace("ROLE app", f"ROLE {app}")
    text = text.replace("'app'", f"'{app}'")
    try:
        subprocess.run(
            [pg_bin / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", empty_database.dsn],
            env={**os.environ, **PASSWORDS},
            input=text,
            text=True,
            check=True,
            capture_output=True,
        )
        with psycopg.connect(make_conninfo(empty_database.dsn, user=app), autocommit=True) as conn:
            conn.execute("SELECT awa.insert_job('k')")
            asyncio.run(work_once(conn.info.dsn))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("SELECT awa.set_setting('notify_coalesce_ms', '1')")
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("TABLE awa.ready_entries")
    finally:
        server.drop(empty_database.name)
        server.create(empty_database.name)
        for role in (app, owner):
            server.admin.execute(f"DROP ROLE IF EXISTS {role}")
