"""Break the SQL in many ways, one at a time, and see whether the tests notice.

`python -m correctness.mutate [--only TEXT] [--seed N] [--count N] [--limit N] [--minutes N]
[--again]`

There are two sets: mutants.py, and what generate.py draws from the built script. Each mutant is
installed on PostgreSQL 18 in a server of its own and meets the kill suite, which stops at the first
test that fails: the pgTAP files, those of the mutant's own plane first, then some Python tests.
Before that the suite is run with nothing changed; it must pass then, and says how long it takes.
Mutants are played two at a time.

What came of each mutant is kept in build/mutation, and a later run goes on from there. A mutant
that survives needs a row with a reason in SURVIVORS.md; without it, or when fewer than 90 % of a
set are killed, the command fails.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from correctness.generate import Mutant, generate
from correctness.mutants import MUTANTS
from tools import pgtap
from tools.edits import BUILT, apply_all
from tools.run_tests import PYTEST, TEST_SETTINGS
from tools.servers import BUILD, REPO, Cluster, cache_directory, ensure_tree, exit_on_sigterm

VERSION = 18  # the first that looks for extensions in a folder of ours
RESULTS = BUILD / "mutation"
SURVIVORS = REPO / "correctness/SURVIVORS.md"
ROW = re.compile(r"^\| (hand|generated) \| (.+?) \| (.+?) \|$", re.MULTILINE)
UNCHANGED = Mutant("control", "unchanged", ())
GROUPS = ("hand", "generated")
SEED = 6
COUNT = 40
AT_ONCE = 2  # mutants
LEAST_KILLED = 0.9
SUITE_SECONDS = 60
# What cannot end by itself is killed by these; the longest test takes a few seconds.
STATEMENT_TIMEOUT = "20s"
PYTHON_SECONDS = 120
VALIDATE = """
    SELECT plpgsql_validator(p.oid) FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
    WHERE p.pronamespace = 'awa'::regnamespace AND l.lanname = 'plpgsql'
"""
# Runs of pytest: files, and which of their tests. Left out of the guarantees is what meets others'
# transactions on the same server.
PYTHON_SUITE = (
    (
        "python",
        "guarantees lock_order keys unique",
        "takes_the_locks_of_the_model or published or equals_the_package or test_unique"
        " or test_guarantees and not another_call_of_the_same and not meets_no_dead_tuple",
    ),
    ("interleaver", "orders interleaver", "no_order_of_some_pairs or no_directed_schedule"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one mutant: killed, survived, or invalid when it could not be installed."""

    group: str
    name: str
    script: str  # digest of what was installed
    verdict: str
    by: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Check:
    """A part of the suite: says what failed, or nothing, and ends early when told to stop."""

    name: str
    run: Callable[[threading.Event], str]


# ---- a mutant in its server


@contextmanager
def staged(script: str) -> Iterator[Path]:
    """A folder in which a server finds this script as the extension, while it is played."""
    with tempfile.TemporaryDirectory(prefix="mutant-", dir=cache_directory()) as name:
        share = Path(name)
        extension = share / "extension"
        extension.mkdir()
        (extension / "awa.control").write_text((REPO / "extension/awa.control").read_text())
        (extension / BUILT.name).write_text(script)
        for path in (share, extension, *extension.iterdir()):
            path.chmod(0o755)  # for the user that servers run under
        yield share


def source_of(mutant: Mutant) -> str:
    """The file below sql/ that defines what a mutant changes; its tests have the same name."""
    wanted = [f"FUNCTION @extschema@.{edit.function}(" for edit in mutant.edits]
    for path in sorted((REPO / "sql").glob("*/*.sql")):
        if any(words in path.read_text() for words in wanted):
            return f"{path.parent.name}/{path.name}"
    return ""


