"""The embedded server starts, keeps what it should, and leaves nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from awa.embedded import EmbeddedPostgresError, Postgres

CONTROL_FILE = Path(__file__).parents[2] / "extension/awa.control"

pytestmark = pytest.mark.skipif(
    os.environ.get("AWA_PG_VERSION", "18") != "18", reason="brings its own PostgreSQL 18"
)

HOLD_A_SERVER = """
import time
from awa.embedded import Postgres
server = Postgres()
server.start()
print(server.dsn, flush=True)
print(server.scratch, flush=True)
time.sleep(60)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the server's user can reach, which pytest's own is not under root."""
    folder = Path(tempfile.mkdtemp(prefix="awa-test-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def ask(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query.encode()).fetchone()
    return row and row[0]


def answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="module")
def running_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def test_a_server_answers_between_start_and_stop_and_leaves_no_files() -> None:
    server = Postgres()
    with server:
        dsn, scratch = server.dsn, server.scratch
        assert str(ask(dsn, "SHOW server_version")).startswith("18")
        assert ask(dsn, "SELECT current_database()") == "awa"
        assert scratch is not None
        assert scratch.exists()
    assert not answers(dsn)
    assert not scratch.exists()
    with pytest.raises(EmbeddedPostgresError, match="not running"):
        _ = server.dsn
    with server:
        assert ask(server.dsn, "SELECT 1") == 1


def test_a_running_server_is_not_started_again(running_server: Postgres) -> None:
    with pytest.raises(EmbeddedPostgresError, match="already running"):
        running_server.start()
    assert ask(running_server.dsn, "SELECT 1") == 1


def test_a_data_folder_is_kept(open_folder: Path) -> None:
    data_dir = open_folder / "server"
    with Postgres(data_dir) as server, psycopg.connect(server.dsn) as conn:
        conn.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with Postgres(data_dir) as server:
        assert ask(server.dsn, "SELECT answer FROM kept") == 42
        with pytest.raises(EmbeddedPostgresError, match=r"postmaster\.pid"):
            Postgres(data_dir).start()
        assert ask(server.dsn, "SELECT answer FROM kept") == 42


@pytest.mark.skipif(os.getuid() != 0, reason="only root runs the server as somebody else")
def test_a_data_folder_behind_a_closed_one_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(EmbeddedPostgresError, match="may not write to"):
        Postgres(tmp_path / "server").start()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_tree_that_the_servers_user_cannot_run_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Postgres, "_can_run", lambda self, tree: False)
    with Postgres() as server:
        assert server.scratch is not None
        assert (server.scratch / "tree").is_dir()
        assert ask(server.dsn, "SELECT 1") == 1


def test_the_password_is_needed(running_server: Postgres) -> None:
    user, _, address = running_server.dsn.partition("@")
    assert not answers(f"{user}x@{address}")


def test_the_server_ends_with_a_killed_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_SERVER], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        dsn, scratch = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert answers(dsn)
        process.kill()
    deadline = time.monotonic() + 20
    while answers(dsn) or Path(scratch).exists():
        assert time.monotonic() < deadline, "the server outlived its owner"
        time.sleep(0.05)


def test_the_extension_can_be_created(running_server: Postgres) -> None:
    with psycopg.connect(running_server.dsn, autocommit=True) as conn:
        conn.execute("CREATE EXTENSION awa")
        wanted = [line for line in CONTROL_FILE.read_text().splitlines() if "comment" not in line]
        row = conn.execute(
            "SELECT schema, relocatable, superuser, trusted, version"
            " FROM pg_available_extension_versions WHERE name = 'awa'"
        ).fetchone()
        assert row is not None
        schema, relocatable, superuser, trusted, version = row
        assert sorted(wanted) == sorted(
            [
                f"default_version = '{version}'",
                f"schema = {schema}",
                *(
                    f"{name} = {str(value).lower()}"
                    for name, value in (
                        ("relocatable", relocatable),
                        ("superuser", superuser),
                        ("trusted", trusted),
                    )
                ),
            ]
        )
