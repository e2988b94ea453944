"""Whatever is given to a public function, the answer is a result or a documented error.

The functions are those of the catalog, the errors of each those that its section of the contract
names. An error changes nothing, has a hint, and names the field; afterwards the queue goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import IsolationLevel, sql

from conftest import Database, DatabaseServer
from engine import WORKER, insert, value
from fuzz.stage import Call, Function, Stage
from fuzz.values import (
    ATTEMPTS,
    ITEM,
    KEYS,
    QUEUES,
    TIMES,
    TOKEN,
    Array,
    Raw,
    Ref,
    as_json,
    job_opts,
    objects,
    parameter,
    queues,
    some_json,
    texts,
)
from test_docs import CONTRACT
from tools.api_manifest import MANIFEST

# Raised by PostgreSQL while it reads an argument, before any function of ours runs: text that is
# not JSON or is nested too deep for it, numbers and times that no type holds.
BEFORE = {"22P02", "22P05", "22003", "22007", "22008", "54001"}
# Errors of input: the message names what is wrong.
OF_INPUT = {"22023", "23514", "JQ007"}
NAMED = r'(?:field|option)s? "[\w\[\]]+"'
# Their effects are too many for a database that lasts: roles of the cluster, hundreds of lanes.
ROLLED_BACK = ("declare_queue", "set_owner", "grant_")
FUNCTIONS = json.loads(MANIFEST.read_text())["functions"]
LEVELS = (*[None] * 10, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE)
COLUMNS = ("kind", "args", "queue", "priority", "max_attempts", "run_at", "opts")
KNOWN = r"_check_options\(\s*'(\w+)',[^{]*'\{([a-z_,\s]*)\}'"
# Tried each time: what was refused badly once, and what chance seldom finds.
FAR = "9999-12-31T23:59:59-15:00"
BEFORE_CHRIST = "0001-01-01T00:00:00+15:00"
TRIED: dict[str, list[dict[str, object]]] = {
    "insert_job": [{"kind": "k", "run_at": FAR}, {"kind": "k", "run_at": BEFORE_CHRIST}],
    "insert_many": [{"kind": "k", "args": Array((1,)), "run_at": FAR}],
    "insert_jobs": [{"jobs": [{"kind": "k", "run_at": at}]} for at in (FAR, BEFORE_CHRIST)],
    "update_job": [
        {"job_id": Ref("scheduled", "job_id"), "changes": {"run_at": at}}
        for at in (FAR, BEFORE_CHRIST)
    ],
    "retry_dlq": [{"job_id": Ref("dead", "job_id"), "opts": {"queue": None}}],
    "heartbeat": [
        {
            "instance_id": str(WORKER),
            "holds": [{"claim_slot": 0, "batch_id": 1, "positions": [2**63 - 1]}],
        }
    ],
    "unique_key": [
        {"kind": "k", "queue": None, "args": Raw("[" * 3000 + "]" * 3000), "period_bucket": None}
    ],
}
EXAMPLES = 40
LONG_FACTOR = 50
SHORT = settings(
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES
)
# A failure prints what repeats it.
LONG = settings(SHORT, derandomize=False, print_blob=True, max_examples=EXAMPLES * LONG_FACTOR)


def documented(known: set[str]) -> dict[str, set[str]]:
    """The SQLSTATEs that the contract's section of each function names."""
    codes: dict[str, set[str]] = {}
    for group in re.split(r"(?m)^## ", CONTRACT.read_text()):
        intro, *sections = re.split(r"(?m)^### ", group)
        for section in sections:
            name = section.split("\n", 1)[0]
            text = section + (intro if group.startswith("Owner") else "")
            codes[name] = set(re.findall(r"\b[0-9A-Z]{5}\b", text)) & known
            if match := re.search(r"[Ee]rrors as `(\w+)`", section):
                codes[name] |= codes[match[1]]
    return codes


@pytest.fixture(scope="module")
def stage(server: DatabaseServer, template: Database) -> Iterator[Stage]:
    with server.fresh(template.name) as database:
        stage = Stage(database)
        yield stage
        stage.close()


@pytest.fixture
def own_stage(database: Database) -> Iterator[Stage]:
    """For long forms: what thousands of calls leave would slow the next ones down."""
    stage = Stage(database)
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def errors(stage: Stage) -> Mapping[str, set[str]]:
    rows = stage.conn.execute("SELECT sqlstate FROM awa.error_codes()").fetchall()
    return documented({code for (code,) in rows} | {"42501"})


