"""Play seeds, as the engine is or broken by mutants, and print one line for each."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable

from tools.edits import Edit

from . import MUTANTS, SCHEDULES, Result, play
from .schedules import run_schedule
from .world import new_database

DSN = os.environ.get("AWA_TEST_DSN", "")


def play_one(task: tuple[int, int, tuple[Edit, ...]]) -> Result:
    seed, steps, edits = task
    return play(DSN, seed, steps, edits)


def play_all(
    seeds: Iterable[int], steps: int, edits: tuple[Edit, ...], jobs: int
) -> Iterable[Result]:
    tasks = [(seed, steps, edits) for seed in seeds]
    if jobs == 1:
        yield from map(play_one, tasks)
        return
    # Seeds that run beside each other see each other's transaction ids: less bound to the seed.
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(play_one, tasks)


def play_schedules(edits: tuple[Edit, ...]) -> list[str]:
    broken = []
    for name in SCHEDULES:
        with new_database(DSN, f"interleaver_directed_{os.getpid()}", edits) as dsn:
            answer = run_schedule(dsn, name)
        print(f"  {name}: {answer or 'ok'}".split("\n")[0], flush=True)
        broken += [name] if answer else []
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1-6", help="1-20, or one")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time")
    parser.add_argument("--mutant", default="", help="names separated by commas, or all")
    parser.add_argument("--verbose", action="store_true", help="print what was seen how often")
    arguments = parser.parse_args()
    first, last = (arguments.seeds.split("-") * 2)[:2]
    seeds = range(int(first), int(last) + 1)
    names = list(MUTANTS) if arguments.mutant == "all" else arguments.mutant.split(",")
    wrong = 0
    for name in names:
        edits = MUTANTS[name] if name else ()
        print(name or "as written", flush=True)
        is_broken = bool(play_schedules(edits))
        results = play_all(seeds, arguments.steps, edits, arguments.jobs)
        for result in () if name and is_broken else results:
            line = str(result).splitlines()[0] if name else str(result)
            print(f"  {line}", flush=True)
            if arguments.verbose:
                print("   ", dict(sorted(result.seen.items())), flush=True)
            is_broken |= result.broken is not None
            if name and is_broken:
                break
        wrong += is_broken != bool(name)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
