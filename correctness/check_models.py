"""Check the Promela models: `python -m correctness.check_models [--short] [MODEL...]`.

A model passes when each of its configurations is searched to the end without an error, each of its
mutants is refuted by the invariant that it names, and every statement is reached but those marked.
The comment at the head of a model has lines for this program; what is indented more continues one:

    invariant NAME: what must hold
    check: -DNAME=VALUE ... -mDEPTH [-a]
        a configuration to search; with -a for its LTL properties, without it for its assertions
    short: the same
        a small one: for tests, mutants, and to find unreached statements
    mutants: the same
        one more in which to look for mutants that no small one refutes
    mutant NAME: what is wrong; refuted by INVARIANT

An assertion is `INVARIANT(NAME, condition)` of invariant.inc, an LTL property has the name of its
invariant, and pan's invalid end state is NO_DEADLOCK. A statement that no short configuration
reaches has a comment `unreached: why` behind it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from correctness.spin import Options, Search, preprocessed, search

MODELS = Path(__file__).resolve().parent / "models"
HEAD = re.compile(r"\A\s*/\*(.*?)\*/", re.DOTALL)
ENTRY = re.compile(r"(invariant|check|short|mutants?)\b ?(\w*): (.*)")
REFUTED = re.compile(r"(.*); refuted by (\w+)")
LTL = re.compile(r"^\s*ltl\s+(\w+)\s*\{", re.MULTILINE)
MARK = re.compile(r"/\* unreached: .*?\*/")
NO_DEADLOCK = "NO_DEADLOCK"
SHORT_SECONDS = 300.0
FULL_SECONDS = 1800.0


class ModelError(Exception):
    """A model's file says something that cannot be."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A known wrong variant, compiled in by its name."""

    name: str
    what: str
    invariant: str


@dataclass(frozen=True, slots=True)
class Model:
    """What the head of a model's file says, and the statements that it expects to be unreached."""

    path: Path
    invariants: dict[str, str]
    checks: tuple[Options, ...]
    shorts: tuple[Options, ...]
    hunts: tuple[Options, ...]  # where mutants are looked for
    mutants: tuple[Mutant, ...]
    claims: tuple[str, ...]
    unreached_lines: frozenset[int]

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Refutation:
    """What came of a mutant: what is wrong about it, or the row for the table."""

    problem: str = ""
    row: str = ""


@dataclass(slots=True)
class Report:
    """What was found about one model, good and bad."""

    model: Model
    rows: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    trails: list[str] = field(default_factory=list)


# ---- the head of a model


def head_entries(text: str, name: str) -> list[tuple[str, str, str]]:
    """Return kind, name and words of each line for this program."""
    head = HEAD.match(text)
    if head is None:
        raise ModelError(f"{name}: no comment at its head")
    entries: list[tuple[str, str, str]] = []
    is_open = False
    for line in head[1].splitlines():
        body = re.sub(r"^ \* ?", "", line)
        entry = ENTRY.fullmatch(body.rstrip())
        if entry:
            entries.append((entry[1], entry[2], entry[3]))
            is_open = True
        elif is_open and body.startswith("    "):
            kind, label, words = entries[-1]
            entries[-1] = (kind, label, f"{words} {body.strip()}")
        else:
            is_open = False
    return entries


def read_mutant(name: str, words: str, invariants: dict[str, str], file: str) -> Mutant:
    parts = REFUTED.fullmatch(words)
    if parts is None:
        raise ModelError(f"{file}: mutant {name} does not say which invariant refutes it")
    if parts[2] not in invariants:
        raise ModelError(f"{file}: mutant {name} names {parts[2]}, which is no invariant of it")
    return Mutant(name, parts[1], parts[2])


