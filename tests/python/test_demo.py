"""The demo ends well on real files, and notices when its table and the disk disagree."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from awa.embedded import Postgres

DEMO = Path(__file__).parents[2] / "examples/demo"

pytestmark = pytest.mark.skipif(
    os.environ.get("AWA_PG_VERSION", "18") != "18", reason="brings its own PostgreSQL 18"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all sorts: empty, small, large, oddly named, linked."""
    root = tmp_path / "tree"
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").touch()
    (root / "deep/small.txt").write_text("small\n" * 50)
    (root / "deep/er/large.bin").write_bytes(os.urandom(300_000))
    (root / "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n 'quoted'\n%s").write_text("odd")
    (root / "link").symlink_to("empty")
    (root / os.fsdecode(b"not-utf8-\xff")).touch()
    for number in range(450):
        (root / f"{number}.py").write_text(f"print({number})\n")
    return root


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The demo's module, with the names that it imports as a script."""
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module("run")
    for name in ("run", "handlers"):
        sys.modules.pop(name, None)


def test_the_demo_ends_well(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, DEMO / "run.py", tree], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "skipped 1 files: not a regular file" in lines
    assert "skipped 1 files: name is not UTF-8" in lines
    assert [line for line in lines if line.startswith("ok")] == [
        "ok    454 files agree with their row",
        "ok    456 jobs completed: one per file, the flaky one and the planned one",
        "ok    the flaky job completed at attempt 3",
        next(line for line in lines if line.startswith("ok    the planned job completed 0.")),
        "ok    the poison job failed at attempt 3 and is a dead letter",
    ]
    # Nothing failed but what was meant to.
    assert all(
        "flaky attempt" in line or "poison attempt" in line for line in done.stderr.splitlines()
    )


def test_wrong_results_are_noticed(
    demo: ModuleType,
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = importlib.import_module("handlers")
    honest = handlers.pack

    def careless(path: Path) -> Any:
        packed = honest(path)
        if path.name == "small.txt":
            packed.sha256 = bytes(32)
        return packed

    monkeypatch.setattr(handlers, "pack", careless)
    with Postgres() as server:
        assert asyncio.run(demo.demo(tree, server.dsn)) is False
    assert "WRONG 1 files differ from their row: deep/small.txt" in capsys.readouterr().out


def test_a_change_is_believed_only_if_the_files_own_times_show_it(
    demo: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("now")
    status = file.stat()
    row: dict[str, Any] = {
        "packed_at": 1,
        "size": 3,
        "sha256": b"",
        "changed_ns": status.st_ctime_ns,
    }
    judge, started = demo.judge, status.st_ctime_ns
    assert judge(file, row, status, started) == "files differ from their row"
    row["changed_ns"] -= 1
    assert judge(file, row, status, started) == demo.CHANGED
    assert judge(file, None, status, started) == demo.CHANGED
    assert judge(file, None, status, started + 1) == "files were not recorded"
    assert judge(file, row, None, started) == demo.CHANGED
    row["packed_at"] = None
    assert "no job" in judge(file, row, None, started)


def test_something_else_than_a_directory_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, DEMO / "run.py", __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "is not a directory" in done.stderr