def files_for(mutant: Mutant, seconds: dict[str, float]) -> list[Path]:
    """The pgTAP files: its own, those of its plane, and the others, short ones first."""
    source = source_of(mutant)
    plane = source.partition("/")[0]
    names = [str(path.relative_to(pgtap.TESTS)) for path in pgtap.TESTS.rglob("*.sql")]

    def late(name: str) -> tuple[bool, bool, float, str]:
        return name != source, not name.startswith(f"{plane}/"), seconds.get(name, 0.0), name

    return [pgtap.TESTS / name for name in sorted(names, key=late)]


def pgtap_check(runner: pgtap.Runner, path: Path) -> Check:
    def check(stop: threading.Event) -> str:
        try:
            report = runner.run_file(path)
        except RuntimeError as error:  # of a database that cannot be made or dropped any more
            return str(error).strip()
        return "; ".join(report.problems[:1])

    return Check(str(path.relative_to(pgtap.TESTS)), check)


def python_check(cluster: Cluster, script: Path, name: str, files: str, expression: str) -> Check:
    def check(stop: threading.Event) -> str:
        command = [sys.executable, *PYTEST, "-x", "-p", "no:cacheprovider"]
        command += [f"tests/python/test_{file}.py" for file in files.split()]
        command += ["-k", expression]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=REPO,
                env={**cluster.environment, "AWA_TEST_SCRIPT": str(script)},
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that the processes of tests can be ended with it
            )
            end = time.monotonic() + PYTHON_SECONDS
            while process.poll() is None:
                if stop.wait(0.1) or time.monotonic() > end:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    return "timeout"
            output.seek(0)
            text = output.read()
        # An edit of the interleaver's own may not find its place in a mutant: that proves nothing.
        if process.returncode == 0 or "ScriptError: function" in text:
            return ""
        found = re.search(r"^(?:FAILED|ERROR) \S+?::(.+)$", text, re.MULTILINE)
        said = re.search(r"^E   +(.+)$", text, re.MULTILINE)
        return f"{found[1]}: {said[1]}" if found and said else text[-200:]

    return Check(name, check)


def run_checks(checks: Sequence[Check], seconds: dict[str, float], at_once: int) -> str:
    """Run checks until one fails; return what failed, or nothing."""
    failed: list[str] = []
    stop = threading.Event()

    def run(check: Check) -> None:
        if stop.is_set():
            return
        began = time.monotonic()
        problem = check.run(stop)
        seconds[check.name] = round(time.monotonic() - began, 2)
        if problem and not stop.is_set():  # what was stopped tells nothing
            failed.append(f"{check.name}: {problem}")
            stop.set()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, checks))
    return failed[0] if failed else ""


def validate(runner: pgtap.Runner) -> None:
    """Compile the functions, which CREATE EXTENSION leaves to their first call."""
    done = runner.psql(pgtap.TEMPLATE, "-c", VALIDATE)
    if done.returncode != 0:
        raise RuntimeError(done.stdout)


class Stand:
    """Where mutants meet the suite, each in a copy of a server that has all but the extension."""

    def __init__(self) -> None:
        self.base = Cluster(ensure_tree(VERSION), TEST_SETTINGS)

    def __enter__(self) -> Self:
        self.base.start()
        pgtap.Runner(self.base).make_bare_template()
        self.base.shut_down()
        return self

    def __exit__(self, *_: object) -> None:
        self.base.stop()

    def play(
        self, mutant: Mutant, script: str, seconds: dict[str, float], at_once: int = 1
    ) -> Verdict:
        """Return what comes of one mutant, with so many of its checks at a time."""
        began = time.monotonic()
        verdict, by = self._meet_suite(mutant, script, seconds, at_once)
        took = round(time.monotonic() - began, 1)
        return Verdict(mutant.group, mutant.name, digest_of(script), verdict, by[:300], took)

    def _meet_suite(
        self, mutant: Mutant, script: str, seconds: dict[str, float], at_once: int
    ) -> tuple[str, str]:
        """Install a mutant, run the suite until a test fails; return the verdict and the test."""
        with staged(script) as share:
            settings = {
                **TEST_SETTINGS,
                "extension_control_path": f"{share}:$system",
                "statement_timeout": STATEMENT_TIMEOUT,
            }
            with Cluster(self.base.tree, settings, copy_of=self.base) as cluster:
                runner = pgtap.Runner(cluster)
                try:
                    runner.install()
                    validate(runner)
                except RuntimeError as error:
                    return "invalid", str(error).strip().splitlines()[0]
                built = share / "extension" / BUILT.name
                checks = [pgtap_check(runner, path) for path in files_for(mutant, seconds)]
                checks += [python_check(cluster, built, *words) for words in PYTHON_SUITE]
                by = run_checks(checks, seconds, at_once)
                return ("killed" if by else "survived"), by


