"""Values for each parameter of a public function: those that are right, and hostile ones.

Values are drawn before a call is made, so what only the database knows, such as the id of a job
that runs, is drawn as a Ref and looked up at the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from engine import WORKER

Values = st.SearchStrategy[Any]
TOKEN = ("job_id", "run_lease", "claim_slot", "batch_id", "position")
JOBS = (
    *("scheduled", "available", "running", "completed", "retryable", "failed", "cancelled"),
    *("dead", "released", "pruned", "unique", "never"),
)
ATTEMPTS = ("running", "completed", "retryable", "failed", "dead", "released")
QUEUES = ("stage", "sharded", "strict", "dead", "paused", "undeclared", "Stage")
UNIQUE_KEY = "5a" * 16


@dataclass(frozen=True, slots=True)
class Ref:
    """What the stage knows under a name: a field of a job or of the attempt that has run it."""

    name: str
    field: str


@dataclass(frozen=True, slots=True)
class Raw:
    """JSON that Python would write otherwise, or not at all."""

    text: str

    def __repr__(self) -> str:
        return f"Raw({self.text[:40]!r}, {len(self.text)})"


class Long(str):
    """A text that is not shown in full."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Long({self[:10]!r}, {len(self)})"


@dataclass(frozen=True, slots=True)
class Array:
    """An array of JSON values or numbers; its elements become text when their Refs are known."""

    elements: tuple[object, ...]
    start: int = 1
    is_nested: bool = False

    def text(self, as_text: Callable[[object], str]) -> str:
        """The literal."""
        if not self.elements:
            return "{}"
        inner = "{" + ",".join(self._element(e, as_text) for e in self.elements) + "}"
        if self.is_nested:
            return "{" + inner + "," + inner + "}"
        return f"[{self.start}:{self.start + len(self.elements) - 1}]={inner}"

    @staticmethod
    def _element(value: object, as_text: Callable[[object], str]) -> str:
        if value is None:
            return "NULL"
        return '"' + as_text(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def as_json(value: object, known: Mapping[str, Mapping[str, int]]) -> str:
    """JSON text, each Ref replaced by what it stands for."""
    match value:
        case Raw(text):
            return text
        case Ref(name, field):
            return str(known[name][field])
        case dict():
            items = (f"{json.dumps(k)}: {as_json(v, known)}" for k, v in value.items())
            return "{" + ", ".join(items) + "}"
        case list():
            return "[" + ", ".join(as_json(item, known) for item in value) + "]"
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Field:
    """What may be given for something: right values, and odd ones, most of them wrong."""

    right: Values
    odd: Values


# Scalars

TEXTS = (
    *("", " ", "\t", "a\nb", "\r\n", "\x01", "\x1b[2J", "\x7f", "\u0085", "\u2028", "\ufeff"),
    *("'", '"', "';--", "\\", "\\x00", "%s %n %I", "{}", "{1,2}", "null", "NULL", "$1", "$$"),
    *("é", "e\u0301", "\u202egnp", "\U0001f600", "\ud7ff", "\U0010ffff", "İ", "ß" * 200),
    *(
        "x" * 200,
        "x" * 201,
        "\U0001f600" * 200,
        "x" * 513,
        Long("x" * 1025),
        Long("x" * 2001),
        Long("y" * 100_000),
    ),
    *("NaN", "-1", "0", "1", "1e9", "1e400", "infinity", "0x10", " 1", "1_000", "true"),
)
INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 25, 32, 33, 63, 64, 65, 99, 1000, 1001, -1, -2),
    *(2**15, 2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1),
)
BIGINTS = (
    *(*INTEGERS, 2**31, 2**32, 2**42 - 1, 2**42, 2**42 + 1, 2**53, 2**62, -(2**62)),
    *(2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1),
)
TIMES = (
    *("infinity", "-infinity", "4714-11-24 00:00+00 BC", "0001-01-01 00:00+00", "epoch"),
    *("0001-12-31 23:59:59+00 BC", "1969-12-31 23:59:59.999999+00", "2000-01-01 00:00+15:59"),
    *("9999-12-30 23:59:59.999999+00", "9999-12-31 00:00+00", "10000-01-01 00:00+00"),
    "294276-12-31 23:59:59.999999+00",
)
UUIDS = (str(UUID(int=0)), str(UUID(int=2**128 - 1)), str(UUID(int=7, version=4)))
BYTES = (b"", b"\x00", b"\x00" * 16, b"\xff" * 17, b"x" * 1000)
LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 4, -1, 0.5, 2.5, 64, 65, 1001, 2**31, 2**63 - 1, 2**63, 2**64),
    *(Raw("1e400"), Raw("-1e400"), Raw("1e131071"), Raw("1e-16000"), Raw("-0.0"), Raw("1.0")),
    *("", " ", "x", "1", "-1", "1e400", "NaN", "Infinity", "null", "a\nb", "\x7f", "'", '"', "\\"),
    *(
        "x" * 201,
        Long("x" * 1025),
        Long("x" * 2001),
        Long("x" * 70_000),
        "\U0001f600" * 200,
        "9999-12-31T00:00:00Z",
    ),
    *([], {}, [None], [[]], [{}], {"": None}, {"a": {}}, [1, "a", None, {}], ["a"] * 21),
    *(Raw("[" * n + "]" * n) for n in (255, 256, 257, 3000)),
    *(Raw('{"a":' * 300 + "1" + "}" * 300), Raw('{"a": 1, "a": 2}'), Raw('{"a\\nb": 1}')),
    *({"x" * 300: 1}, Raw("[" + "0," * 9999 + "0]")),
)

