"""BLAKE3 in PL/pgSQL: the time of one digest, and of one unique key, by the length of its input."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

from bench.cluster import connect, server
from bench.report import Report

LENGTHS = {16: 400, 100: 400, 1024: 100, 16384: 10}  # bytes: digests
LIMIT_BYTES = 100
LIMIT_MS = 1.0


def median_ms(call: Callable[[bytes], object], length: int, repeats: int) -> float:
    """Median time of a call on random bytes, in milliseconds, the first one left out."""
    chance = random.Random(length)
    times = []
    for _ in range(repeats + 1):
        data = chance.randbytes(length)
        start = time.perf_counter()
        call(data)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.blake3", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a limit is missed")
    options = parser.parse_args()
    report = Report("blake3")
    with server() as running, running.awa_database() as dsn, connect(dsn) as conn:
        for length, repeats in LENGTHS.items():
            digest = median_ms(
                lambda data: conn.execute("SELECT awa._blake3(%s)", [data]).fetchone(),
                length,
                repeats,
            )
            key = median_ms(
                lambda data: conn.execute(
                    "SELECT awa.unique_key('k', NULL, to_jsonb(%s::text), NULL)",
                    [data.hex()[: len(data)]],
                ).fetchone(),
                length,
                repeats,
            )
            report.figure("awa", "digest_ms", digest, "ms", bytes=length)
            report.figure("awa", "unique_key_ms", key, "ms", bytes=length)
            if length == LIMIT_BYTES:
                what = f"milliseconds a key of {length} bytes"
                report.limit(what, key, f"< {LIMIT_MS}", key < LIMIT_MS)
    return report.exit_status(options.check)


if __name__ == "__main__":
    sys.exit(main())
