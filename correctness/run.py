"""All that is checked by machine but the mutation run: `python -m correctness.run [--only TEXT]`.

Parts are played two at a time, the longest first, each on a server of its own where it needs one.
Prints a line per part; whole outputs are in build/logs/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tools.run_tests import LOGS, PYTEST, TEST_SETTINGS, pgtap, python, step
from tools.servers import Cluster, ensure_tree, exit_on_sigterm

AT_ONCE = 2  # parts
LIMIT_MINUTES = 25

Body = Callable[[Path], tuple[bool, str]]


def module(*words: str) -> Body:
    """A program of ours."""
    return partial(python, ["-m", *words])


def tests(version: int, *words: str) -> Body:
    """Python tests, with what is marked long, on a server of their own."""

    def body(log: Path) -> tuple[bool, str]:
        arguments = [*PYTEST, "--long", "--durations=5", *words]
        with Cluster(ensure_tree(version), TEST_SETTINGS) as cluster:
            return python(arguments, log, env=cluster.environment)

    return body


def sql_tests(version: int, pattern: str) -> Body:
    """pgTAP files whose names hold a pattern."""

    def body(log: Path) -> tuple[bool, str]:
        with Cluster(ensure_tree(version), TEST_SETTINGS) as cluster:
            return pgtap(cluster, pattern, log)

    return body


def files(*names: str) -> list[str]:
    return [f"tests/python/test_{name}.py" for name in names]


PARTS: dict[str, Body] = {
    "models": module("correctness.check_models", "--jobs", "1"),
    "orders 1": tests(18, *files("orders"), "-k", "any_pair or mutant", "--share", "1/2"),
    "orders 2": tests(18, *files("orders"), "-k", "any_pair or mutant", "--share", "2/2"),
    "schedules": tests(18, *files("interleaver"), "-k", "random_schedule"),
    "states": tests(18, *files("stateful")),
    "histories": tests(18, *files("history", "race")),
    "three calls": tests(18, *files("orders"), "-k", "three_calls"),
    "python lines": module("correctness.line_coverage", "--only", "python"),
    "sql lines": module("correctness.line_coverage", "--only", "sql"),
    "plans": tests(18, *files("plans")),
    "plans on 15": tests(15, *files("plans")),
    "locks": tests(18, *files("lock_order")),
    "catalog": sql_tests(15, "conventions/"),
    "planes": module("tools.check_structure"),
}


def run(names: Sequence[str]) -> bool:
    """Play parts, two at a time."""
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        good = list(pool.map(lambda name: step(name, PARTS[name]), names))
    minutes = (time.monotonic() - began) / 60
    print(f"{sum(good)} of {len(names)} parts are good, in {minutes:.1f} minutes")
    if minutes > LIMIT_MINUTES:
        print(f"on 2 cores with nothing else to do it is to take at most {LIMIT_MINUTES}")
    return all(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose name holds this")
    only = parser.parse_args().only
    exit_on_sigterm()
    LOGS.mkdir(parents=True, exist_ok=True)
    names = [name for name in PARTS if only in name]
    if not names:
        parser.error(f"no part {only}; there are {', '.join(PARTS)}")
    return 0 if run(names) else 1


if __name__ == "__main__":
    sys.exit(main())
