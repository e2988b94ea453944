"""The figures of result files, as bench/report.py printed them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORDER = (
    "awa",
    "awa-pg",
    "procrastinate",
    "pgqueuer",
    "graphile-worker",
    "pg-boss",
    "naive",
    "bare",
    "floor",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure."""

    system: str
    name: str
    value: float
    unit: str
    params: dict[str, Any]


class Results:
    """The figures of each scenario; later ones replace earlier ones of the same parameters."""

    def __init__(self, folder: Path) -> None:
        self._figures: dict[str, list[Figure]] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                figure = Figure(
                    entry["system"],
                    entry["figure"],
                    entry["value"],
                    entry["unit"],
                    entry["params"],
                )
                self._figures.setdefault(entry["scenario"], []).append(figure)

    def has(self, scenario: str) -> bool:
        """Whether the scenario was measured."""
        return scenario in self._figures

    def find(self, scenario: str, name: str, **params: Any) -> Iterator[Figure]:
        """The figures of a scenario with a name and some parameters, our system first."""
        found = [
            figure
            for figure in self._figures.get(scenario, [])
            if figure.name == name
            and all(figure.params.get(key) == value for key, value in params.items())
        ]
        return iter(sorted(found, key=lambda figure: place(figure.system)))

    def runs(self, scenario: str) -> list[dict[str, Any]]:
        """For each run: the machine it was made on, and the arguments of the command."""
        return [{"cpus": round(f.value), **f.params} for f in self.find(scenario, "cpus")]


def place(system: str) -> int:
    """Where a system stands in tables and charts."""
    return ORDER.index(system) if system in ORDER else len(ORDER)
