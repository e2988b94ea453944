"""What a benchmark prints: figures as JSON lines on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

Param = str | int | float
Params = dict[str, Param]


class Report:
    """The figures of one scenario, and whether its limits were kept."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.is_within_limits = True
        self.figure("machine", "cpus", os.cpu_count() or 0, "cpus", **machine())

    def figure(self, system: str, figure: str, value: float, unit: str, **params: Param) -> None:
        """Print one figure."""
        line = {
            "scenario": self.scenario,
            "system": system,
            "figure": figure,
            "value": round(value, 3),
            "unit": unit,
            "params": params,
        }
        print(json.dumps(line), flush=True)

    def series(
        self, system: str, figure: str, values: Sequence[float], unit: str, **params: Param
    ) -> float:
        """Print and return the median of some rounds, with their spread."""
        middle = median(values)
        spread = {"rounds": len(values), "min": round(min(values), 3), "max": round(max(values), 3)}
        self.figure(system, figure, middle, unit, **params, **spread)
        return middle

    def limit(self, what: str, value: float, bound: str, is_kept: bool) -> None:
        """Compare a figure with its limit, on stderr; `exit_status` remembers a miss."""
        self.is_within_limits &= is_kept
        say(f"{'ok    ' if is_kept else 'MISSED'} {what}: {value:.2f}, limit {bound}")

    def exit_status(self, check: bool) -> int:
        """The status to exit with: limits count only under --check."""
        return 1 if check and not self.is_within_limits else 0


def machine() -> Params:
    """What the figures depend on besides the systems."""
    models = re.findall(r"^model name\s*: (.*)$", read("/proc/cpuinfo"), re.MULTILINE)
    kilobytes = re.findall(r"^MemTotal:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": models[0] if models else platform.machine(),
        "memory_gb": round(int(kilobytes[0]) / 2**20) if kilobytes else 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "arguments": " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def read(path: str) -> str:
    """A file's text, or nothing where there is no such file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def say(message: str) -> None:
    """Print to stderr."""
    print(message, file=sys.stderr, flush=True)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stderr: the first column is text, the others are numbers."""
    cells = [list(head), *([cell_text(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    say(f"\n{title}")
    for number, line in enumerate(cells):
        first, *rest = (
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        say("  ".join([first, *rest]))
        if number == 0:
            say("  ".join("-" * width for width in widths))


def cell_text(value: object) -> str:
    """A value as a table shows it: three digits that matter, thousands apart."""
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
