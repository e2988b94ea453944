"""The charts: bars for what is one figure a system, lines for what changes over time."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plots.results import Figure, Results

# Only this environment of its own has it.
matplotlib: Any = importlib.import_module("matplotlib")
matplotlib.use("Agg")
pyplot: Any = importlib.import_module("matplotlib.pyplot")

WIDTH, HEIGHT, DPI = 8.0, 3.6, 120
OURS, OTHERS, BASELINE = "#1f6f8b", "#9aa5b1", "#d5d9de"
BASELINES = ("naive", "floor", "bare")
LINES = {"awa": OURS, "awa-pg": "#c8553d", "graphile-worker": "#e0a458"}


def color(system: str) -> str:
    """The colour of a system's bar."""
    return OURS if system == "awa" else BASELINE if system in BASELINES else OTHERS


def bars(
    figures: Sequence[Figure], title: str, unit: str, file: Path, *, log: bool = False
) -> None:
    """One bar a system, with the spread of the rounds."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
    names = [f.system for f in figures]
    values = [f.value for f in figures]
    low = [f.value - f.params.get("min", f.value) for f in figures]
    high = [f.params.get("max", f.value) - f.value for f in figures]
    axes.barh(names, values, xerr=[low, high], color=[color(n) for n in names], log=log)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlabel(unit)
    for place, (value, spread) in enumerate(zip(values, high, strict=True)):
        label = f" {value:,.3g}" if value < 100 else f" {value:,.0f}"
        axes.annotate(label, (value + spread, place), va="center")
    axes.margins(x=0.12)
    save(figure, file)


def lines(results: Results, name: str, title: str, unit: str, file: Path, *, log: bool) -> None:
    """A figure of the pinned scenario over time, a line a system."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT))
    series: dict[str, list[tuple[float, float]]] = {}
    for found in results.find("pinned", name):
        series.setdefault(found.system, []).append((found.params["minute"], found.value))
    for system, points in series.items():
        minutes, values = zip(*sorted(points), strict=True)
        axes.plot(minutes, values, label=system, color=LINES.get(system, OTHERS), marker=".")
    axes.set_title(title)
    axes.set_xlabel("minutes under a pinned snapshot")
    axes.set_ylabel(unit)
    axes.set_yscale("symlog" if log else "linear")
    axes.set_ylim(bottom=0)
    axes.legend()
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Write a chart."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file, dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)


def draw(results: Results, folder: Path) -> None:
    """Draw what there are figures for."""
    for file in folder.glob("*.png"):
        file.unlink()
    single: list[tuple[str, str, dict[str, Any], str, str, bool]] = [
        ("drain", "jobs_per_s", {}, "No-op jobs drained by one worker process", "jobs/s", False),
        ("enqueue", "enqueued_per_s", {"batch": 1}, "Enqueued one at a time", "jobs/s", False),
        ("enqueue", "enqueued_per_s", {"batch": 1_000}, "Enqueued by 1,000", "jobs/s", False),
        ("latency", "p50_ms", {"load": "steady"}, "Enqueue to handler, p50", "ms", False),
        ("latency", "p99_ms", {"load": "steady"}, "Enqueue to handler, p99", "ms", True),
        ("wal", "wal_bytes_per_job", {"batch": 100}, "WAL, whole life, batch 100", "bytes", False),
    ]
    for scenario, name, params, title, unit, log in single:
        found = list(results.find(scenario, name, **params))
        if found:
            suffix = "".join(f"-{value}" for key, value in params.items() if key == "batch")
            part = f"-{name.removesuffix('_ms')}" if scenario == "latency" else suffix
            bars(found, title, unit, folder / f"{scenario}{part}.png", log=log)
    over_time: list[tuple[str, str, str, bool]] = [
        ("dead_tuples", "Dead rows in the tables", "rows", True),
        ("catalog_dead_tuples", "Dead rows in the catalog", "rows", True),
        ("table_bytes", "Size of the tables", "bytes", True),
        ("p99_ms", "Enqueue to handler, p99", "ms", True),
    ]
    for name, title, unit, log in over_time:
        if any(True for _ in results.find("pinned", name)):
            lines(results, name, title, unit, folder / f"pinned-{name}.png", log=log)
