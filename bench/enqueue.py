"""Enqueue: jobs a second by one producer, one at a time and in batches."""

from __future__ import annotations

import argparse
import sys

from bench.adapters import add_systems_option
from bench.producers import BATCHES, numbers, run
from bench.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.enqueue", description=__doc__)
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), metavar="N,...")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="fail when slower than a peer")
    add_systems_option(parser, "all")
    options = parser.parse_args()
    report = Report("enqueue")
    medians = run(report, [(1, batch) for batch in options.batches], options)
    one = medians.get((1, 1), {})
    peers = [value for name, value in one.items() if name not in ("awa", "naive")]
    if peers and "awa" in one:
        ratio = one["awa"] / max(peers)
        report.limit("one at a time, times the fastest peer", ratio, "> 1", ratio > 1)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
