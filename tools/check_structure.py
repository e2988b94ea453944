"""Check the shape of the source tree: planes depend downwards, state is apart from code, and so on.

The SQL is read as text: dynamic statements, being string literals with the same `@extschema@.name`
in them, count like static ones. A function over MAX_FUNCTION_LINES is only reported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PLANES = (
    "foundation",
    "control",
    "queue",
    "deferred",
    "execution",
    "maintenance",
    "api",
)  # lowest first
STATE_FILES = {"schemas.sql", "tables.sql", "types.sql"}
RERUNNABLE = re.compile(r"(CREATE\s+OR\s+REPLACE|COMMENT|GRANT|REVOKE|DO)\b", re.IGNORECASE)
MAX_FUNCTION_LINES = 80
TEXT_FOLDERS = (
    "sql",
    "extension",
    "python/src",
    "tests",
    "tools",
    "bench",
    "correctness",
    "docs",
    "examples",
    "docker",
)
TEXT_SUFFIXES = {
    ".sql",
    ".py",
    ".md",
    ".awk",
    ".control",
    ".in",
    ".toml",
    ".txt",
    ".sh",
    ".yml",
    ".yaml",
    ".mjs",
    ".pml",
    ".inc",
}

# Folders of text that is built, published or released.
AS_IT_IS = {"_sql", "vectors", "released"}

NAME = r"@extschema@\.\"?([a-z_%][\w%$]*)"
LITERAL = re.compile(r"'((?:[^']|'')*)'")
QUOTED = re.compile(
    r"--[^\n]*|/\*.*?\*/"  # comments
    r"|[eE]'(?:\\.|''|[^'\\])*'|'(?:[^']|'')*'|\"[^\"]*\""
    r"|\$(?P<tag>\w*)\$(?P<body>.*?)\$(?P=tag)\$",
    re.DOTALL,
)
DEFINITION = re.compile(
    r"CREATE\s+(?:OR\s+REPLACE\s+)?(?:UNLOGGED\s+)?"
    r"(?P<kind>FUNCTION|PROCEDURE|TABLE|VIEW|TYPE|DOMAIN|SEQUENCE)\s+(?:IF\s+NOT\s+EXISTS\s+)?"
    + NAME,
    re.IGNORECASE,
)
FOR_SLOTS = re.compile(
    r"SELECT\s+@extschema@\._create_for_slots\('\w+',\s*\$create\$\s*(.*)\$create\$\)", re.DOTALL
)
WRITE = re.compile(
    r"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE(?:\s+TABLE)?)\s+(?:ONLY\s+)?"
    rf"(?P<targets>{NAME}(?:\s*,\s*(?:ONLY\s+)?{NAME})*)",
    re.IGNORECASE,
)
USE = re.compile(NAME, re.IGNORECASE)
# What an error message says to people is no dependency.
MESSAGE = re.compile(r"\b(MESSAGE|DETAIL|HINT)\s*:?=\s*(format\()?\s*'(?:[^']|'')*'", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement of one file, comments blanked."""

    plane: str
    file: Path
    line: int
    text: str

    @property
    def lines(self) -> int:
        return self.text.count("\n") + 1


@dataclass(frozen=True, slots=True)
class Definition:
    """An object of the schema, and the plane that owns it."""

    plane: str
    kind: str


def blank_comments(text: str) -> str:
    """Replace comments by blanks, in dollar-quoted bodies too; lines and columns stay."""

    def replace(match: re.Match[str]) -> str:
        found = match[0]
        if found.startswith(("--", "/*")):
            return re.sub(r"[^\n]", " ", found)
        if match["body"] is not None:
            quote = f"${match['tag']}$"
            return quote + blank_comments(match["body"]) + quote
        return found

    return QUOTED.sub(replace, text)