texts = st.sampled_from(TEXTS) | st.text(
    st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30
)
# Each queue that a job gets into brings lanes, so their number has a bound.
queues = st.sampled_from(TEXTS)
leaves = st.sampled_from(LEAVES)
some_json = leaves | st.lists(leaves, max_size=3) | st.dictionaries(texts, leaves, max_size=3)


def choice(*values: object, odd: Sequence[object] = ()) -> Field:
    """One of some values; by odd ones, a type of JSON that they are not is meant as well."""
    return Field(st.sampled_from(values), st.sampled_from(odd) | some_json if odd else some_json)


def refs(field: str, names: Sequence[str], others: Sequence[object]) -> Field:
    return Field(st.sampled_from([Ref(name, field) for name in names]), st.sampled_from(others))


# JSON


def objects(fields: Mapping[str, Field]) -> Field:
    """Objects of a few known keys; odd ones have one odd value or key, or are no object."""
    keys = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True) if fields else None

    @st.composite
    def right(draw: st.DrawFn) -> dict[str, Any]:
        return {key: draw(fields[key].right) for key in draw(keys)} if keys is not None else {}

    @st.composite
    def odd_value(draw: st.DrawFn) -> dict[str, Any]:
        key = draw(st.sampled_from(sorted(fields)))
        return draw(right()) | {key: draw(fields[key].odd)}

    @st.composite
    def odd_key(draw: st.DrawFn) -> dict[str, Any]:
        key = draw(st.sampled_from(["unknown", "Queue", "a\nb", "", "y" * 1000]))
        return draw(right()) | {key: draw(leaves)}

    odd = [odd_key(), some_json] if not fields else [odd_value()] * 6 + [odd_key(), some_json]
    return Field(right(), st.sampled_from(odd).flatmap(lambda strategy: strategy))


def arrays(items: Field) -> Field:
    """Arrays of some items, one of which is odd in odd ones."""
    some = st.lists(items.right, max_size=2)
    with_odd_one = st.tuples(some, items.odd, some).map(lambda t: [*t[0], t[1], *t[2]])
    return Field(st.lists(items.right, min_size=1, max_size=3), with_odd_one | some_json)