@st.composite
def calls(draw: st.DrawFn, function: Function, setting_names: Sequence[str]) -> Call:
    """Most arguments are right, so that the odd ones are looked at."""
    given_names = [
        name
        for number, (name, _) in enumerate(function.parameters)
        if number < function.required or draw(st.integers(0, 3))
    ]
    odd = draw(st.lists(st.sampled_from(given_names), max_size=2)) if given_names else []
    types = dict(function.parameters)
    arguments: dict[str, object] = {}
    for name in given_names:
        field = parameter(function.name, name, types[name], setting_names)
        arguments[name] = draw(field.odd if name in odd else field.right)
    token = [name for name in TOKEN if name in arguments and name not in odd]
    if len(token) > 1:
        attempt = draw(st.sampled_from([*ATTEMPTS, "running", "running", "running"]))
        arguments |= {name: Ref(attempt, name) for name in token}
        if isinstance(arguments.get("positions"), Array) and "positions" not in odd:
            arguments["positions"] = Array((Ref(attempt, "position"),))
    is_kept = not function.name.startswith(ROLLED_BACK) and draw(st.integers(0, 2)) == 0
    is_caseless = draw(st.integers(0, 5)) == 0
    return Call(function, arguments, draw(st.sampled_from(LEVELS)), is_kept, is_caseless)


def check_error(error: psycopg.Error, allowed: set[str], prefix: str = "") -> None:
    said = error.diag
    where = said.context or ""
    text = f"{error.sqlstate}: {error} (hint: {said.message_hint}) {where}"
    if error.sqlstate is not None and "function awa." not in where:
        assert error.sqlstate in BEFORE, text
        return
    assert error.sqlstate in allowed, text
    assert said.message_hint, text
    if error.sqlstate in OF_INPUT:
        assert re.match(f"{prefix}.*{NAMED}", said.message_primary or "", re.DOTALL), text


def fuzz(stage: Stage, name: str, allowed: set[str], profile: settings) -> None:
    function = stage.functions[name]
    made = 0
    before: Any = None

    # The fewer parameters, the sooner all has been tried.
    part = min(len(function.parameters), 4) / 4

    @settings(profile, max_examples=max(2, int(profile.max_examples * part)))
    @given(calls(function, stage.settings))
    def one(call: Call) -> None:
        nonlocal made, before
        made += 1
        before = before or stage.digest()
        try:
            stage.call(call)
            before = None
        except psycopg.Error as error:
            check_error(error, allowed)
            assert stage.digest() == before, "an error has left something behind"
        if made % EXAMPLES == 0:
            stage.check()
            stage.refresh()
            before = None

    for arguments in TRIED.get(name, []):
        one = example(Call(function, arguments))(one)
    one()
    stage.check()
    stage.refresh()


def test_every_public_function_is_fuzzed(stage: Stage) -> None:
    assert set(FUNCTIONS) == set(stage.functions)


def test_every_option_is_fuzzed(stage: Stage) -> None:
    sources = stage.conn.execute(
        "SELECT string_agg(prosrc, '') FROM pg_proc WHERE pronamespace = 'awa'::regnamespace"
    ).fetchall()
    found = {
        (field, key.strip())
        for field, keys in re.findall(KNOWN, sources[0][0])
        for key in keys.split(",")
        if key
    }
    assert len(found) > 40
    assert {key for _, key in found} - KEYS == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_answers_or_refuses(stage: Stage, errors: Mapping[str, set[str]], name: str) -> None:
    fuzz(stage, name, errors[name], SHORT)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_calls_answer_or_refuse(
    own_stage: Stage, errors: Mapping[str, set[str]], name: str
) -> None:
    fuzz(own_stage, name, errors[name], LONG)
    own_stage.work_off()


# Loads

CELLS: dict[str, tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    "kind": (st.just("k"), st.none() | texts),
    "args": (st.just({"a": {"b": 1}}), some_json),
    "queue": (st.sampled_from([*QUEUES, None]), queues),
    "priority": (st.sampled_from(["1", "4", " 2 ", None]), st.sampled_from(["5", "x", "2.5", ""])),
    "max_attempts": (st.sampled_from(["1", None]), st.sampled_from(["0", "1001", "99999999999"])),
    "run_at": (st.sampled_from(["2030-01-01", None]), st.sampled_from([*TIMES, "2030-02-30", ""])),
    "opts": (job_opts.right, job_opts.odd),
}


