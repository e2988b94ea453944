"""Rewrite the tables of docs/benchmarks.md and its charts from result files.

A table stands between `<!-- NAME -->` and `<!-- end -->`; the text around them is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.plots import charts
from bench.plots.results import Results, place

REPO = Path(__file__).resolve().parent.parent.parent
BLOCK = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HIDDEN = {"rounds", "min", "max", "jobs", "rate", "seconds", "load", "minutes", "minute"}
PINNED = (
    "p50_ms",
    "p99_ms",
    "claim_p99_ms",
    "buffers_per_claim",
    "buffers_per_job",
    "dead_tuples",
    "catalog_dead_tuples",
    "table_bytes",
)

Rows = Sequence[Sequence[object]]


def text(value: object) -> str:
    """A value with three digits that matter."""
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def markdown(head: Sequence[str], rows: Rows) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *([text(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def pivot(results: Results, scenario: str, name: str, row: str, column: str, first: str) -> str:
    """A table of one figure: `row` and `column` are parameters, or `system`."""
    cells: dict[object, dict[object, float]] = defaultdict(dict)
    columns: dict[object, None] = {}
    for figure in results.find(scenario, name):
        values = {**figure.params, "system": figure.system}
        cells[values[row]][values[column]] = figure.value
        columns[values[column]] = None
    head = [first, *(text(c) for c in columns)]
    return markdown(head, [[r, *(v.get(c, "") for c in columns)] for r, v in cells.items()])


def drain(results: Results) -> str:
    rows = []
    for figure in results.find("drain", "jobs_per_s"):
        params = figure.params
        settings = ", ".join(f"{k} {v}" for k, v in params.items() if k not in HIDDEN)
        spread = f"{text(params['min'])} to {text(params['max'])}"
        rows.append([figure.system, figure.value, spread, params["jobs"], settings])
    return markdown(["system", "jobs/s", "spread", "jobs", "version and settings"], rows)


def producers(results: Results) -> str:
    cells: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for figure in results.find("producers", "enqueued_per_s"):
        cells[figure.params["producers"], figure.params["batch"]][figure.system] = figure.value
    systems = sorted({name for rates in cells.values() for name in rates}, key=place)
    rows = []
    for (count, batch), rates in sorted(cells.items()):
        peers = [value for name, value in rates.items() if name not in ("awa", "naive")]
        ratio = rates["awa"] / max(peers) if peers and "awa" in rates else ""
        rows.append([f"{count} x {batch:,}", *(rates.get(s, "") for s in systems), ratio])
    return markdown(["producers x batch", *systems, "awa / best peer"], rows)


def latency(results: Results) -> str:
    names = ("p50_ms", "p95_ms", "p99_ms", "enqueued_per_s", "lost_jobs")
    rows: dict[str, list[object]] = {}
    for name in names:
        for figure in results.find("latency", name, load="steady"):
            rows.setdefault(figure.system, [figure.system]).append(figure.value)
    head = ["system", "p50 ms", "p95 ms", "p99 ms", "enqueued/s", "never begun"]
    idle: dict[str, list[object]] = {}
    for name in ("p50_ms", "p99_ms"):
        for figure in results.find("latency", name, load="idle"):
            idle.setdefault(figure.system, [figure.system]).append(figure.value)
    alone = markdown(["one job at a time", "p50 ms", "p99 ms"], list(idle.values()))
    return markdown(head, list(rows.values())) + (f"\n{alone}" if idle else "")


def wal(results: Results) -> str:
    whole: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    names = ("wal_bytes_per_job", "wal_bytes_per_job_with_full_pages")
    for name in names:
        for figure in results.find("wal", name):
            whole[figure.system][name, figure.params["batch"]] = figure.value
    columns = [(name, batch) for name in names for batch in (1, 100)]
    rows = [[s, *(v.get(c, "") for c in columns)] for s, v in whole.items()]
    head = ["system", "batch 1", "batch 100", "batch 1, full pages", "batch 100, full pages"]
    parts = [
        [figure.params["relation"], figure.value]
        for figure in results.find("wal", "wal_bytes_per_job_by_relation", batch=100)
        if figure.system == "awa" and figure.value >= 1
    ]
    return markdown(head, rows) + "\n" + markdown(["awa, batch 100, by relation", "bytes"], parts)


def prune(results: Results) -> str:
    rows: dict[str, list[object]] = {}
    for name in ("p50_ms", "p99_ms", "max_ms"):
        for figure in results.find("prune", name):
            call = f"{figure.params['call']} {figure.params['when']}"
            rows.setdefault(call, [call]).append(figure.value)
    return markdown(["call", "p50 ms", "p99 ms", "max ms"], list(rows.values()))


def deadline(results: Results) -> str:
    rows: dict[str, list[object]] = {}
    for name in ("jobs_per_s", "wal_bytes_per_job"):
        for figure in results.find("deadline", name):
            case = figure.params["case"]
            rows.setdefault(case, [case]).append(figure.value)
    table = markdown(["claims", "jobs/s", "WAL bytes a job"], list(rows.values()))
    ratios = [figure.value for figure in results.find("deadline", "rate_ratio")]
    return table + "".join(f"\nMedian ratio of the pairs: {text(ratio)}.\n" for ratio in ratios)


def pinned(results: Results) -> str:
    rows: list[list[object]] = []
    for name in PINNED:
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for figure in results.find("pinned", name):
            series[figure.system].append((figure.params["minute"], figure.value))
        for system, points in series.items():
            values = [value for _, value in sorted(points)]
            rows.append([f"{system}: {name.replace('_', ' ')}", values[0], values[-1], max(values)])
    return markdown(["figure", "first minute", "last minute", "most"], rows)


def soak(results: Results) -> str:
    rows: list[list[object]] = []
    for figure in results.find("soak", "jobs"):
        rows += [["minutes", figure.params["minutes"]], ["workers killed", figure.params["kills"]]]
        rows.append(["jobs", int(figure.value)])
    rows += [
        [figure.params["what"], int(figure.value)]
        for figure in results.find("soak", "ledger_differences")
    ]
    memory: dict[str, list[float]] = defaultdict(list)
    for figure in results.find("soak", "memory_bytes"):
        memory[figure.params["process"].split()[0]].append(figure.value)
    rows += [[f"largest {k}, MB", max(values) / 2**20] for k, values in memory.items()]
    return markdown(["", ""], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "drain": drain,
    "enqueue": lambda r: pivot(r, "enqueue", "enqueued_per_s", "system", "batch", "jobs/s, batch"),
    "insert": lambda r: pivot(r, "insert", "inserted_per_s", "call", "batch", "jobs/s, batch"),
    "producers": producers,
    "latency": latency,
    "wal": wal,
    "workers": lambda r: pivot(
        r, "workers", "jobs_per_s", "handler", "processes", "jobs/s, processes"
    ),
    "prune": prune,
    "deadline": deadline,
    "pinned": pinned,
    "soak": soak,
}


def command(name: str, arguments: str, *, to: str = ">") -> str:
    """How a scenario's result file is made, or added to."""
    more = f' BENCH_ARGS="{arguments}"' if arguments else ""
    return f"`make bench SCENARIO={name}{more} {to} bench/results/{name}.jsonl`"


def block(name: str, results: Results, images: Path, docs: Path) -> str:
    """A table with its charts, the command that made it, and the machine."""
    if not results.has(name):
        return f"No figures yet: {command(name, '')}\n"
    parts = [TABLES[name](results)]
    for file in sorted(images.glob(f"{name}*.png")):
        title = re.sub("[-_]", " ", file.stem)
        parts.append(f"![{title}]({file.relative_to(docs)})\n")
    for i, run in enumerate(results.runs(name)):
        made = command(name, run.pop("arguments", ""), to=">>" if i else ">")
        where = ", ".join(f"{key} {value}" for key, value in run.items())
        parts.append(f"Measured by {made}: {where}.\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.plots.page", description=__doc__)
    parser.add_argument("--results", type=Path, default=REPO / "bench/results")
    parser.add_argument("--page", type=Path, default=REPO / "docs/benchmarks.md")
    options = parser.parse_args()
    results = Results(options.results)
    images = options.page.with_suffix("")
    charts.draw(results, images)

    def renew(found: re.Match[str]) -> str:
        content = block(found["name"], results, images, options.page.parent)
        return f"{found[1]}{content}{found[3]}"

    options.page.write_text(BLOCK.sub(renew, options.page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
