"""Real processes race for the same jobs, some are killed, and a ledger kept outside must agree.

It was seen to fail when a claim skips the lane lock, when gaps are dropped without proof, when a
finish ignores the closures of its batch, and when prune forgets the counts of its slot. A prune
without its recheck takes a directed schedule: test_guarantees.py has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from race.ledger import is_committed, read_story
from race.supervisor import Quota
from race.verdict import Verdict


def race(database: Database, directory: Path, seed: int, seconds: float) -> None:
    """Run one seed in a process of its own, which may fork, and judge it."""
    command = [sys.executable, "-m", "race", database.dsn, str(directory), str(seed), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    running = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        try:
            output, errors = running.communicate(timeout=2 * seconds + 120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, errors[-4000:]
    facts = json.loads(output)
    with psycopg.connect(database.dsn, autocommit=True) as conn:
        verdict = Verdict(read_story(directory, partial(is_committed, conn)), conn)
    print(f"\nrace, seed {seed}, {seconds:.0f} s:", ", ".join(f"{k} {v}" for k, v in facts.items()))
    print(verdict.summary())
    print(verdict.check_history(directory))
    assert not verdict.problems, "\n".join(verdict.problems)
    short = {k: v for k, v in asdict(Quota.for_seconds(seconds)).items() if facts[k] < v}
    assert not short, f"the race counts only with at least {short}, it had {facts}"


def test_a_race_of_15_seconds_loses_doubles_and_invents_nothing(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        race(database, tmp_path, seed=1, seconds=15)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 7))
def test_a_race_of_60_seconds_loses_doubles_and_invents_nothing(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    with capsys.disabled():
        race(database, tmp_path, seed=seed, seconds=60)
