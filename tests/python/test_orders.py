"""Pairs of calls in every order of their pause points, and three calls in some (G1, G2, G6, G7)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from interleaver import MUTANTS
from interleaver.orders import CALLS, Theatre, new_theatre, play_all, play_some

if TYPE_CHECKING:
    from conftest import DatabaseServer

PAIRS = list(itertools.combinations_with_replacement(CALLS, 2))
SEED = 20261130
SHORT = random.Random(SEED).sample(PAIRS, 8)
TRIPLES = [
    ("insert", "claim", "prune_queue"),
    ("insert", "claim", "evacuate"),
    ("claim", "cancel of a waiting job", "evacuate"),
    ("complete", "cancel of a running job", "rescue"),
    ("complete", "evacuate", "prune_claim"),
    ("finish of a lease", "rescue", "cancel of a lease"),
    ("insert later", "promote", "prune_deferred"),
    ("insert unique", "cancel of a waiting job", "unique_keys"),
]
# Which pair finds which mutant.
FOUND = [
    ("cancel does not look again", ("claim", "cancel of a waiting job")),
    ("cancel of a lease does not look again", ("finish of a lease", "cancel of a lease")),
    ("rescue of a lease does not look again", ("finish of a lease", "rescue")),
]


@pytest.fixture(scope="module")
def theatre(server: DatabaseServer) -> Iterator[Theatre]:
    """Where every order begins with the same scene."""
    with new_theatre(server.dsn) as theatre:
        yield theatre


@pytest.mark.parametrize("pair", SHORT, ids=" and ".join)
def test_no_order_of_some_pairs_breaks_the_engine(theatre: Theatre, pair: tuple[str, str]) -> None:
    assert play_some(theatre, pair, SEED, 3).broken is None


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_no_order_of_any_pair_breaks_the_engine(theatre: Theatre, pair: tuple[str, str]) -> None:
    played = play_all(theatre, pair)
    print(played.orders, "orders")
    assert played.broken is None, played.broken


@pytest.mark.parametrize("names", TRIPLES, ids=" and ".join)
def test_no_chosen_order_of_three_calls_breaks_the_engine(
    theatre: Theatre, names: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    count = 100 if request.config.getoption("--long") else 2
    played = play_some(theatre, names, SEED, count)
    assert played.broken is None, played.broken


@pytest.mark.parametrize(("mutant", "pair"), FOUND)
def test_an_order_breaks_a_mutant(
    server: DatabaseServer, mutant: str, pair: tuple[str, str]
) -> None:
    with new_theatre(server.dsn, MUTANTS[mutant]) as theatre:
        assert play_all(theatre, pair).broken is not None