def split_statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, statement) of a comment-free script, quotes and BEGIN ATOMIC bodies whole."""
    start, depth = 0, 0
    token = re.compile(
        QUOTED.pattern + r"|;|\bBEGIN\s+ATOMIC\b|\bCASE\b|\bEND\b", re.DOTALL | re.IGNORECASE
    )
    for match in token.finditer(text):
        word = match[0].upper()
        if word.startswith("BEGIN") or (word == "CASE" and depth):
            depth += 1
        elif word == "END" and depth:
            depth -= 1
        elif word == ";" and not depth:
            statement = text[start : match.start()]
            lead = len(statement) - len(statement.lstrip())
            yield text.count("\n", 0, start + lead) + 1, statement.strip()
            start = match.end()
    if rest := text[start:].strip():
        yield text.count("\n", 0, text.index(rest, start)) + 1, rest


def read_statements(root: Path) -> list[Statement]:
    return [
        # A function that is made for all slots counts like one that is written down as it is.
        Statement(plane, path.relative_to(root), line, FOR_SLOTS.sub(r"\1", text))
        for plane in PLANES
        for path in sorted((root / plane).rglob("*.sql"))
        for line, text in split_statements(blank_comments(path.read_text()))
    ]


def definitions(statements: list[Statement]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for statement in statements:
        if match := DEFINITION.match(statement.text):
            # A function may share its name with the type it returns: the lower plane counts.
            found.setdefault(match[2].lower(), Definition(statement.plane, match["kind"].lower()))
    return found


def without_suffix(name: str) -> str:
    """Return the table of a leaf: ready_entries_7, ready_entries_%s, or up to its {slot}."""
    return re.sub(r"_(\d+|%.*)?$", "", name.lower())


def written_tables(text: str, tables: set[str]) -> set[str]:
    """Return the tables that a statement writes.

    Where a format() placeholder is the target, each table named by a literal in the same command
    is meant, or, if there is none, in the same function.
    """
    written: set[str] = set()
    for match in WRITE.finditer(text):
        for target in USE.findall(match["targets"]):
            if not target.startswith("%"):
                written.add(without_suffix(target))
                continue
            end = text.find(";", match.end())
            named = literal_tables(text[match.end() : end], tables)
            written |= named or literal_tables(text, tables)
    return written & tables


def literal_tables(text: str, tables: set[str]) -> set[str]:
    names = {without_suffix(literal).rstrip("_") for literal in LITERAL.findall(text)}
    return names & tables


def check_planes(root: Path) -> list[str]:
    """Return each use of a higher plane, and each write to a table of another plane."""
    statements = read_statements(root)
    known = definitions(statements)
    tables = {name for name, definition in known.items() if definition.kind == "table"}
    problems = []
    for statement in statements:
        if re.match(r"COMMENT|GRANT|REVOKE", statement.text, re.IGNORECASE):
            continue
        where = f"{statement.file}:{statement.line}"
        text = MESSAGE.sub("", statement.text)
        used = {
            without_suffix(n) if n.lower() not in known else n.lower() for n in USE.findall(text)
        }
        used |= {name for name in literal_tables(text, tables) if "_" in name}
        for name in sorted(used & known.keys()):
            if PLANES.index(known[name].plane) > PLANES.index(statement.plane):
                problems.append(
                    f"{where}: {statement.plane} uses {name} of the higher plane"
                    f" {known[name].plane}"
                )
        for name in sorted(written_tables(text, tables)):
            if known[name].plane != statement.plane:
                problems.append(
                    f"{where}: {statement.plane} writes {name}, a table of {known[name].plane}"
                )
    return problems


def check_state_and_code(root: Path) -> list[str]:
    """Return each statement outside the state files that cannot be run again at an update."""
    return [
        f"{s.file}:{s.line}: may run only once: {s.text.splitlines()[0][:60]}"
        for s in read_statements(root)
        if s.file.name not in STATE_FILES and not RERUNNABLE.match(s.text)
    ]


def check_manifests(root: Path) -> list[str]:
    """Return each file that is in no manifest, in two, or in the wrong one."""
    included = [
        (manifest, line.split()[1])
        for manifest in ("state.sql", "code.sql")
        for line in (root / manifest).read_text().splitlines()
        if line.startswith("\\ir ")
    ]
    names = [name for _, name in included]
    files = {
        str(p.relative_to(root))
        for p in root.rglob("*.sql")
        if p.parent not in (root, root / "upgrades")
    }
    problems = [f"{name}: in no manifest" for name in sorted(files - set(names))]
    problems += [
        f"{name}: listed twice in {manifest}"
        for manifest, name in sorted({pair for pair in included if included.count(pair) > 1})
    ]
    for manifest, name in included:
        if manifest == "code.sql" and Path(name).name in STATE_FILES:
            problems.append(f"{name}: holds state, so it belongs to state.sql")
    return problems


def check_versions(repo: Path) -> list[str]:
    """Return a problem unless all that states the version states the same."""
    sources = {
        "extension/awa.control": r"^default_version = '(.*)'",
        "python/pyproject.toml": r"^version = \"(.*)\"",
        "python/src/awa/_version.py": r"^__version__ = \"(.*)\"",
        "sql/api/operator.sql": r"^RETURN '(.*)';",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {}
    for name, pattern in sources.items():
        match = re.search(pattern, (repo / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else "none"
    return [f"versions differ: {found}"] if len(set(found.values())) > 1 else []


def check_text(repo: Path) -> list[str]:
    """Return each line that .editorconfig forbids (ruff sees to the width of Python lines)."""
    rules = (repo / ".editorconfig").read_text()
    widest = int(re.findall(r"\[\*\.sql\]\s+max_line_length = (\d+)", rules)[0])
    problems = []
    for path in (p for folder in TEXT_FOLDERS for p in sorted((repo / folder).rglob("*"))):
        if path.suffix not in TEXT_SUFFIXES or AS_IT_IS & set(path.parts):
            continue
        where, text = path.relative_to(repo), path.read_text()
        if text and not text.endswith("\n"):
            problems.append(f"{where}: no newline at the end")
        lines = text.split("\n")
        trailing = [n for n, line in enumerate(lines, 1) if line != line.rstrip()]
        wide = [n for n, line in enumerate(lines, 1) if len(line) > widest]
        if trailing:
            problems.append(f"{where}: trailing space on lines {trailing}")
        if wide and path.suffix == ".sql" and "tests" not in path.parts:
            problems.append(f"{where}: more than {widest} characters on lines {wide}")
    return problems


def long_functions(root: Path) -> list[str]:
    return [
        f"{match[2]} ({s.file}:{s.line}, {s.lines} lines)"
        for s in read_statements(root)
        if (match := DEFINITION.match(s.text))
        and match["kind"].upper() == "FUNCTION"
        and s.lines > MAX_FUNCTION_LINES
    ]


def check_sql(root: Path) -> list[str]:
    """Return all problems of one sql/ folder."""
    return check_planes(root) + check_state_and_code(root) + check_manifests(root)


def main() -> int:
    root = REPO / "sql"
    problems = check_sql(root) + check_versions(REPO) + check_text(REPO)
    notes = long_functions(root)
    print("\n".join(problems))
    print(
        f"{len(problems)} problems; over {MAX_FUNCTION_LINES} lines: {', '.join(notes) or 'none'}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