BACKOFF = {
    "base_seconds": choice(0, 0.001, 86400),
    "factor": choice(1, 2, 100),
    "cap_seconds": choice(0, 1, 86400),
    "jitter": choice(0, 1, 0.25),
    "delays": choice(
        *([0], [1, 2.5], [86400], [0] * 100),
        odd=[[86401], ["1"], [[1]], [0] * 101, [-1], [], [None]],
    ),
}
BACKPRESSURE = {"reject": choice(1, 2**31 - 1, odd=[0, 2**31])}
UNIQUE = {
    "by": choice(
        *(["args"], ["queue", "args"], [], ["args.a"], ["args.a.b", "args.a"], ["args.a\nb"]),
        odd=[["args.", "x"], ["args", "args.a"], [None], ["args." + "x." * 300 + "y"], [["args"]]],
    ),
    "key": choice(UNIQUE_KEY, UNIQUE_KEY.upper(), odd=["0" * 31, "0" * 33, "z" * 32]),
    "period_seconds": choice(0.001, 1, 86400, 315360000),
    "states": choice(
        *(["scheduled"], ["available", "running"], ["scheduled", "available", "failed"]),
        odd=[
            *(["running"], ["scheduled", "completed"], ["available", "nonsense"], [["available"]]),
            ["waiting_external", "available"],
        ],
    ),
    "on_conflict": choice("return", "raise", "replace", odd=["ignore", "RETURN"]),
}
JOB_OPTS = {
    "tags": choice(["a"], ["a", "a"], ["x" * 200] * 20, [], odd=[["x" * 201], [1], [""]]),
    "metadata": choice({"a": 1}, {"a": {"b": [1]}}),
    "ordering_key": choice("k", "x" * 1024, "\U0001f600"),
    "delay_seconds": choice(0, 0.5, 3600, 315360000, odd=[315360000.1]),
    "deadline_seconds": choice(0.001, 60, 31536000),
    "keep_result": choice(True, False),
    "backoff": objects(BACKOFF),
    "trace": choice("00-aa-bb-01"),
    "unique": objects(UNIQUE),
    "backpressure": Field(
        st.sampled_from(["off", "signal", {"reject": 1}, {"reject": 10_000}]),
        objects(BACKPRESSURE).odd,
    ),
}
LATER = {"after": [1], "on_parent_failure": "cancel", "concurrency_key": "c"}
job_opts = objects(JOB_OPTS)
job_opts = Field(job_opts.right, job_opts.odd | st.sampled_from([{k: v} for k, v in LATER.items()]))
JOB = {
    "kind": choice("k", odd=TEXTS),
    "args": choice({"a": {"b": 1}}, [1], 1, {}),
    "queue": Field(st.sampled_from(QUEUES), queues | some_json),
    "priority": choice(1, 4, odd=[5, 0, -(2**31), 2.5]),
    "max_attempts": choice(1, 1000, odd=[1001, 0]),
    "run_at": choice(
        *("2030-01-31T12:00:00Z", "9999-12-30T23:59:59.999999Z", "0001-01-02T00:00:00Z"),
        "2030-01-01 00:00:00.123456789-0800",
        odd=[
            *("0000-01-01T00:00:00Z", "2030-02-30T00:00:00Z", "2030-01-01T24:00:00Z"),
            *("2030-01-01T00:00:60Z", "2030-01-01T00:00:00+99", "2030-01-01", "infinity", "now"),
            *("9999-12-31T23:59:59-15:00", "0001-01-01T00:00:00+15:00"),
        ],
    ),
    "opts": job_opts,
}
TOKEN_FIELDS = {
    field: Field(
        st.sampled_from([Ref(name, field) for name in ATTEMPTS]),
        st.sampled_from(BIGINTS) | st.sampled_from(BIGINTS).map(str) | leaves,
    )
    for field in TOKEN
}
ITEM = {
    "result": choice(1, {"a": 1}, None, odd=LEAVES),
    "error": choice("boom", {"error": "boom", "attempt": "x", "at": 5}, [1], odd=LEAVES),
    "delay_seconds": choice(0, 1.5, 31536000, odd=[31536001]),
    "reason": choice("because", "unknown_kind", "x" * 3000),
    "outcome": choice(
        *("completed", "retry", "snooze", "cancel", "fail", "released"), odd=["rescued", "moved"]
    ),
}
HOLD = {
    "claim_slot": TOKEN_FIELDS["claim_slot"],
    "batch_id": TOKEN_FIELDS["batch_id"],
    "positions": arrays(TOKEN_FIELDS["position"]),
}
MOVE = {
    "queue": JOB["queue"],
    "priority": JOB["priority"],
    "delay_seconds": choice(0, 3600, 315360000),
}
INFO = {
    "queues": choice({"stage": 5}, ["stage"]),
    "kinds": choice(["k"], {"k": 1}),
    "hostname": choice("host"),
    "pid": choice(1, odd=[2**70]),
}
CLAIM = {
    "separate": choice(["k"], [], odd=[[None], [1, {"a": []}]]),
    "deadline_seconds": choice(0.001, 31536000),
    "wake_others": choice(True, False),
}
TICK = {
    "steps": choice([], ["promote"], ["promote"] * 50, odd=[["x"], [["promote"]], [None]]),
    "milliseconds": choice(1, 600000, odd=[0.5, 600001]),
    "rows": choice(1, 100000, odd=[2.5, 100001]),
}
QUEUE = {
    "enqueue_shards": choice(1, 2, odd=[65, 2.5]),
    "strict_fifo": choice(True, False),
    "notify": choice(True, False),
    "dlq": choice(True, False, None),
    "aging_seconds": choice(0, 86400, None, odd=[86401]),
    "deadline_seconds": choice(0.001, 31536000, None),
}
DRAIN = {"limit": choice(1, 10000, odd=[10001]), "reason": choice("x")}
CHANGES = {
    **{k: v for k, v in JOB.items() if k not in ("kind", "opts")},
    **{k: JOB_OPTS[k] for k in ("delay_seconds", "tags", "metadata", "deadline_seconds")},
    **{k: JOB_OPTS[k] for k in ("keep_result", "backoff")},
}
# The keys of every object above: a test compares them with those that the functions know.
KEYS = {
    *(key for part in (JOB, JOB_OPTS, UNIQUE, BACKOFF, BACKPRESSURE, MOVE) for key in part),
    *(key for part in (CLAIM, TICK, QUEUE, DRAIN, CHANGES, LATER) for key in part),
    "result",
}


