"""The life of jobs, drawn by hypothesis and played against the engine beside a model of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import run_state_machine_as_test

from stateful.machine import Machine
from stateful.mutants import MUTANTS
from stateful.stage import Stage, new_stage

if TYPE_CHECKING:
    from conftest import DatabaseServer

EXAMPLES, STEPS = 25, 40
LONG_EXAMPLES, LONG_STEPS = 150, 60
MUTANT_EXAMPLES, MUTANT_STEPS = 200, 50
PLAY = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def stage(server: DatabaseServer) -> Iterator[Stage]:
    with new_stage(server.dsn, f"stateful_{os.getpid()}") as stage:
        yield stage


def play(stage: Stage, how: settings, seed: int | None = None) -> None:
    """Play the machine on a stage."""
    machine = type("Play", (Machine,), {"stage": stage})
    run_state_machine_as_test(machine if seed is None else with_seed(seed)(machine), settings=how)


def test_jobs_live_as_the_model_says(stage: Stage) -> None:
    play(stage, PLAY)


@pytest.mark.long
def test_jobs_live_as_the_model_says_for_long(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other plays each time. AWA_STATEFUL_SEED repeats those of a printed seed."""
    seed = int(os.environ.get("AWA_STATEFUL_SEED", random.SystemRandom().randrange(10**9)))
    with capsys.disabled():
        print(f"\nstateful: AWA_STATEFUL_SEED={seed}")
    how = settings(
        PLAY, max_examples=LONG_EXAMPLES, stateful_step_count=LONG_STEPS, derandomize=False
    )
    play(stage, how, seed)


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_found(server: DatabaseServer, name: str) -> None:
    how = settings(
        PLAY,
        max_examples=MUTANT_EXAMPLES,
        stateful_step_count=MUTANT_STEPS,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with (
        new_stage(server.dsn, f"stateful_{os.getpid()}_mutant", MUTANTS[name]) as stage,
        pytest.raises(AssertionError) as found,
    ):
        play(stage, how)
    print(name, found.value, sep=": ")
