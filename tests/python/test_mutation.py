"""The mutation run: its mutants are what they are said to be, and a survivor is seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from correctness import line_coverage, mutate
from correctness.generate import Mutant, edits_of, generate
from correctness.line_coverage import Function, report_sql
from correctness.mutants import MUTANTS
from correctness.mutate import UNCHANGED, Ledger, Run, Stand, Verdict, judge, read_reasons
from tools.edits import BUILT, Edit, ScriptError, apply, apply_all
from tools.pgtap import TESTS

SCRIPT = """\
CREATE OR REPLACE FUNCTION @extschema@._f(p_limit integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $function$
BEGIN
    -- IF 1 < 2 THEN
    IF p_limit < 7 THEN
        RETURN length('IF 1 < 2 AND 3 > 4 THEN');
    END IF;
    RETURN p_limit;
END
$function$;
COMMENT ON FUNCTION @extschema@._f(integer) IS 'Internal: IF 1 < 2 THEN.';
"""


# Each line has a number, a comparison or a condition that may be changed without any effect.
FREE = """\
CREATE OR REPLACE FUNCTION @extschema@._f(p_limit integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $function$
DECLARE
    c_most constant integer := 1000;
BEGIN
    SELECT x INTO v_x FROM t LIMIT 1;
    PERFORM count(*) FROM (SELECT FROM t LIMIT c_most + 1) t;
    PERFORM x FROM t WHERE x > v_base;
    PERFORM @extschema@._refuse('22023', left(p_text, 200), 'Shorten it.');
    CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
    FOR v_round IN 1 .. 5 LOOP
        NULL;
    END LOOP;
    IF v_x IS NULL OR v_key <> p_key THEN
        v_x := @extschema@._g(p_key);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._f(integer) IS 'Internal.';
"""
RULES_WITH_EXCEPTIONS = ("comparison", "always", "goes on", "one more", "unlimited")


@pytest.fixture(scope="module", autouse=True)
def _once(server_version: int) -> None:
    if server_version != mutate.VERSION:
        pytest.skip(f"mutants are played on PostgreSQL {mutate.VERSION}")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand


@pytest.fixture
def short_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, which takes a moment."""
    monkeypatch.setattr(
        mutate, "files_for", lambda mutant, seconds: [TESTS / "foundation/positions.sql"]
    )
    monkeypatch.setattr(mutate, "PYTHON_SUITE", ())


# ---- mutants


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_written_by_hand_applies(name: str) -> None:
    script = BUILT.read_text()
    assert apply_all(script, MUTANTS[name]) != script


@pytest.mark.parametrize("old", ["p_limit", "p_most"])
def test_an_edit_finds_its_text_once_or_is_refused(old: str) -> None:
    with pytest.raises(ScriptError, match=old):
        apply(SCRIPT, Edit("_f", old, "0"))


def test_a_seed_gives_the_same_mutants_each_time() -> None:
    script = BUILT.read_text()
    first, second, other = (
        list(itertools.islice(generate(script, seed), 60)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other
    assert all(apply_all(script, mutant.edits) != script for mutant in first)
    assert len({mutant.name for mutant in first}) == len(first)


def test_only_code_is_changed() -> None:
    edits = [edit for found in edits_of(SCRIPT).values() for edit in found]
    changed = {apply(SCRIPT, edit).splitlines()[6].strip() for edit in edits}
    rest = {tuple(apply(SCRIPT, edit).splitlines()[7:]) for edit in edits}
    assert changed == {
        "IF p_limit <= 7 THEN",
        "IF NOT (p_limit < 7) THEN",
        "IF true THEN",
        "IF false THEN",
        "IF p_limit < 8 THEN",
    }
    assert rest == {tuple(SCRIPT.splitlines()[7:])}


def test_what_nobody_can_notice_is_not_changed() -> None:
    edits = edits_of(FREE)
    found = [edit.new for rule in RULES_WITH_EXCEPTIONS for edit in edits[rule]]
    # Of each rule that has exceptions none applies here but to the key that is compared.
    assert found == ["    IF v_x IS NULL OR v_key = p_key THEN"]


# ---- verdicts


@pytest.mark.usefixtures("short_suite")
def test_a_mutant_that_changes_nothing_survives_and_is_reported(stand: Stand) -> None:
    seconds: dict[str, float] = {}
    verdict = stand.play(UNCHANGED, BUILT.read_text(), seconds)
    assert (verdict.verdict, verdict.by) == ("survived", "")
    assert list(seconds) == ["foundation/positions.sql"]
    _, problems = judge([verdict], {})
    assert "control: unchanged survived, and SURVIVORS.md does not say why" in problems


@pytest.mark.usefixtures("short_suite")
def test_a_mutant_that_a_test_notices_is_killed(stand: Stand) -> None:
    edit = Edit("_cardinality", "upper(r) - lower(r)", "upper(r) + lower(r)")
    mutant = Mutant("hand", "sizes are sums", (edit,))
    verdict = stand.play(mutant, apply_all(BUILT.read_text(), mutant.edits), {})
    assert verdict.verdict == "killed"
    assert verdict.by.startswith("foundation/positions.sql: not ok")


@pytest.mark.usefixtures("short_suite")
def test_a_mutant_that_cannot_be_installed_is_invalid(stand: Stand) -> None:
    script = BUILT.read_text().replace("RETURN NULL;", "RETURN (;", 1)
    verdict = stand.play(UNCHANGED, script, {})
    assert verdict.verdict == "invalid"
    assert "mismatched parentheses" in verdict.by


def verdicts(*kinds: str) -> list[Verdict]:
    return [Verdict("hand", f"m{n}", "x", kind, "", 1.0) for n, kind in enumerate(kinds)]


def test_an_explained_survivor_is_no_problem_until_there_are_too_many(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| set | mutant | why |\n|---|---|---|\n| hand | m9 | nobody can tell |\n")
    reasons = read_reasons(page)
    assert reasons == {("hand", "m9"): "nobody can tell"}
    assert judge(verdicts(*["killed"] * 9, "survived"), reasons)[1] == []
    _, problems = judge(verdicts(*["killed"] * 9, "survived"), {})
    assert problems == ["hand: m9 survived, and SURVIVORS.md does not say why"]
    _, problems = judge(verdicts(*["killed"] * 8, "invalid", "survived"), reasons)
    assert problems == ["hand: 88.9 % killed, 90 wanted", "hand: m8 cannot be installed"]


def test_every_explained_survivor_has_a_reason() -> None:
    assert all(reason.strip() for reason in read_reasons(mutate.SURVIVORS).values())


def test_a_run_goes_on_where_it_stopped_and_draws_another_for_what_does_not_install(
    tmp_path: Path,
) -> None:
    played = []

    def pretend(mutant: Mutant, script: str, seconds: dict[str, float]) -> Verdict:
        played.append(mutant.name)
        kind = "invalid" if mutant.name == mutants[0].name else "killed"
        return Verdict("generated", mutant.name, mutate.digest_of(script), kind, "", 1.0)

    script = BUILT.read_text()
    mutants = list(itertools.islice(generate(script, 1), 4))
    for count in (1, 2):
        run = Run(script, Ledger(tmp_path), pretend, again=False, minutes=1)
        found = run.play_set(mutants, count)
        assert [verdict.name for verdict in found] == [m.name for m in mutants[1 : count + 1]]
    late = Run(script, Ledger(tmp_path), pretend, again=False, minutes=-1)
    assert len(late.play_set(mutants, 4)) == 2
    assert late.left == 1
    assert sorted(played) == sorted(mutant.name for mutant in mutants[:3])


# ---- coverage


def test_functions_and_lines_that_never_run_are_listed() -> None:
    functions = {
        "awa.f()": Function({2: 3, 3: 0}, {2: "a;", 3: "  b;"}),
        "awa.g()": Function({2: 0}, {2: "c;"}),
    }
    rows, share = report_sql(functions)
    assert "never run: awa.g()" in rows
    assert "awa.f():3: b;" in rows
    assert not any(row.startswith("awa.g():") for row in rows)
    assert share == pytest.approx(100 / 3)
    assert line_coverage.percent(0, 0) == 100