def read_model(path: Path) -> Model:
    """Read a model; raise ModelError where it cannot be checked as it is."""
    text = path.read_text()
    entries = head_entries(text, path.name)
    invariants = {name: words for kind, name, words in entries if kind == "invariant"}
    try:
        options = [(kind, Options.parse(words)) for kind, name, words in entries if not name]
    except ValueError as error:
        raise ModelError(f"{path.name}: {error}") from error
    checks = tuple(o for kind, o in options if kind == "check")
    shorts = tuple(o for kind, o in options if kind == "short") or checks
    mutants = tuple(
        read_mutant(name, words, invariants, path.name)
        for kind, name, words in entries
        if kind == "mutant"
    )
    body = text[len(HEAD.match(text)[0]) :]  # type: ignore[index] # head_entries has seen it
    if not checks:
        raise ModelError(f"{path.name}: no line `check:`")
    if not mutants:
        raise ModelError(f"{path.name}: no mutant, so nothing shows that it can fail")
    for mutant in mutants:
        if not re.search(rf"^#.*\b{mutant.name}\b", body, re.MULTILINE):
            raise ModelError(f"{path.name}: mutant {mutant.name} changes nothing")
    for name in re.findall(r"^#\s*(?:ifdef|ifndef)\s+([A-Z]\w+)\s*$", body, re.MULTILINE):
        is_bound = re.search(rf"^#define {name}\b", body, re.MULTILINE)
        if not is_bound and name not in {mutant.name for mutant in mutants}:
            raise ModelError(f"{path.name}: #ifdef {name} is no mutant of its head")
    used = set(re.findall(r"\bINVARIANT\((\w+),", body)) | set(LTL.findall(body)) | {NO_DEADLOCK}
    if used != invariants.keys() | {NO_DEADLOCK}:
        odd = ", ".join(sorted(used ^ (invariants.keys() | {NO_DEADLOCK})))
        raise ModelError(
            f"{path.name}: asserted and not in its head, or the other way round: {odd}"
        )
    lines = enumerate(text.splitlines(), 1)
    return Model(
        path=path,
        invariants=invariants,
        checks=checks,
        shorts=shorts,
        hunts=(*shorts, *(o for kind, o in options if kind == "mutants")),
        mutants=mutants,
        claims=tuple(LTL.findall(body)),
        unreached_lines=frozenset(number for number, line in lines if MARK.search(line)),
    )


# ---- judging


def violated(model: Model, error: str, claim: str | None) -> str:
    """Return the invariant that an error of pan is about, or the error where it is about none."""
    name: str
    for name in re.findall(r"\w+", error):
        if name in model.invariants:
            return name
    if "invalid end state" in error:
        return NO_DEADLOCK
    return error if claim is None else claim


def claims_of(model: Model, options: Options) -> Sequence[str | None]:
    if not options.searches_cycles:
        return (None,)
    if not model.claims:
        raise ModelError(
            f"{model.path.name}: `{options.text}` asks for LTL properties, and it has none"
        )
    return model.claims


def describe(found: Search) -> str:
    size = f"{found.states:>12,} states {found.depth:>8,} deep {found.mebibytes:>7.0f} MiB"
    return f"{size} {found.seconds:>7.1f} s"


def check_configuration(report: Report, options: Options, claim: str | None, found: Search) -> None:
    what = f"{report.model.name} {options.text}{f' {claim}' if claim else ''}"
    report.rows.append(f"{describe(found)}  {what}")
    for error in found.errors:
        name = violated(report.model, error, claim)
        report.problems.append(f"{what}: {name} does not hold ({error})")
        report.trails.append(found.trail)
    report.problems += [f"{what}: not exhaustive: {reason}" for reason in found.incomplete]


