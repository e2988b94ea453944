"""Producers: jobs enqueued a second by some processes at once, in batches of some sizes."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from bench.adapters import Installed, System, add_systems_option, processes
from bench.cluster import server
from bench.report import Report, cell_text, say, table

PRODUCERS = (1, 2, 4, 8)
BATCHES = (1, 10, 100, 1_000)
START_NS = 300_000_000
LEAST_SHARE_FASTEST = 12 / 16
LEAST_RATIO = 0.85
EXTRA_SECONDS = 60

Cell = tuple[int, int]  # producers, batch
Rates = dict[Cell, dict[str, list[float]]]


def rate(installed: Installed, system: System, cell: Cell, seconds: float) -> float:
    """Jobs a second of all producers together, into an empty queue."""
    count, batch = cell
    with installed.database(system) as dsn, processes(system, count) as producers:
        for process in producers:
            process.tell("connect", dsn=dsn)
        for process in producers:
            process.answer()
        at = time.monotonic_ns() + START_NS
        for process in producers:
            process.tell("produce", seconds=seconds, batch=batch, at=at)
        answers = [process.answer(seconds + EXTRA_SECONDS) for process in producers]
    first, last = min(a["first"] for a in answers), max(a["last"] for a in answers)
    seconds_taken: float = (last - first) / 1e9
    jobs: int = sum(a["jobs"] for a in answers)
    return jobs / seconds_taken


def measure(
    installed: Installed,
    systems: Sequence[System],
    cells: Sequence[Cell],
    options: argparse.Namespace,
) -> Rates:
    """The rates of all rounds, the systems in turn."""
    rates: Rates = defaultdict(lambda: defaultdict(list))
    for number in range(1, options.rounds + 1):
        for cell in cells:
            for system in systems:
                value = rate(installed, system, cell, options.seconds)
                rates[cell][system.name].append(value)
            last = ", ".join(f"{name} {r[-1]:,.0f}" for name, r in rates[cell].items())
            say(f"round {number}, {cell[0]} producers, batch {cell[1]}: {last}")
    return rates


def print_figures(
    report: Report, rates: Rates, installed: Installed, seconds: float
) -> dict[Cell, dict[str, float]]:
    """Print a figure for each system and cell; their medians."""
    medians: dict[Cell, dict[str, float]] = {}
    for (count, batch), by_system in rates.items():
        medians[count, batch] = {name: median(values) for name, values in by_system.items()}
        for name, values in by_system.items():
            report.series(
                name,
                "enqueued_per_s",
                values,
                "jobs/s",
                producers=count,
                batch=batch,
                seconds=seconds,
                version=installed.settings[name].get("version", ""),
            )
    return medians


def print_grid(report: Report, medians: dict[Cell, dict[str, float]]) -> None:
    """Print who was fastest of the full job queues in each cell, and how we compare."""
    ratios, rows = [], []
    for (count, batch), rates in medians.items():
        queues = {name: value for name, value in rates.items() if name != "naive"}
        fastest = max(queues, key=lambda name: queues[name])
        others = [value for name, value in queues.items() if name != "awa"]
        ratio = queues["awa"] / max(others) if others and "awa" in queues else float("nan")
        ratios.append(ratio)
        rows.append([f"{count} x {batch}", *(cell_text(r) for r in rates.values()), fastest, ratio])
    names = list(next(iter(medians.values())))
    head = ["producers x batch", *names, "fastest queue", "awa / best peer"]
    table("jobs enqueued a second (medians)", head, rows)
    known = [ratio for ratio in ratios if ratio == ratio]
    if known:
        share = sum(ratio >= 1 for ratio in known) / len(known)
        report.limit(
            "share of cells where awa is the fastest full job queue",
            share,
            f">= {LEAST_SHARE_FASTEST}",
            share >= LEAST_SHARE_FASTEST,
        )
        report.limit(
            "least ratio to the fastest peer",
            min(known),
            f">= {LEAST_RATIO}",
            min(known) >= LEAST_RATIO,
        )


def run(
    report: Report, cells: Sequence[Cell], options: argparse.Namespace
) -> dict[Cell, dict[str, float]]:
    """Measure the cells and print everything; the medians."""
    with server() as running, Installed(running, options.systems) as installed:
        rates = measure(installed, options.systems, cells, options)
        medians = print_figures(report, rates, installed, options.seconds)
    print_grid(report, medians)
    return medians


def numbers(text: str) -> list[int]:
    """The numbers of an option."""
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.producers", description=__doc__)
    parser.add_argument("--producers", type=numbers, default=list(PRODUCERS), metavar="N,...")
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), metavar="N,...")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    add_systems_option(parser, "all")
    options = parser.parse_args()
    report = Report("producers")
    run(report, list(itertools.product(options.producers, options.batches)), options)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
