"""Which lines the tests run: `python -m correctness.line_coverage [--only sql|python]`.

For SQL: the pgTAP files on PostgreSQL 15 under the profiler of plpgsql_check, which knows the
statements of PL/pgSQL functions, but not those in SQL functions and in dynamic SQL. For Python: the
package under coverage.py, its processes included, while the tests of client, worker and command
line run on PostgreSQL 18. Both fail below their floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.pgtap import TESTS, Runner
from tools.run_tests import PYPROJECT, PYTEST, TEST_SETTINGS
from tools.servers import BUILD, REPO, Cluster, ensure_tree, exit_on_sigterm

REPORTS = BUILD / "coverage"
SQL_VERSION, PYTHON_VERSION = 15, 18
SQL_FLOOR = 90.0
PYTHON_FLOOR = 80.0
PROFILER = {
    "shared_preload_libraries": "plpgsql,plpgsql_check",
    "plpgsql_check.profiler": "on",
    "plpgsql_check.profiler_max_shared_chunks": "50000",
}
LINES = """
    SELECT jsonb_build_array(p.oid::regprocedure, t.lineno,
                             coalesce(t.exec_stmts, 0) + coalesce(t.exec_stmts_err, 0), t.source)
    FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang,
         LATERAL plpgsql_profiler_function_tb(p.oid) t
    WHERE p.pronamespace = 'awa'::regnamespace AND l.lanname = 'plpgsql' AND t.cmds_on_row > 0
"""
PYTHON_TESTS = (
    "client",
    "cli",
    "connections",
    "embedded",
    "executors",
    "handlers",
    "keys",
    "pacing",
    "testing",
    "worker",
    "worker_process",
)


@dataclass(slots=True)
class Function:
    """How often each line of a function was run, by its number in the body."""

    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    source: dict[int, str] = field(default_factory=dict)

    @property
    def missed(self) -> list[int]:
        return sorted(line for line, count in self.runs.items() if count == 0)

    @property
    def covered(self) -> int:
        return len(self.runs) - len(self.missed)


class ProfilingRunner(Runner):
    """Runs pgTAP files and adds up what the profiler saw in the database of each."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.functions: dict[str, Function] = defaultdict(Function)
        self._adding = threading.Lock()

    def look_at(self, database: str) -> None:
        done = self.psql(database, "-c", LINES)
        if done.returncode != 0:
            raise RuntimeError(done.stdout)
        with self._adding:
            for row in done.stdout.splitlines():
                name, line, count, source = json.loads(row)
                self.functions[name].runs[line] += count
                self.functions[name].source[line] = source


def percent(covered: int, lines: int) -> float:
    return 100 * covered / lines if lines else 100.0


def report_sql(functions: Mapping[str, Function]) -> tuple[list[str], float]:
    """Return the report, function by function, and the share of all lines in percent."""
    rows = [f"{'lines':>6} {'run':>6} {'percent':>8}  function"]
    for name, found in sorted(functions.items()):
        share = percent(found.covered, len(found.runs))
        rows.append(f"{len(found.runs):>6} {found.covered:>6} {share:>8.1f}  {name}")
    never = sorted(name for name, found in functions.items() if not found.covered)
    rows += ["", f"never run: {', '.join(never) or 'no function'}"]
    rows += ["", "lines never run:"]
    for name, found in sorted(functions.items()):
        if found.covered:
            rows += [f"{name}:{line}: {found.source[line].strip()}" for line in found.missed]
    lines = sum(len(found.runs) for found in functions.values())
    covered = sum(found.covered for found in functions.values())
    share = percent(covered, lines)
    rows += ["", f"{covered} of {lines} lines in {len(functions)} functions: {share:.1f} %"]
    return rows, share


def cover_sql() -> bool:
    """Run the pgTAP files under the profiler; return whether enough lines were run."""
    with Cluster(ensure_tree(SQL_VERSION), {**TEST_SETTINGS, **PROFILER}) as cluster:
        runner = ProfilingRunner(cluster)
        reports = runner.run()
    rows, share = report_sql(runner.functions)
    (REPORTS / "sql.txt").write_text("\n".join(rows) + "\n")
    print("\n".join(row for row in rows if " 100.0  " not in row))
    failed = [report.name for report in reports if report.problems]
    if failed:
        print(f"of {TESTS.relative_to(REPO)} failed: {', '.join(failed)}")
    if share < SQL_FLOOR:
        print(f"SQL: {share:.1f} % of the lines are run, {SQL_FLOOR} % wanted")
    return not failed and share >= SQL_FLOOR


def cover_python() -> bool:
    """Run the Python tests under coverage.py; return whether enough lines were run."""
    coverage = [sys.executable, "-m", "coverage"]
    config = f"--rcfile={PYPROJECT}"
    tests = [f"tests/python/test_{name}.py" for name in PYTHON_TESTS]
    with Cluster(ensure_tree(PYTHON_VERSION), TEST_SETTINGS) as cluster:
        run = ["run", config, *PYTEST, *tests]
        tested = subprocess.run(
            [*coverage, *run], cwd=REPO, env=cluster.environment, check=False
        ).returncode
    subprocess.run([*coverage, "combine", config, "--quiet"], cwd=REPO, check=True)
    report = ["report", config, f"--fail-under={PYTHON_FLOOR}"]
    reported = subprocess.run([*coverage, *report], cwd=REPO, check=False).returncode
    return tested == 0 and reported == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["sql", "python"])
    only = parser.parse_args().only
    exit_on_sigterm()
    REPORTS.mkdir(parents=True, exist_ok=True)
    good = only == "python" or cover_sql()
    good = (only == "sql" or cover_python()) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
