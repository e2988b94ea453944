"""The models of the engine hold, known wrong variants are refuted, and the runner can fail."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from correctness import check_models
from correctness.check_models import MODELS, ModelError, Report, check_model, read_model

REPO = MODELS.parent.parent
MAPPING = (MODELS.parent / "MAPPING.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| ([\w/.]+) \|$", re.MULTILINE)
NAMES = sorted(path.stem for path in MODELS.glob("*.pml"))

LOCKED = """\
/*
 * Two processes that count in turn.
 *
 * invariant ONE_INSIDE: no two are between lock and unlock.
 * check: -DPEOPLE=3 -m1000
 * short: -DPEOPLE=2 -m1000
 * mutant NO_LOCK: nobody locks;
 *     refuted by ONE_INSIDE
 */
#include "invariant.inc"

hidden byte ONE_INSIDE;
byte inside, lock;

active [PEOPLE] proctype person() {
#ifdef NO_LOCK
    lock = 1;
#else
    atomic { lock == 0 -> lock = 1 }
#endif
    inside++;
    INVARIANT(ONE_INSIDE, inside == 1);
    inside--;
    lock = 0
}
"""


@pytest.fixture(scope="module", autouse=True)
def _once(server_version: int) -> None:
    # Models do not depend on the server: once is enough.
    if server_version != 18:
        pytest.skip("models are checked beside PostgreSQL 18")
    if shutil.which("gcc") is None:
        pytest.skip("models need a compiler: apt-get install gcc")


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("name", NAMES)
def test_a_model_holds_and_its_mutants_are_refuted(name: str, pool: ThreadPoolExecutor) -> None:
    report = check_model(MODELS / f"{name}.pml", pool, is_short=True)
    assert report.problems == []
    assert len(report.rows) >= len(report.model.mutants) + len(report.model.shorts)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_model_holds_in_full(name: str, pool: ThreadPoolExecutor) -> None:
    assert check_model(MODELS / f"{name}.pml", pool, is_short=False).problems == []


# ---- the runner


def check_text(folder: Path, text: str, pool: ThreadPoolExecutor) -> Report:
    (folder / "invariant.inc").write_text((MODELS / "invariant.inc").read_text())
    path = folder / "locked.pml"
    path.write_text(text)
    return check_model(path, pool, is_short=False)


def test_a_sound_model_passes(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    assert check_text(tmp_path, LOCKED, pool).problems == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(
            (
                "#ifdef NO_LOCK\n    lock = 1;",
                "#ifdef NO_LOCK\n    atomic { lock == 0 -> lock = 1 }",
            ),
            "mutant NO_LOCK passes: nobody locks",
            id="a mutant that is sound",
        ),
        pytest.param(
            ("    inside++;", "#ifdef NO_LOCK\n    lock == 2;\n#endif\n    inside++;"),
            "mutant NO_LOCK: refuted by NO_DEADLOCK, not by ONE_INSIDE",
            id="a mutant that another invariant refutes",
        ),
        pytest.param(
            ("atomic { lock == 0 -> lock = 1 }", "lock == 0 -> lock = 1"),
            "ONE_INSIDE does not hold",
            id="a model that does not hold",
        ),
        pytest.param(("    lock = 0\n", ""), "NO_DEADLOCK does not hold", id="a deadlock"),
        pytest.param(
            ("-DPEOPLE=2 -m1000", "-DPEOPLE=2 -m5"), "max search depth too small", id="no depth"
        ),
        pytest.param(
            (
                "    inside--;",
                "    inside--;\n    if\n    :: inside > 7 -> inside = 7\n    :: else\n    fi;",
            ),
            "never reached: :: inside > 7",
            id="a statement that is never reached",
        ),
        pytest.param(
            ("    inside--;", "    inside--; /* unreached: nobody leaves */"),
            "marked as unreached, and is not",
            id="a mark without reason",
        ),
    ],
)
def test_the_runner_fails(
    change: tuple[str, str], problem: str, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    assert change[0] in LOCKED
    report = check_text(tmp_path, LOCKED.replace(*change), pool)
    assert [p for p in report.problems if problem in p]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((" * mutant NO_LOCK: nobody locks;\n *     refuted by ONE_INSIDE\n", ""), "no mutant"),
        (("refuted by ONE_INSIDE", "refuted by NOTHING"), "which is no invariant"),
        (("#ifdef NO_LOCK", "#ifdef NO_KEY"), "changes nothing"),
        (("check: -DPEOPLE=3", "check: -DBITSTATE -w20"), "not allowed"),
        ((" * check: -DPEOPLE=3 -m1000\n", ""), "no line `check:`"),
        (("INVARIANT(ONE_INSIDE,", "INVARIANT(NONE_INSIDE,"), "not in its head"),
    ],
)
def test_a_model_that_says_too_little_is_refused(
    change: tuple[str, str], problem: str, tmp_path: Path
) -> None:
    assert change[0] in LOCKED
    path = tmp_path / "locked.pml"
    path.write_text(LOCKED.replace(*change))
    with pytest.raises(ModelError, match=problem):
        read_model(path)


def test_the_command_fails_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.pml").write_text("/* Nothing. */\n")
    monkeypatch.setattr(check_models, "MODELS", tmp_path)
    monkeypatch.setattr("sys.argv", ["check_models", "--short"])
    assert check_models.main() == 1
    assert "FAILED  empty.pml" in capsys.readouterr().out


# ---- what the models stand for


def mapped(name: str) -> list[tuple[str, str, str]]:
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", MAPPING, re.MULTILINE | re.DOTALL))
    return ROW.findall(parts.get(name, ""))


@pytest.mark.parametrize("name", NAMES)
def test_the_mapping_of_a_model_names_what_exists(name: str) -> None:
    rows = mapped(name)
    text = (MODELS / f"{name}.pml").read_text()
    steps = set(re.findall(r"^(?:active (?:\[\w+\] )?)?(?:proctype|inline) (\w+)\(", text, re.M))
    assert rows
    for step, function, file in rows:
        assert step in steps, f"{name} has no step {step}"
        source = REPO / file
        assert source.is_file(), f"{step}: there is no {file}"
        definition = rf"FUNCTION @extschema@\.{function}\(|def {function}\("
        assert re.search(definition, source.read_text()), f"{step}: no {function} in {file}"


def test_the_mapping_has_no_other_models() -> None:
    assert sorted(re.findall(r"^## (\w+)$", MAPPING, re.MULTILINE)) == NAMES


def test_no_line_of_the_mapping_is_passed_over() -> None:
    lines = [line for line in MAPPING.splitlines() if line.startswith("|")]
    tables = len(NAMES)
    assert len(lines) == len(ROW.findall(MAPPING)) + 2 * tables
