"""The documents agree with the installed extension, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from conftest import Database
from engine import SCRIPT
from tools.api_manifest import MANIFEST, manifest

REPO = Path(__file__).parents[2]
CONTRACT = REPO / "docs/sql-contract.md"

SKIPPED_FOLDERS = {"build", "dist", "node_modules", "venv"}
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")

FUNCTIONS = """
    SELECT p.proname,
           format('%s(%s) RETURNS %s', p.proname, pg_get_function_arguments(p.oid),
                  pg_get_function_result(p.oid))
    FROM pg_proc p
    WHERE p.pronamespace = 'awa'::regnamespace AND NOT starts_with(p.proname, '_')
"""
ROW_TYPES = """
    SELECT t.typname,
           format('%s(%s)', t.typname, string_agg(
               format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', '
               ORDER BY a.attnum))
    FROM pg_type t
    JOIN pg_class c ON c.oid = t.typrelid AND c.relkind = 'c'
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
    WHERE t.typnamespace = 'awa'::regnamespace AND NOT starts_with(t.typname, '_')
    GROUP BY t.typname
"""
VIEW_COLUMNS = """
    SELECT c.relname, string_agg(a.attname, ', ' ORDER BY a.attnum)
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'v'
    GROUP BY c.relname
"""
RIGHTS = """
    SELECT c.capability, CASE c.object_class WHEN 'inbox' THEN 'view' ELSE c.object_class END,
           c.object_name
    FROM awa._capabilities() c
    WHERE NOT starts_with(c.object_name, '_')
"""


def documents() -> list[Path]:
    return sorted(
        path
        for path in REPO.rglob("*.md")
        if not any(
            part in SKIPPED_FOLDERS or part.startswith(".")
            for part in path.relative_to(REPO).parts[:-1]
        )
    )


def section(title: str) -> str:
    """Return the text of one section of the contract, subsections included."""
    text = CONTRACT.read_text()
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the contract has no section {title!r}"
    return match[1]


def tables(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of each table, without the two lines of its head."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|[-|]+\|", line):
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                yield [cell.strip() for cell in row.strip("|").split("|")]


def code_words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def normal(signature: str) -> str:
    """Write a signature as the catalog's and ours can be compared."""
    text = re.sub(r"::[a-z ]+(?=[,)])", "", signature)
    text = text.replace("timestamp with time zone", "timestamptz").replace('"', "")
    text = re.sub(r"\bawa\.", "", text)
    return re.sub(r"\(\s+|\s+\)", lambda m: m[0].strip(), re.sub(r"\s+", " ", text)).strip()


