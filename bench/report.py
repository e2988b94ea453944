"""What a benchmark prints: figures as JSON lines on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence


class Report:
    """The figures of one scenario, and whether its limits were kept."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.is_within_limits = True

    def figure(
        self, system: str, figure: str, value: float, unit: str, **params: str | int | float
    ) -> None:
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

    def limit(self, what: str, value: float, bound: str, is_kept: bool) -> None:
        """Compare a figure with its limit, on stderr; `exit_status` remembers a miss."""
        self.is_within_limits &= is_kept
        say(f"{'ok    ' if is_kept else 'MISSED'} {what}: {value:.2f}, limit {bound}")

    def exit_status(self, check: bool) -> int:
        """The status to exit with: limits count only under --check."""
        return 1 if check and not self.is_within_limits else 0


def say(message: str) -> None:
    """Print to stderr."""
    print(message, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
