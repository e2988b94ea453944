"""Run pgTAP files, each in a database of its own, made from a template that has the extension."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.servers import REPO, Cluster

TESTS = REPO / "tests/sql"
TEMPLATE = "pgtap_template"
JOBS = 2
RESULT = re.compile(r"^(not )?ok\b(?P<text>.*)$", re.MULTILINE)
PLAN = re.compile(r"^1\.\.(\d+)", re.MULTILINE)
EXCUSED = re.compile(r"#\s*(todo|skip)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Report:
    """What one file printed, and how it did."""

    name: str
    output: str
    passed: int
    problems: list[str]


def judge(name: str, output: str, exit_code: int) -> Report:
    """Read TAP: a file is good if psql ended well, its plan is kept and no test failed."""
    results = list(RESULT.finditer(output))
    failed = [r["text"].strip() for r in results if r[1] and not EXCUSED.search(r["text"])]
    problems = [f"not ok {text}" for text in failed]
    plan = PLAN.search(output)
    if exit_code != 0:
        problems.append(f"psql exited with {exit_code}")
    if plan is None:
        problems.append("no plan")
    elif int(plan[1]) != len(results):
        problems.append(f"planned {plan[1]} tests, ran {len(results)}")
    return Report(name, output, len(results) - len(failed), problems)


class Runner:
    """Runs pgTAP files on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def psql(self, database: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = self.cluster.tree.psql(f"{self.cluster.dsn} dbname={database}", *arguments)
        return subprocess.run(
            command,
            env=self.cluster.tree.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def make_bare_template(self) -> None:
        """Make the database that those of the files are copied from, without the extension."""
        extensions = ["pgtap"] + (["plpgsql_check"] if self.cluster.tree.version == 15 else [])
        self._must("postgres", "-c", f"CREATE DATABASE {TEMPLATE}")
        self._must(
            TEMPLATE, *(w for name in extensions for w in ("-c", f"CREATE EXTENSION {name}"))
        )

    def install(self) -> None:
        """Install the extension in the template."""
        self._must(TEMPLATE, "-f", REPO / "tools/template.sql")

    def run_file(self, path: Path) -> Report:
        name = str(path.relative_to(TESTS))
        database = re.sub(r"\W", "_", name)
        self._must("postgres", "-c", f"CREATE DATABASE {database} TEMPLATE {TEMPLATE}")
        done = self.psql(database, "-f", path)
        self.look_at(database)
        self._must("postgres", "-c", f"DROP DATABASE {database} WITH (FORCE)")
        return judge(name, done.stdout, done.returncode)

    def look_at(self, database: str) -> None:
        """Do what is to be done with the database of a file before it goes: nothing here."""

    def run(self, pattern: str = "") -> list[Report]:
        """Run every file whose name holds the pattern."""
        files = [f for f in sorted(TESTS.rglob("*.sql")) if pattern in str(f.relative_to(TESTS))]
        if files:
            self.make_bare_template()
            self.install()
        with ThreadPoolExecutor(JOBS) as pool:
            return list(pool.map(self.run_file, files))

    def _must(self, database: str, *arguments: str | Path) -> None:
        done = self.psql(database, *arguments)
        if done.returncode != 0:
            raise RuntimeError(done.stdout)
