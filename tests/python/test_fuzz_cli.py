"""Whatever is given to a command, it ends with a documented exit status and says why in one line.

The commands and options are those of the command tree, so a new one is tried as well.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awa import conformance
from awa.cli import main
from awa.embedded import EmbeddedPostgresError, Postgres
from conftest import Database, DatabaseServer
from fuzz.stage import Stage
from fuzz.values import JOBS, QUEUES, TEXTS, Ref
from test_cli import commands, environment

DONE, REFUSED, MISUSED = 0, 1, 2
# What a command line can hold: no zero byte, but bytes that are not text.
WORDS = (
    *("\udcff", "a\udc80b", "--", "-", "-x", "\x9b31m", "nan", "inf", "-inf", "1e999"),
    *("99999999999999999999999", "-1", "0", "0.5", "1_0", "٣", "9" * 5000, "/dev/null", "/", ".."),
    *("[" * 5000, "{", '{"a": NaN}', '{"a": 1e400}', '{"priority": 9}', "[1]", '"\\ud800"', "5"),
    *("2030-01-31T12:00:00", "2030-01-31T12:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00Z"),
    *("2030-01-31T12:00:00+23:59:59.999", "infinity", *TEXTS),
)
DSNS = (
    *(
        "postgresql://127.0.0.1:1/x",
        "host=/nowhere",
        "not a dsn",
        "port=x host=127.0.0.1",
        "=",
        "'",
    ),
    *("postgresql://[::1", "postgresql://a:%zz@127.0.0.1/", "service=none", "sslmode=odd", "\x01"),
    *("host=127.0.0.1 port=70000", "dbname=\udcff", "postgresql://127.0.0.1:1,127.0.0.1:2/x?x=y"),
)
# Options that let a command go on for ever when they are right: here they are wrong or left out.
ENDLESS = {"every": ("nan", "inf", "-1", "0", "x", "", "1e-9"), "watch": ()}
# Whose right use starts servers and programs: these get nothing that could be right.
STARTING = {
    ("dev",): (["--port", "0"], ["--port", "x"], ["--worker", ":"], ["--worker", "no.such:x"]),
    ("conformance",): (["--rule", "W99"], ["--rule", ""]),
    ("worker",): (["--grace", "nan"], ["--log-level", "x"], ["-q", "=3"], ["-q", "q=0"], []),
}
MODULES = (
    *("", ":", ".", "..", ".x", "x.", "no.such:x", "os:environ", "sys:modules", "json", "sys:path"),
    *(
        "\udcff",
        "a b",
        "a/b",
        "x" * 5000,
        "\u202e",
        "sys.",
        "os:",
        "a\nb",
        "json:.",
        "math:pi.real",
    ),
)
SHORT = settings(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), max_examples=15
)
LONG = settings(SHORT, derandomize=False, print_blob=True, max_examples=15 * 50)
PATHS = [path for path in commands(main) if path]


@pytest.fixture(scope="module")
def stage(server: DatabaseServer, template: Database) -> Iterator[Stage]:
    with server.fresh(template.name) as database:
        stage = Stage(database)
        yield stage
        stage.close()


@pytest.fixture
def own_stage(database: Database) -> Iterator[Stage]:
    stage = Stage(database)
    yield stage
    stage.close()


def command_at(path: Sequence[str]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


@st.composite
def lines(draw: st.DrawFn, path: tuple[str, ...]) -> list[object]:
    """Words of a command line."""
    words = st.sampled_from(WORDS)
    given_words: list[object] = list(path)
    parameters = command_at(path).params
    for option in [p for p in parameters if isinstance(p, click.Option)]:
        name = option.name or ""
        if name in ("help", "version") or draw(st.integers(0, 2)):
            continue
        flag = draw(st.sampled_from([*option.opts, *option.secondary_opts]))
        if name == "dsn":
            given_words += [flag, draw(st.sampled_from(DSNS))] if draw(st.booleans()) else []
        elif name == "schema":
            given_words += [flag, draw(words)] if path != ("install",) else [flag, "pg_x"]
        elif name in ENDLESS:
            given_words += [flag, draw(st.sampled_from(ENDLESS[name]))] if ENDLESS[name] else []
        elif option.is_flag:
            given_words.append(flag)
        else:
            right = {"queue": QUEUES, "state": ("running",), "limit": ("1",), "steps": ("promote",)}
            given_words += [flag, draw(st.sampled_from(right.get(name, ("1",))) | words)]
    if path in STARTING:
        given_words += draw(st.sampled_from(STARTING[path]))
    for argument in [p for p in parameters if isinstance(p, click.Argument)]:
        if argument.name == "target":
            given_words.append(draw(st.sampled_from(MODULES)))
        elif argument.name == "job_id":
            given_words.append(draw(st.sampled_from([Ref(n, "job_id") for n in JOBS]) | words))
        elif argument.required or draw(st.booleans()):
            given_words.append(draw(st.sampled_from(["stage", '{"priority": 1}']) | words))
    return given_words


def is_clean(text: str) -> bool:
    """Whether the terminal shows what it says."""
    return all(line.isprintable() for line in text.split("\n"))


def check(result: Result, words: Sequence[str]) -> None:
    text = f"{words}\nexit {result.exit_code}\n{result.stderr}"
    if not isinstance(result.exception, SystemExit | None):
        raise AssertionError(text) from result.exception
    assert result.exit_code in (DONE, REFUSED, MISUSED), text
    said = result.stderr.splitlines()
    assert is_clean(result.stderr), text
    if result.exit_code == REFUSED:
        assert said[0].startswith("error: "), text
        assert len(said) == 1 or (len(said) == 2 and said[1].startswith("hint: ")), text
    elif result.exit_code == MISUSED:
        assert said[-1].startswith("Error: "), text
        assert len([line for line in said if line.startswith("Error: ")]) == 1, text
    elif "--json" in words:
        json.loads(result.stdout)
    else:
        assert said == [], text
        assert is_clean(result.stdout), text


def fuzz(stage: Stage, path: tuple[str, ...], profile: settings) -> None:
    runner = CliRunner(env={"AWA_DSN": stage.dsn, "DATABASE_URL": "", "COLUMNS": "200"})

    @profile
    @given(lines(path))
    def one(given_words: list[object]) -> None:
        words = [str(stage.text(word, "bigint")) for word in given_words]
        check(runner.invoke(main, words, prog_name="awa"), words)

    one()
    stage.check()
    stage.refresh()


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_a_command_answers_or_says_what_is_wrong(stage: Stage, path: tuple[str, ...]) -> None:
    fuzz(stage, path, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_many_commands_answer_or_say_what_is_wrong(own_stage: Stage, path: tuple[str, ...]) -> None:
    fuzz(own_stage, path, LONG)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["worker", "."], MISUSED, "'.' is not MODULE:HANDLERS"),
        (["worker", "sys:modules"], REFUSED, 'error: "sys:modules" holds what cannot be a handler'),
        (["queues", "drain", "q"], REFUSED, "error: nothing was done: nobody said yes\nhint: "),
        (["settings", "reset", "a\x1b[2J\nb"], REFUSED, r'there is no setting "a\x1b[2J\nb"'),
        (["jobs", "--schema", "\x9b31m"], REFUSED, r'awa is not installed in schema "\x9b31m"'),
        (["conformance", "--worker", "'"], REFUSED, 'error: field "command" cannot be split'),
        (["conformance", "--worker", " "], REFUSED, 'error: field "command" must not be empty'),
        (["queues", "--dsn", "\x01"], REFUSED, r'error: missing "=" after "\x01"'),
    ],
)
def test_what_was_found_once(stage: Stage, words: list[str], code: int, said: str) -> None:
    result = CliRunner(env={"AWA_DSN": stage.dsn}).invoke(main, words, prog_name="awa")
    check(result, words)
    assert result.exit_code == code
    assert said in result.stderr


def test_a_worker_that_cannot_be_started_keeps_no_rule(database: Database) -> None:
    verdicts = list(conformance.run(database.dsn, "/no/such/program", rules=["W2"]))
    assert [verdict.answer for verdict in verdicts] == ["failed", "failed"]
    assert "cannot be started" in verdicts[0].detail


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_its_streams_leaves_no_traceback(stage: Stage, closed: str) -> None:
    for words in ("jobs --json", "nonsense"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -m awa {words} {closed}', sys.executable],
            env=environment(stage.dsn),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode in (DONE, REFUSED, MISUSED)
        assert "Traceback" not in done.stderr


def test_a_data_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/password").write_text("mine")
    (tmp_path / "full/file").write_text("")
    (tmp_path / "other/data").mkdir(parents=True)
    (tmp_path / "other/data/PG_VERSION").write_text("")
    folders = (tmp_path / name for name in ("full", "other", "x" * 300))
    for folder in (Path("/dev/null/x"), Path("/proc/awa"), *folders):
        with pytest.raises(EmbeddedPostgresError, match=re.escape(str(folder))), Postgres(folder):
            pass
    assert (tmp_path / "full/password").read_text() == "mine"
