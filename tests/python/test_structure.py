"""The source tree keeps its shape, and the check of it sees what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_structure

BASE = {
    "queue/tables.sql": "CREATE TABLE @extschema@.ready_entries (slot int);",
    "deferred/tables.sql": "CREATE TABLE @extschema@.deferred_jobs (job_id bigint);",
    "queue/append.sql": """
-- Appends; @extschema@.insert_job() is above.
CREATE OR REPLACE FUNCTION @extschema@._append(p_leaf text) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    EXECUTE format('INSERT INTO @extschema@.%I VALUES (1)', 'ready_entries_' || 1);
    -- not into deferred_jobs
    RAISE EXCEPTION USING ERRCODE = '22023', HINT = 'Call @extschema@.insert_job instead.';
END
$function$;""",
    "api/producer.sql": """
CREATE OR REPLACE FUNCTION @extschema@.insert_job() RETURNS bigint LANGUAGE sql
BEGIN ATOMIC
    SELECT @extschema@._append('x');
    SELECT CASE WHEN true THEN 1 END;
END;
COMMENT ON FUNCTION @extschema@.insert_job() IS 'Inserts; a semicolon; too.';""",
}


def write_tree(root: Path, extra: dict[str, str]) -> Path:
    files = BASE | extra
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    state = [name for name in files if name.endswith("tables.sql")]
    code = [name for name in files if name not in state]
    (root / "state.sql").write_text("".join(f"\\ir {name}\n" for name in state))
    (root / "code.sql").write_text("".join(f"\\ir {name}\n" for name in code))
    return root


def function(body: str) -> str:
    head = "CREATE OR REPLACE FUNCTION @extschema@._f(p_leaf text) RETURNS void LANGUAGE plpgsql AS"
    return f"{head} $function$\nBEGIN\n{body}\nEND\n$function$;"


def test_the_planes_of_this_tree_depend_downwards() -> None:
    assert check_structure.check_planes(check_structure.REPO / "sql") == []


def test_the_code_files_of_this_tree_can_be_run_again() -> None:
    assert check_structure.check_state_and_code(check_structure.REPO / "sql") == []


def test_every_file_of_this_tree_is_in_a_manifest() -> None:
    assert check_structure.check_manifests(check_structure.REPO / "sql") == []


def test_a_good_tree_has_no_problems(tmp_path: Path) -> None:
    assert check_structure.check_sql(write_tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("PERFORM @extschema@.insert_job();", "queue uses insert_job of the higher plane api"),
        (
            "EXECUTE 'SELECT @extschema@.insert_job()';",
            "queue uses insert_job of the higher plane api",
        ),
        (
            "SELECT 1 FROM @extschema@.deferred_jobs;",
            "queue uses deferred_jobs of the higher plane",
        ),
        (
            "EXECUTE format('SELECT FROM @extschema@.%I', 'deferred_jobs');",
            "queue uses deferred_jobs of the higher plane",
        ),
    ],
)
def test_a_use_of_a_higher_plane_is_found(tmp_path: Path, body: str, problem: str) -> None:
    [found, *_] = check_structure.check_sql(write_tree(tmp_path, {"queue/f.sql": function(body)}))
    assert found.startswith("queue/f.sql:1: " + problem)


@pytest.mark.parametrize(
    "body",
    [
        "INSERT INTO @extschema@.ready_entries VALUES (1);",
        "UPDATE @extschema@.ready_entries SET slot = 1;",
        "DELETE FROM ONLY @extschema@.ready_entries;",
        "TRUNCATE @extschema@.deferred_jobs, ONLY @extschema@.ready_entries;",
        "INSERT INTO @extschema@.ready_entries_{slot} VALUES (1);",
        "EXECUTE 'TRUNCATE @extschema@.ready_entries_3';",
        "EXECUTE format('TRUNCATE @extschema@.ready_entries_%s', 3);",
        "EXECUTE format('INSERT INTO @extschema@.%I VALUES (1)', 'ready_entries_' || 3);",
        "v := 'ready_entries_' || 3; EXECUTE format('TRUNCATE @extschema@.%I', v);",
    ],
)
def test_a_write_to_a_table_of_another_plane_is_found(tmp_path: Path, body: str) -> None:
    problems = check_structure.check_sql(write_tree(tmp_path, {"deferred/f.sql": function(body)}))
    assert problems == ["deferred/f.sql:1: deferred writes ready_entries, a table of queue"]


def test_functions_for_all_slots_are_read_like_others(tmp_path: Path) -> None:
    made = "SELECT @extschema@._create_for_slots('queue', $create$\n{}\n$create$);"
    upwards = function("PERFORM @extschema@.insert_job();").rstrip(";")
    root = write_tree(tmp_path, {"queue/f.sql": made.format(upwards)})
    [found] = check_structure.check_sql(root)
    assert found.startswith("queue/f.sql:1: queue uses insert_job of the higher plane")
    long = function("    NULL;\n" * check_structure.MAX_FUNCTION_LINES).rstrip(";")
    (root / "queue/f.sql").write_text(made.format(long))
    [note] = check_structure.long_functions(root)
    assert note.startswith("_f (queue/f.sql:1, ")


def test_state_in_a_code_file_is_found(tmp_path: Path) -> None:
    text = "CREATE OR REPLACE VIEW @extschema@.v AS SELECT 1;\n\nCREATE TABLE @extschema@.t ();"
    assert check_structure.check_sql(write_tree(tmp_path, {"queue/f.sql": text})) == [
        "queue/f.sql:3: may run only once: CREATE TABLE @extschema@.t ()"
    ]


def test_a_file_outside_the_manifests_is_found(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {})
    (root / "api/lost.sql").write_text("")
    assert check_structure.check_sql(root) == ["api/lost.sql: in no manifest"]


def test_a_long_function_is_reported(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path, {"queue/f.sql": function("    NULL;\n" * check_structure.MAX_FUNCTION_LINES)}
    )
    [note] = check_structure.long_functions(root)
    assert note.startswith("_f (queue/f.sql:1, ")