def signatures() -> dict[str, str]:
    """Return what the contract says about each function: the first code block below its heading."""
    text = CONTRACT.read_text()
    found = re.findall(r"^### (\w+)\n\n```sql\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    assert len(found) == len({name for name, _ in found}), "a function is described twice"
    assert [name for name, _ in found] == re.findall(r"^### (\w+)$", text, re.MULTILINE)
    return {name: normal(block) for name, block in found}


def test_the_contract_describes_each_function_as_it_is(conn: psycopg.Connection) -> None:
    installed = {name: normal(text) for name, text in conn.execute(FUNCTIONS)}
    assert signatures() == installed


def test_the_contract_describes_each_row_type_as_it_is(conn: psycopg.Connection) -> None:
    blocks = re.findall(r"```sql\n(.*?)```", section("Row types"), re.DOTALL)
    text = normal(" ".join(blocks))
    described = {m[1]: m[0] for m in re.finditer(r"(\w+)\([^()]*\)", text)}
    assert described == {name: normal(text) for name, text in conn.execute(ROW_TYPES)}


def test_the_contract_says_of_each_function_whether_it_can_be_repeated() -> None:
    text = CONTRACT.read_text()
    groups = [m[0] for m in re.findall(r"(?m)^## (\w+ functions)$()", text)]
    assert groups == [f"{who} functions" for who in ("Producer", "Worker", "Operator", "Owner")]
    [reading] = re.findall(r"What only reads is idempotent\s+anyway: (.*?)\.", text, re.DOTALL)
    silent = set()
    for group in groups:
        intro, *parts = re.split(r"(?m)^### ", section(group))
        said_of_all = "`insert_*`" if group.startswith("Producer") else "All are idempotent"
        for part in parts:
            name = part.split("\n", 1)[0]
            is_said = re.search("idempotent|a repeat does no harm", part, re.IGNORECASE)
            prefix = name.startswith("insert_") or group.startswith("Owner")
            if not (is_said or " " in name or (prefix and said_of_all in intro)):
                silent.add(name)
    assert silent == code_words(reading)


def test_the_trigger_of_the_contract_enqueues(database: Database, conn: psycopg.Connection) -> None:
    """As the table's owner, and as a writer without any right on the queue."""
    block = re.findall(r"```sql\n(CREATE FUNCTION.*?)```", CONTRACT.read_text(), re.DOTALL)[0]
    jobs, writer = (f"role_{uuid.uuid4().hex[:12]}" for _ in range(2))
    conn.execute("CREATE TABLE users (user_id bigint GENERATED ALWAYS AS IDENTITY, name text)")
    conn.execute(block.encode())
    add = "INSERT INTO users (name) SELECT n FROM generate_series(1, %s) n"
    conn.execute(add, [3])
    conn.execute(add, [0])
    with conn.transaction(force_rollback=True):
        conn.execute(add, [2])
    conn.execute(
        f"CREATE ROLE {jobs}; CREATE ROLE {writer}; GRANT INSERT ON users TO {writer}".encode()
    )
    conn.execute(f"SELECT awa.grant_producer('{jobs}')".encode())
    with database.connect() as other:
        other.execute(f"SET ROLE {writer}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            other.execute(add, [1])
        [recipe] = re.findall(r"`(ALTER FUNCTION welcome\w+\(\) OWNER.*?)`", CONTRACT.read_text())
        conn.execute(recipe.replace("app_jobs", jobs).encode())
        other.execute(add, [1])
    rows = conn.execute("SELECT kind, args FROM awa.jobs ORDER BY job_id").fetchall()
    ids = [i for (i,) in conn.execute("SELECT user_id FROM users ORDER BY 1")]
    assert rows == [("welcome", {"user_id": user_id}) for user_id in ids]
    assert len(ids) == 4
    conn.execute("DROP TABLE users; DROP FUNCTION welcome_new_users()")
    conn.execute(f"DROP OWNED BY {jobs}, {writer}; DROP ROLE {jobs}, {writer}".encode())


def test_position_needs_quotes_as_the_contract_says(conn: psycopg.Connection) -> None:
    call = (
        "SELECT awa.attempt_status(job_id => 1, run_lease => 1, claim_slot => 0, batch_id => 1, {})"
    )
    assert conn.execute(call.format('"position" => 1').encode()).fetchall() == [("unknown",)]
    with pytest.raises(psycopg.errors.SyntaxError):
        conn.execute(call.format("position => 1").encode())


def test_the_contract_lists_the_states_of_a_job(conn: psycopg.Connection) -> None:
    [[states]] = conn.execute("SELECT enum_range(NULL::awa.job_state)::text[]").fetchall()
    described = [row[0].strip("`") for row in tables(section("States of a job"))]
    assert sorted(described) == sorted(states)


def test_the_contract_names_each_outcome_of_an_attempt(conn: psycopg.Connection) -> None:
    [[outcomes]] = conn.execute("SELECT enum_range(NULL::awa.attempt_outcome)::text[]").fetchall()
    [text] = re.findall(r"### attempt_status\n(.*?)\n### ", CONTRACT.read_text(), re.DOTALL)
    assert code_words(text) >= {*outcomes, "open", "unknown"}


def test_the_contract_names_each_step_of_tick(conn: psycopg.Connection) -> None:
    [[steps]] = conn.execute("SELECT awa._tick_steps()").fetchall()
    [text] = re.findall(r"### tick\n(.*?)\n## ", CONTRACT.read_text(), re.DOTALL)
    described = [
        name for row in tables(text) for name in re.findall(r"`(\w+)`", row[0]) if len(row) == 3
    ]
    assert sorted(described) == sorted(steps)


def test_the_contract_lists_each_setting_as_it_is(conn: psycopg.Connection) -> None:
    rows = conn.execute("SELECT name, default_value, unit, description FROM awa.settings")
    described = [(r[0], r[1], r[4], r[5]) for r in tables(section("Settings"))]
    assert sorted(described) == sorted(rows)


def test_the_contract_gives_each_setting_its_bounds(conn: psycopg.Connection) -> None:
    rows = conn.execute("SELECT name, minimum::text, maximum::text FROM awa._setting_definitions()")
    described = [(r[0], r[2], r[3]) for r in tables(section("Settings"))]
    assert sorted(described) == sorted(rows)


def test_the_contract_lists_each_error_code_as_it_is(conn: psycopg.Connection) -> None:
    rows = conn.execute("SELECT sqlstate, name, description, hint FROM awa.error_codes()")
    assert [tuple(row) for row in tables(section("Errors"))] == rows.fetchall()


def test_the_contract_lists_each_view_as_it_is(conn: psycopg.Connection) -> None:
    installed: dict[str, str] = dict(conn.execute(VIEW_COLUMNS).fetchall())
    job_info = conn.execute(
        "SELECT string_agg(attname, ', ' ORDER BY attnum) FROM pg_attribute"
        " WHERE attrelid = 'awa.job_info'::regclass AND attnum > 0"
    ).fetchone()
    assert job_info is not None
    described = {
        name.strip("`"): job_info[0] if "`job_info`" in columns else columns.strip("`")
        for name, _, columns in tables(section("Views"))
    }
    assert described == installed


def test_the_contract_lists_the_rights_of_each_capability(conn: psycopg.Connection) -> None:
    described = {
        (capability, object_class, name)
        for capability, functions, views in tables(section("Rights"))
        for object_class, names in (("function", functions), ("view", views))
        for name in code_words(names)
    }
    assert described == set(conn.execute(RIGHTS).fetchall())


def test_the_public_surface_is_the_one_of_the_manifest(conn: psycopg.Connection) -> None:
    """Red after any change of a signature, default, result, right, state or view.

    If the change is meant: docs/stability.md, then `make api-manifest`.
    """
    assert manifest(conn) == json.loads(MANIFEST.read_text())


def test_the_manifest_would_show_a_changed_default(conn: psycopg.Connection) -> None:
    before = manifest(conn)
    conn.execute("DROP EXTENSION awa")
    script = SCRIPT.read_text().replace("@extschema@", "awa")
    changed = script.replace("max_attempts integer DEFAULT 25", "max_attempts integer DEFAULT 24")
    changed = changed.replace("duplicate boolean, pressure text)", "duplicate boolean)", 1)
    assert changed != script
    conn.execute(changed.encode())
    after = manifest(conn)
    different = {
        (part, name)
        for part in before
        for name in before[part]
        if before[part][name] != after[part].get(name)
    }
    assert different == {
        ("functions", "insert_job"),
        ("functions", "insert_many"),
        ("types", "insert_result"),
    }


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(REPO)))
def test_the_links_of_a_document_lead_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        leads_somewhere = file.exists() and file.is_relative_to(REPO)
        if not leads_somewhere or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_each_guarantee_of_the_readme_has_its_tests() -> None:
    guarantees = {row[0] for row in tables((REPO / "README.md").read_text()) if row[0][:1] == "G"}
    tested = {
        row[0].split()[0]
        for row in tables((REPO / "docs/testing.md").read_text())
        if re.match(r"G\d", row[0]) and LINK.search(row[1])
    }
    assert guarantees == tested == {f"G{number}" for number in range(1, 11)}


def test_a_signature_is_compared_whatever_its_line_breaks() -> None:
    ours = "f(\n    a text DEFAULT 'x', b jsonb DEFAULT '{}'\n) RETURNS SETOF t\n"
    catalog = "f(a text DEFAULT 'x'::text, b jsonb DEFAULT '{}'::jsonb) RETURNS SETOF awa.t"
    assert normal(ours) == normal(catalog) != normal(catalog.replace("'x'", "'y'"))


def test_an_anchor_that_is_missing_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One: two `three`\n\n```sh\n# four\n```\n")
    assert anchors(tmp_path / "a.md") == {"one-two-three"}
