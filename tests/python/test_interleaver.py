"""Races, one step at a time: the engine survives every schedule, its known mutants do not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from interleaver import MUTANTS, SCHEDULES, play
from interleaver.schedules import run_schedule
from interleaver.script import build
from interleaver.world import KEY_SEED, new_database

if TYPE_CHECKING:
    from conftest import DatabaseServer

SEEDS = range(1, 7)
KEY_SEEDS = range(KEY_SEED, KEY_SEED + 2)
SHORT_SEEDS = (1, 3, KEY_SEED)
LONG_SEEDS = [seed for seed in (*SEEDS, *KEY_SEEDS) if seed not in SHORT_SEEDS]
KEY_MUTANTS = {"retry does not take its key", "a claim on a key is deleted while its job lives"}
STEPS = 6000
# Which directed schedule finds which mutant.
DIRECTED = [
    ("horizon from xmax", "newest id has not ended"),
    ("id after position", "producer stops between position and row"),
    ("locked position becomes a gap", "claim meets a cancel that is rolled back"),
    ("prune does not recheck", "producer writes to a left slot"),
    ("prune does not recheck", "claim writes to a left slot"),
    ("cursor read in one snapshot", "prune moves the cursor that a claim reads"),
    ("cancel goes on where it has no lock", "worker releases while cancel looks"),
    (
        "prune of a bucket does not look again",
        "job is deferred into a bucket that is pruned",
    ),
    ("prune of a bucket lets writers in", "job is deferred while prune holds its bucket"),
    ("takeover of a key does not look again", "key is taken over while a producer looks"),
    ("holder in an old snapshot", "holder ends after a snapshot"),
]
DIRECTED_LONG = [
    ("horizon from an id of before", "claim has an older id than a producer"),
    ("horizon above xmax taken for foreign", "claim comes twice in a transaction"),
    ("snapshot after the probe", "producer commits while a claim probes"),
    ("proof by locks without looking", "newest id has not ended"),
    ("probe limit ignored", "more late rows than a claim may take"),
    ("gaps not probed", "more late rows than a claim may take"),
    ("tombstone not read after the lock", "cancel commits between read and lock"),
    ("claim ignores mutation locks", "cancel commits between read and lock"),
    ("cancel in an old snapshot", "cancel has an old snapshot"),
    ("cancel does not look again", "claim commits while cancel looks"),
    ("hint from uncommitted rows", "claims are rolled back"),
    ("prune ignores held positions", "claim meets a cancel that is rolled back"),
    ("prune ignores gaps", "newest id has not ended"),
    ("prune ignores attempts of other slots", "claim writes to a left slot"),
    ("prune folds no counts", "claims are rolled back"),
    ("plan and publish in one transaction", "plan is rolled back"),
    ("evacuation without the lane's locks", "cancel comes while evacuation moves"),
    (
        "cancel of a lease does not look again",
        "finish commits while cancel of a lease looks",
    ),
    (
        "rescue of a lease does not look again",
        "finish commits while rescue of a lease looks",
    ),
]
# Schedules so rare that six seeds do not meet them.
ONLY_DIRECTED = {
    "cancel goes on where it has no lock",
    "evacuation without the lane's locks",
    "cancel of a lease does not look again",
    "rescue of a lease does not look again",
    "cursor read in one snapshot",
    "tombstone not read after the lock",
    "cancel does not look again",
    "hint from uncommitted rows",
    "prune does not recheck",
    "prune of a bucket does not look again",
    "prune of a bucket lets writers in",
    "takeover of a key does not look again",
    "holder in an old snapshot",
}


@pytest.fixture(scope="module")
def engine(server: DatabaseServer) -> Iterator[str]:
    """The name of a database to copy, with the engine as it is."""
    name = f"interleaver_{uuid.uuid4().hex[:12]}"
    with new_database(server.dsn, name):
        yield name


def broken_by(
    server: DatabaseServer, schedule: str, mutant: str | None, template: str | None = None
) -> str | None:
    edits = MUTANTS[mutant] if mutant else ()
    with new_database(server.dsn, f"schedule_{uuid.uuid4().hex[:12]}", edits, template) as dsn:
        return run_schedule(dsn, schedule)


@pytest.mark.parametrize(
    "seed",
    [*SHORT_SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG_SEEDS)],
)
def test_no_random_schedule_breaks_the_engine(
    server: DatabaseServer, engine: str, seed: int
) -> None:
    result = play(server.dsn, seed, STEPS, template=engine)
    print(result, dict(sorted(result.seen.items())))
    assert result.broken is None, str(result)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_directed_schedule_breaks_the_engine(
    server: DatabaseServer, engine: str, schedule: str
) -> None:
    assert broken_by(server, schedule, None, engine) is None


@pytest.mark.parametrize(
    ("mutant", "schedule"),
    [*DIRECTED, *(pytest.param(*pair, marks=pytest.mark.long) for pair in DIRECTED_LONG)],
)
def test_a_directed_schedule_breaks_a_mutant(
    server: DatabaseServer, mutant: str, schedule: str
) -> None:
    assert broken_by(server, schedule, mutant) is not None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_still_applies(mutant: str) -> None:
    assert build(MUTANTS[mutant]) != build()


@pytest.mark.long
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name not in ONLY_DIRECTED])
def test_a_random_schedule_breaks_a_mutant(server: DatabaseServer, mutant: str) -> None:
    seeds = range(KEY_SEED, KEY_SEED + 6) if mutant in KEY_MUTANTS else SEEDS
    results = (play(server.dsn, seed, STEPS, MUTANTS[mutant]) for seed in seeds)
    found = next((str(result) for result in results if result.broken), None)
    print(found)
    assert found, f"no seed found {mutant}"