def check_unreached(report: Report, searches: Iterable[Search]) -> None:
    """Report statements that no search reaches, but for those marked, and marks of others."""
    compiled: set[tuple[int, str]] = set()
    reached: set[tuple[int, str]] = set()
    for found in searches:
        compiled |= found.compiled.keys() | found.unreached.keys()
        # An inline stands in several places, and need not be reached in each.
        reached |= {key for key, n in found.compiled.items() if n > found.unreached[key]}
    lines = report.model.path.read_text().splitlines()
    marked = report.model.unreached_lines
    missed = {number for number, _ in compiled - reached}
    name = report.model.path.name
    for number in sorted(missed - marked):
        report.problems.append(f"{name}:{number}: never reached: {lines[number - 1].strip()}")
    for number in sorted(marked - missed):
        text = lines[number - 1].strip()
        report.problems.append(f"{name}:{number}: marked as unreached, and is not: {text}")


def refute(model: Model, mutant: Mutant) -> Refutation:
    """Look for an error of a mutant in the small configurations that its change touches."""
    name = f"{model.name}: mutant {mutant.name}"
    for options in model.hunts:
        if preprocessed(model.path, options) == preprocessed(model.path, options, mutant.name):
            continue
        for claim in claims_of(model, options):
            found = search(
                model.path,
                options,
                mutant=mutant.name,
                claim=claim,
                seconds=SHORT_SECONDS,
                is_small=True,
            )
            names = {violated(model, error, claim) for error in found.errors}
            if not names and found.incomplete:
                return Refutation(f"{name}: {'; '.join(found.incomplete)}")
            if names == {mutant.invariant}:
                row = f"{describe(found)}  {model.name} {mutant.name}: {mutant.invariant}"
                return Refutation(row=f"{row} ({options.text})")
            if names:
                text = ", ".join(sorted(names))
                return Refutation(f"{name}: refuted by {text}, not by {mutant.invariant}")
    return Refutation(f"{name} passes: {mutant.what}")


def check_model(path: Path, pool: ThreadPoolExecutor, *, is_short: bool) -> Report:
    """Search all configurations of a model and all its mutants."""
    model = read_model(path)
    report = Report(model)
    if not is_short:
        # One by one: each may need most of the memory.
        for options in model.checks:
            for claim in claims_of(model, options):
                found = search(path, options, claim=claim, seconds=FULL_SECONDS)
                check_configuration(report, options, claim, found)
    small = [(options, claim) for options in model.shorts for claim in claims_of(model, options)]
    futures = [
        pool.submit(
            search, path, options, claim=claim, by_statement=not is_short, seconds=SHORT_SECONDS
        )
        for options, claim in small
    ]
    refutations = [pool.submit(refute, model, mutant) for mutant in model.mutants]
    searches = [future.result() for future in futures]
    for (options, claim), found in zip(small, searches, strict=True):
        check_configuration(report, options, claim, found)
    if not is_short and not report.problems:
        check_unreached(report, searches)
    for refutation in (future.result() for future in refutations):
        report.problems += [refutation.problem] if refutation.problem else []
        report.rows += [refutation.row] if refutation.row else []
    return report


def find_models(names: Sequence[str]) -> list[Path]:
    paths = {path.stem: path for path in sorted(MODELS.glob("*.pml"))}
    unknown = sorted(set(names) - paths.keys())
    if unknown:
        raise ModelError(f"no model {', '.join(unknown)}; there are {', '.join(paths)}")
    return [path for name, path in paths.items() if not names or name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the Promela models of correctness/models.")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--short", action="store_true", help="the short configurations alone")
    parser.add_argument("--jobs", type=int, default=2, help="so many small searches at a time")
    arguments = parser.parse_args()
    good = True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            for path in find_models(arguments.models):
                report = check_model(path, pool, is_short=arguments.short)
                for row in report.rows:
                    print(row, flush=True)
                for problem in report.problems:
                    print(f"FAILED  {problem}", flush=True)
                for trail in report.trails[:1]:
                    print(trail, flush=True)
                good = good and not report.problems
        except (ModelError, RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"FAILED  {error}", flush=True)
            return 1
    print("models: all hold, all mutants are refuted" if good else "models: failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