# ---- results


def digest_of(script: str) -> str:
    return hashlib.sha256(script.encode()).hexdigest()[:16]


class Ledger:
    """Verdicts of this and of earlier runs, in a file for each set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._adding = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.verdicts: dict[tuple[str, str, str], Verdict] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text().splitlines():
                verdict = Verdict(**json.loads(line))
                self.verdicts[verdict.group, verdict.name, verdict.script] = verdict

    def find(self, mutant: Mutant, script: str) -> Verdict | None:
        return self.verdicts.get((mutant.group, mutant.name, digest_of(script)))

    def add(self, verdict: Verdict) -> None:
        self.verdicts[verdict.group, verdict.name, verdict.script] = verdict
        with self._adding, (self.folder / f"{verdict.group}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def read_reasons(path: Path) -> dict[tuple[str, str], str]:
    """The survivors that are explained: set and name, and why."""
    return {(group, name): why for group, name, why in ROW.findall(path.read_text())}


def judge(
    verdicts: Iterable[Verdict], reasons: dict[tuple[str, str], str]
) -> tuple[list[str], list[str]]:
    """Return the table of both sets, and what is wrong."""
    rows = [f"{'set':<10} {'killed':>7} {'survived':>9} {'percent':>8}"]
    problems: list[str] = []
    by_group: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_group.setdefault(verdict.group, []).append(verdict)
    for group, found in by_group.items():
        survived = [v for v in found if v.verdict == "survived"]
        killed = sum(v.verdict == "killed" for v in found)
        share = killed / max(killed + len(survived), 1)
        rows.append(f"{group:<10} {killed:>7} {len(survived):>9} {100 * share:>8.1f}")
        if share < LEAST_KILLED:
            problems.append(f"{group}: {100 * share:.1f} % killed, {100 * LEAST_KILLED:.0f} wanted")
        problems += [
            f"{v.group}: {v.name} survived, and {SURVIVORS.name} does not say why"
            for v in survived
            if (v.group, v.name) not in reasons
        ]
        if group == "hand":
            problems += [
                f"hand: {v.name} cannot be installed" for v in found if v.verdict == "invalid"
            ]
    return rows, problems


# ---- the run

Play = Callable[[Mutant, str, dict[str, float]], Verdict]


def describe(verdict: Verdict) -> str:
    return f"{verdict.seconds:6.1f} s  {verdict.verdict:<8}  {verdict.name}  {verdict.by}".rstrip()


def changes(mutant: Mutant) -> str:
    """The lines that a mutant takes away and puts in."""
    lines = [
        line
        for edit in mutant.edits
        for line in difflib.ndiff(edit.old.splitlines(), edit.new.splitlines())
        if line.startswith(("- ", "+ "))
    ]
    return "".join(f"\n            {line}" for line in lines)


class Run:
    """Plays mutants, two at a time, but not what is known, and none after its time."""

    def __init__(
        self, script: str, ledger: Ledger, play: Play, *, again: bool, minutes: float
    ) -> None:
        self.script = script
        self.play = play
        self.ledger = ledger
        self.again = again
        self.end = time.monotonic() + 60 * minutes
        self.left = 0  # mutants for which there was no time
        self.seconds = read_seconds()

    def play_set(self, mutants: Iterable[Mutant], count: int | None) -> list[Verdict]:
        """Play mutants until so many could be installed, or all."""
        source = iter(mutants)
        found: list[Verdict] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while count is None or len(found) < count:
                wanted = None if count is None else count - len(found)
                verdicts = list(pool.map(self.find_or_play, itertools.islice(source, wanted)))
                found += [v for v in verdicts if v is not None and not is_thrown_away(v)]
                self.left += verdicts.count(None)
                if count is None or None in verdicts or not verdicts:
                    break
        return found

    def find_or_play(self, mutant: Mutant) -> Verdict | None:
        """Return what comes of a mutant, or nothing when the time is over."""
        changed = apply_all(self.script, mutant.edits)
        verdict = self.ledger.find(mutant, changed)
        if verdict is None or (self.again and verdict.verdict == "survived"):
            if time.monotonic() > self.end:
                return None
            verdict = self.play(mutant, changed, dict(self.seconds))
            self.ledger.add(verdict)
            shown = changes(mutant) if verdict.verdict == "survived" else ""
            print(f"{describe(verdict)}{shown}", flush=True)
        return verdict


def is_thrown_away(verdict: Verdict) -> bool:
    """Whether another mutant is drawn for it."""
    return verdict.verdict == "invalid" and verdict.group == "generated"


def read_seconds() -> dict[str, float]:
    path = RESULTS / "seconds.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def check_unchanged(script: str, ledger: Ledger, stand: Stand) -> bool:
    """Whether the suite passes with nothing changed; if it has not been seen, look."""
    verdict = ledger.find(UNCHANGED, script)
    if verdict is None or verdict.verdict != "survived":
        seconds: dict[str, float] = {}
        verdict = stand.play(UNCHANGED, script, seconds, pgtap.JOBS)
        ledger.add(verdict)
        (RESULTS / "seconds.json").write_text(json.dumps(seconds, indent=1, sort_keys=True))
        if verdict.seconds > SUITE_SECONDS:
            print(f"the suite is to take at most {SUITE_SECONDS} s on an idle machine")
    print(describe(verdict), flush=True)
    return verdict.verdict == "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose set or name holds this")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="of the generated set, and of the order"
    )
    parser.add_argument("--count", type=int, default=COUNT, help="size of the generated set")
    parser.add_argument("--limit", type=int, help="so many mutants of each set at most")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no mutant after so long"
    )
    parser.add_argument("--again", action="store_true", help="play known survivors once more")
    arguments = parser.parse_args()
    exit_on_sigterm()
    print(f"seed of the generated set: {arguments.seed}", flush=True)
    script, ledger = BUILT.read_text(), Ledger(RESULTS)
    with Stand() as stand:
        if not check_unchanged(script, ledger, stand):
            print("the suite fails with nothing changed, so it tells nothing")
            return 1
        run = Run(script, ledger, stand.play, again=arguments.again, minutes=arguments.minutes)
        by_hand = [Mutant("hand", name, edits) for name, edits in MUTANTS.items()]
        random.Random(arguments.seed).shuffle(by_hand)  # so that a part is a sample of all planes
        drawn = itertools.islice(generate(script, arguments.seed), 2 * arguments.count)
        count = min(arguments.count, arguments.limit or arguments.count)
        verdicts: list[Verdict] = []
        for mutants, size in ((by_hand, arguments.limit), (drawn, count)):
            wanted = (m for m in mutants if arguments.only in f"{m.group} {m.name}")
            verdicts += run.play_set(wanted, size)
    rows, problems = judge(verdicts, read_reasons(SURVIVORS))
    if run.left:
        problems.append(f"no time for {run.left} mutants: the next run goes on with them")
    print("\n".join([*rows, *problems]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