def with_token(field: Field, keys: Sequence[str]) -> Field:
    """Objects with numbers of one attempt as they came, or all but one of them."""
    names = st.sampled_from(ATTEMPTS)

    @st.composite
    def right(draw: st.DrawFn) -> Any:
        name = draw(names)
        return {key: Ref(name, key) for key in keys} | draw(field.right)

    @st.composite
    def odd(draw: st.DrawFn) -> Any:
        key = draw(st.sampled_from(keys))
        return draw(right()) | {key: draw(TOKEN_FIELDS[key].odd)}

    joined = right().flatmap(lambda token: with_defaults(field, **token).odd)
    return Field(right(), odd() | joined)


def with_defaults(field: Field, **defaults: object) -> Field:
    """Objects that have some keys, whatever else they have."""

    def join(value: object) -> object:
        return defaults | value if isinstance(value, dict) else value

    return Field(field.right.map(join), field.odd.map(join))


# By function and parameter.
OF_CALLS: dict[tuple[str, str], Field] = {
    ("insert_job", "opts"): job_opts,
    ("insert_many", "opts"): job_opts,
    ("insert_jobs", "jobs"): arrays(with_defaults(objects(JOB), kind="k")),
    ("insert_jobs", "opts"): objects({}),
    ("register_instance", "info"): objects(INFO),
    ("heartbeat", "holds"): arrays(
        with_token(with_defaults(objects(HOLD), positions=[]), ("claim_slot", "batch_id"))
    ),
    ("claim_ready_runtime", "opts"): objects(CLAIM),
    ("finish_jobs", "outcomes"): arrays(
        with_token(with_defaults(objects(ITEM), outcome="completed"), TOKEN)
    ),
    ("complete_job", "opts"): objects({"result": choice(1, {"a": 1})}),
    ("tick", "budget"): objects(TICK),
    ("work", "opts"): objects({}),
    ("declare_queue", "opts"): objects(QUEUE),
    ("drain_queue", "opts"): objects(DRAIN),
    ("retry_job", "opts"): objects(MOVE),
    ("retry_dlq", "opts"): objects(MOVE),
    ("update_job", "changes"): objects(CHANGES),
    # Those jobs that a call is for; BY_NAME has all.
    ("update_job", "job_id"): refs("job_id", ("scheduled", "available", "retryable"), BIGINTS),
    ("retry_dlq", "job_id"): refs("job_id", ("dead",), BIGINTS),
    ("purge_dlq", "job_id"): refs("job_id", ("dead",), BIGINTS),
}


