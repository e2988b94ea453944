"""Run the static checks, then the SQL and Python tests on each server version, two at a time.

Prints one line per step; whole outputs are in build/logs/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tools.pgtap import Runner
from tools.servers import BUILD, REPO, VERSIONS, Cluster, ensure_tree, exit_on_sigterm

LOGS = BUILD / "logs"
PYPROJECT = "python/pyproject.toml"
PYTEST = ("-m", "pytest", "-c", PYPROJECT, "--rootdir", ".", "-q")
FOLDERS = ("python", "tests/python", "tools", "bench", "correctness", "examples")
CODE = [d for d in FOLDERS if (REPO / d).is_dir()]
TYPED = [
    d
    for d in ("python/src/awa", "tests/python", "tools", "bench", "correctness")
    if any((REPO / d).rglob("*.py"))
]
STATIC = {
    "ruff": ["-m", "ruff", "check", *CODE],
    "format": ["-m", "ruff", "format", "--check", *CODE],
    "mypy": ["-m", "mypy", "--strict", "--config-file", PYPROJECT, *TYPED],
    "structure": ["-m", "tools.check_structure"],
}
TAIL = 60  # lines of a failed step's output to print
# Two-phase commit is off by default.
TEST_SETTINGS = {"plpgsql.extra_errors": "all", "max_prepared_transactions": "8"}
MAX_SECONDS = 1200  # for one run of pytest
# The long tests in parts of less than half an hour, by names of their modules.
PARTS = {
    "cases": "test_b0 or test_b1 or test_b2",
    "crashes": "test_crashes",
    "races": "test_race or test_interleaver or test_stateful",
    "orders": "test_orders",
    "inputs": "test_fuzz",
    "models": "test_models",
}
PARTS["others"] = f"not ({' or '.join(PARTS.values())})"
NO_TESTS = 5  # pytest's exit code when nothing was selected
_printing = threading.Lock()


def step(name: str, body: Callable[[Path], tuple[bool, str]]) -> bool:
    """Run one step, which writes its log; print its summary, and the log's end if it failed."""
    start = time.monotonic()
    log = LOGS / f"{name.replace(' ', '-')}.log"
    try:
        good, summary = body(log)
    except Exception as error:  # noqa: BLE001 - reported as a failed step
        good, summary = False, type(error).__name__
        with log.open("a") as file:
            file.write(f"{error}\n")
    seconds = time.monotonic() - start
    with _printing:
        print(f"{name:<12} {'ok' if good else 'FAILED':<6} {seconds:6.1f} s  {summary}", flush=True)
        for line in [] if good else log.read_text().splitlines()[-TAIL:]:
            print(f"    {line}", flush=True)
    return good


def python(
    arguments: list[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
    good_codes: Collection[int] = (0,),
) -> tuple[bool, str]:
    """Run a Python command; its last line is the summary."""
    with log.open("w") as file:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=REPO, env=env, stdout=file, stderr=file, timeout=seconds, check=False
        )
    lines = log.read_text().strip().splitlines()
    return done.returncode in good_codes, lines[-1].strip("= ") if lines else ""


def pgtap(cluster: Cluster, pattern: str, log: Path) -> tuple[bool, str]:
    """Run the SQL tests."""
    reports = Runner(cluster).run(pattern)
    bad = [report for report in reports if report.problems]
    output = "".join(f"--- {r.name}\n{r.output}" for r in reports)
    output += "".join(f"{r.name}: {problem}\n" for r in bad for problem in r.problems)
    log.write_text(output)
    passed = sum(report.passed for report in reports)
    return not bad, f"{passed} passed in {len(reports)} files, {len(bad)} files failed"


def pytest(
    cluster: Cluster, pattern: str, long: bool, part: str | None, log: Path
) -> tuple[bool, str]:
    """Run the Python tests."""
    arguments = [*PYTEST, "--durations=10"]
    arguments += ["-m", "long"] if part else []
    arguments += ["-o", "faulthandler_timeout=120", "tests/python"]
    arguments += ["-k", pattern] if pattern else []
    arguments += ["--long"] if long else []
    good_codes = (0, NO_TESTS) if pattern else (0,)
    seconds = None if long else MAX_SECONDS
    return python(arguments, log, env=cluster.environment, seconds=seconds, good_codes=good_codes)


def test_version(version: int, pattern: str, long: bool, part: str | None) -> bool:
    """Run the tests on one server version, or a part of the long ones."""
    cluster: Cluster | None = None

    def start(log: Path) -> tuple[bool, str]:
        nonlocal cluster
        log.write_text("")
        cluster = Cluster(ensure_tree(version), TEST_SETTINGS)
        cluster.start()
        return True, f"{cluster.dsn}"

    if not step(f"{version} start", start) or cluster is None:
        return False
    try:
        steps = [] if part else [step(f"{version} pgtap", partial(pgtap, cluster, pattern))]
        steps.append(step(f"{version} pytest", partial(pytest, cluster, pattern, long, part)))
        return all(steps)
    finally:
        shutil.copyfile(cluster.log_file, LOGS / f"{version}-server.log")
        cluster.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", type=int, metavar="VERSION", help=f"{VERSIONS}")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--long", action="store_true", help="run the tests marked long as well")
    parser.add_argument("--part", choices=PARTS, help="of the tests marked long, and no others")
    parser.add_argument(
        "-k",
        default="",
        metavar="EXPRESSION",
        help="pytest's -k, and a part of a pgTAP file's name",
    )
    arguments = parser.parse_args()
    pattern, is_long = arguments.k, arguments.long
    if arguments.part:
        pattern, is_long = PARTS[arguments.part], True
    exit_on_sigterm()
    LOGS.mkdir(parents=True, exist_ok=True)
    good = True
    if arguments.static:
        checks = [step(name, partial(python, command)) for name, command in STATIC.items()]
        good = all(checks)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(test_version, v, pattern, is_long, arguments.part)
            for v in arguments.versions
        ]
        results = [run.result() for run in runs]
    good = good and all(results)
    print("all good" if good else f"failed; whole outputs are in {LOGS}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