@st.composite
def rows_of(draw: st.DrawFn) -> list[dict[str, Any]]:
    odd = draw(st.sets(st.tuples(st.integers(0, 3), st.sampled_from(COLUMNS)), max_size=2))
    return [
        {column: draw(CELLS[column][(number, column) in odd]) for column in COLUMNS}
        for number in range(draw(st.integers(1, 4)))
    ]


def load(stage: Stage, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    copy = sql.SQL("COPY awa.job_inbox ({}) FROM STDIN").format(
        sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    with stage.conn.cursor() as cursor, cursor.copy(copy) as target:
        for row in rows:
            cells = {c: as_json(row[c], stage.known) for c in ("args", "opts")}
            target.write_row([{**row, **cells}[c] for c in columns])


def fuzz_loads(stage: Stage, allowed: set[str], profile: settings) -> None:
    made = 0

    @profile
    @given(st.lists(st.sampled_from(COLUMNS[1:]), unique=True), rows_of())
    def one(columns: list[str], rows: list[dict[str, Any]]) -> None:
        nonlocal made
        made += 1
        before = stage.digest()
        try:
            load(stage, ["kind", *columns], rows)
        except psycopg.Error as error:
            check_error(error, allowed, "row [1-4]: ")
            assert stage.digest() == before, "a load has left something behind"
        if made % EXAMPLES == 0:
            stage.check()

    one()
    stage.check()
    stage.refresh()


def test_a_load_stores_all_rows_or_refuses_one(
    stage: Stage, errors: Mapping[str, set[str]]
) -> None:
    fuzz_loads(stage, errors["insert_jobs"], SHORT)


@pytest.mark.long
def test_many_loads_store_all_rows_or_refuse_one(
    own_stage: Stage, errors: Mapping[str, set[str]]
) -> None:
    fuzz_loads(own_stage, errors["insert_jobs"], LONG)
    own_stage.work_off()


# Calls with several items

FIELDS = objects(ITEM).right | objects(ITEM).odd.filter(lambda value: isinstance(value, dict))


def fuzz_outcomes(stage: Stage, profile: settings) -> None:
    @profile
    @given(st.lists(FIELDS, min_size=1, max_size=4))
    def one(given_fields: list[dict[str, Any]]) -> None:
        attempts = stage.claim(len(given_fields))
        items = [{**a.item("completed"), **f} for a, f in zip(attempts, given_fields, strict=True)]
        call = "SELECT result, reason FROM awa.finish_jobs(%s, %s::jsonb)"
        rows = stage.conn.execute(call, [WORKER, as_json(items, {})]).fetchall()
        assert len(rows) == len(items)
        for attempt, (result, reason) in zip(attempts, rows, strict=True):
            status = value(stage.conn, f"SELECT awa.attempt_status{attempt.token}")
            assert (result, status == "open") in (("done", False), ("invalid", True))
            assert result == "done" or reason

    one()
    stage.check()


def test_an_outcome_that_is_refused_leaves_its_attempt_open(stage: Stage) -> None:
    fuzz_outcomes(stage, SHORT)


@pytest.mark.long
def test_many_outcomes_that_are_refused_leave_their_attempts_open(own_stage: Stage) -> None:
    fuzz_outcomes(own_stage, LONG)


def test_a_time_that_is_long_past_is_now(stage: Stage, database: Database) -> None:
    """Nor does it make a listing unreadable, where a job that is due has to wait."""
    before_christ = "4714-11-24 00:00+00 BC"
    with database.connect() as conn, database.connect(autocommit=False) as older:
        older.isolation_level = IsolationLevel.REPEATABLE_READ
        older.execute("SELECT 1")
        insert(conn, "q")  # makes the lane, which an older snapshot does not see
        call = "awa.insert_job('k', queue => 'q', run_at => %s)"
        changes = '{"run_at": "0001-01-01T00:00:00+15:00"}'
        assert value(older, f"SELECT ({call}).state", before_christ) == "scheduled"
        assert value(older, f"SELECT ({call}).state", before_christ) == "scheduled"
        older.commit()
        later = insert(conn, "q", opts={"delay_seconds": 60})
        conn.execute("SELECT awa.pause_queue('q'), awa.update_job(%s, %s)", [later, changes])
        rows = conn.execute("SELECT run_at > now() - interval '1 hour' FROM awa.jobs").fetchall()
        assert rows == [(True,)] * 4


def test_what_was_taken_in_is_given_out(stage: Stage) -> None:
    """Last: all jobs that the calls before have left can be claimed and completed."""
    stage.work_off()
