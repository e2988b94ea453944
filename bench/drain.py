"""Drain: no-op jobs preloaded, one worker process, jobs a second from its start to its end."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from bench.adapters import Installed, Process, System, add_systems_option
from bench.cluster import server
from bench.report import Report, say, table

MOST_SECONDS = 600
LEAST_TIMES_NAIVE = 1.0
LEAST_TIMES_BEST_PEER = 1.5
LEAST_TIMES_AWA_PG = 8.0


def jobs_per_second(installed: Installed, system: System, jobs: int, concurrency: int) -> float:
    """One drain by one worker process."""
    with installed.database(system, jobs) as dsn, Process(system) as process:
        done = process.ask(
            "drain", dsn=dsn, jobs=jobs, concurrency=concurrency, within=MOST_SECONDS
        )
    seconds: float = (done["last"] - done["first"]) / 1e9
    return jobs / seconds


def compare(report: Report, rates: Mapping[str, float]) -> None:
    """Say whether our rate is what it should be, beside each other one that was measured."""
    limits = {name: LEAST_TIMES_BEST_PEER for name in rates if name not in ("awa", "naive")}
    limits |= {"naive": LEAST_TIMES_NAIVE, "awa-pg": LEAST_TIMES_AWA_PG}
    for name, least in limits.items():
        if name in rates and "awa" in rates:
            ratio = rates["awa"] / rates[name]
            report.limit(f"drain, times {name}", ratio, f">= {least}", ratio >= least)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.drain", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=1000, help="of the awa worker")
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    add_systems_option(parser, "awa,naive")
    options = parser.parse_args()
    report = Report("drain")
    rates: dict[str, list[float]] = defaultdict(list)
    jobs = {system.name: min(options.jobs, system.most_jobs) for system in options.systems}
    with server() as running, Installed(running, options.systems) as installed:
        for number in range(1, options.rounds + 1):
            for system in options.systems:
                concurrency = options.concurrency if system.name == "awa" else 0
                rate = jobs_per_second(installed, system, jobs[system.name], concurrency)
                rates[system.name].append(rate)
            last = ", ".join(f"{name} {r[-1]:,.0f} jobs/s" for name, r in rates.items())
            say(f"{last} (round {number})")
        settings = installed.settings
    if "awa" in settings:
        settings["awa"]["concurrency"] = options.concurrency
    for name, values in rates.items():
        report.series(name, "jobs_per_s", values, "jobs/s", jobs=jobs[name], **settings[name])
    medians = {name: median(values) for name, values in rates.items()}
    table(
        "no-op jobs drained by one worker process, jobs/s",
        ["system", "median", "min", "max", "jobs"],
        [[name, medians[name], min(r), max(r), jobs[name]] for name, r in rates.items()],
    )
    compare(report, medians)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