# Parameters


def some_arrays(items: Field) -> Field:
    """Arrays as PostgreSQL has them: odd ones with NULLs, two dimensions, or odd lower bounds."""
    odd = st.builds(
        Array,
        st.lists(items.right | items.odd | st.none(), max_size=4).map(tuple),
        st.sampled_from([1, 0, -5, 2**30]),
        st.sampled_from([False, False, False, True]),
    )
    return Field(st.lists(items.right, min_size=1, max_size=4).map(lambda e: Array(tuple(e))), odd)


def choices(right: Sequence[object], odd: Sequence[object]) -> Field:
    return Field(st.sampled_from(right), st.sampled_from(odd))


# A type of the public surface that is new has no values yet, and the test fails.
BY_TYPE: dict[str, Field] = {
    "text": Field(st.just("because"), texts),
    "integer": choices([1], INTEGERS),
    "bigint": choices([1], BIGINTS),
    "boolean": choices([True, False], [None]),
    "uuid": choices([str(WORKER)], UUIDS),
    "bytea": Field(st.just(bytes.fromhex(UNIQUE_KEY)), st.sampled_from(BYTES) | st.binary()),
    "timestamp with time zone": choices(["2030-01-01 00:00+00", "2020-01-01 00:00+00"], TIMES),
    "jsonb": Field(st.sampled_from([{}, {"a": {"b": 1}}, [1]]), some_json),
    "jsonb[]": some_arrays(choice({}, 1)),
    "bigint[]": some_arrays(refs("position", ATTEMPTS, BIGINTS)),
    "regprocedure": choices(["handle", "handle_job"], ["handle_set", "lower", "max", 0, 1, 2**31]),
    "regrole": choices(["awa_owner", "pg_monitor"], ["postgres", 0, 2**31]),
}
BY_NAME: dict[str, Field] = {
    "queue": Field(st.sampled_from(QUEUES), queues),
    "kind": Field(st.sampled_from(["k", "bound"]), texts),
    "job_id": refs("job_id", JOBS, BIGINTS),
    "run_lease": refs("run_lease", ATTEMPTS, BIGINTS),
    "batch_id": refs("batch_id", ATTEMPTS, BIGINTS),
    "claim_slot": refs("claim_slot", ATTEMPTS, INTEGERS),
    "position": refs("position", ATTEMPTS, BIGINTS),
    "priority": choices([1, 2, 3, 4], INTEGERS),
    "max_attempts": choices([25, 1, 1000], INTEGERS),
    "max_batch": choices([1, 1000], INTEGERS),
    "max_jobs": choices([1, 32], INTEGERS),
    "shards": choices([1, 64], INTEGERS),
}
NUMBERS = ("0", "1", "0.05", "60", "1024", "65536", "86400", "1.0000001", "-1", "1e3", "٣")


def parameter(function: str, name: str, type_name: str, settings: Sequence[str]) -> Field:
    """What may be given for one parameter; NULL is odd."""
    if (function, name) in OF_CALLS:
        field = OF_CALLS[function, name]
    elif (function, name) == ("set_setting", "name"):
        field = Field(st.sampled_from(settings), texts)
    elif (function, name) == ("set_setting", "value"):
        field = Field(st.sampled_from(NUMBERS), texts)
    else:
        field = BY_NAME.get(name, BY_TYPE[type_name])
    return Field(field.right, st.sampled_from([field.odd] * 5 + [st.none()]).flatmap(lambda s: s))
