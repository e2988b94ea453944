"""The run of all parts: one that fails fails it, and shares leave nothing out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from correctness import run
from tools import run_tests
from tools.run_tests import PYTEST
from tools.servers import REPO


@pytest.fixture(autouse=True)
def _once(server_version: int) -> None:
    if server_version != 18:
        pytest.skip("does not depend on the server: runs beside PostgreSQL 18")


def collected(*words: str) -> list[str]:
    """The tests of a file that pytest would run."""
    command = [sys.executable, *PYTEST, "--collect-only", "-q", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_shares_make_up_the_whole() -> None:
    words = ("tests/python/test_orders.py", "-k", "any_pair")
    parts = [collected(*words, "--share", f"{n}/2") for n in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(collected(*words))
    assert abs(len(parts[0]) - len(parts[1])) <= 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_that_fails_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fails: bool,
) -> None:
    def body(log: Path) -> tuple[bool, str]:
        log.write_text("what it said\n")
        return not fails, "a summary"

    monkeypatch.setattr(run_tests, "LOGS", tmp_path)
    monkeypatch.setattr(run, "PARTS", {"one": lambda log: (True, ""), "two": body})
    assert run.run(["one", "two"]) is not fails
    said = capsys.readouterr().out
    assert ("what it said" in said) is fails
    assert f"{2 - fails} of 2 parts are good" in said
