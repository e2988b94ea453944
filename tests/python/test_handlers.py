"""Registry, argument validation, retry policies and values on their way to JSON; no database."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict, Union
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import awa
from awa._codec import clean_text, dump_json
from awa._decode import Mismatch, compile_type
from awa._results import error_outcome, outcome_item
from awa._session import Backoff


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int = 0


class Options(TypedDict):
    size: int
    note: NotRequired[str]


@dataclass
class Line:
    product: str
    count: int = 1


@dataclass
class Order:
    id: UUID
    lines: list[Line]
    placed_at: datetime
    colour: Colour | None = None
    parent: Order | None = None
    options: Options = field(default_factory=lambda: Options(size=1))


@dataclass
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError("value must be positive")


AN_ID = "12345678-1234-5678-1234-567812345678"


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Any, {"a": [1]}, {"a": [1]}),
        (None, None, None),
        (bool, True, True),
        (int, 2**70, 2**70),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (str, "text", "text"),
        (Optional[int], None, None),  # noqa: UP045
        (int | None, 5, 5),
        (Union[int, str], "5", "5"),  # noqa: UP007
        (int | float, 1.5, 1.5),
        (float | int, 1, 1),
        (Literal["a", 1], 1, 1),
        (list[int], [1, 2], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (set[int], [1, 2, 2], {1, 2}),
        (frozenset[str], ["a"], frozenset({"a"})),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict[int, str], {"7": "a"}, {7: "a"}),
        (Annotated[int, "unit"], 1, 1),
        (datetime, "2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (date, "2026-01-02", date(2026, 1, 2)),
        (timedelta, 1.5, timedelta(seconds=1.5)),
        (UUID, AN_ID, UUID(AN_ID)),
        (Decimal, "1.10", Decimal("1.10")),
        (Path, "/tmp/x", Path("/tmp/x")),
        (Colour, "red", Colour.RED),
        (Point, {"x": 1}, Point(1)),
        (Options, {"size": 3}, {"size": 3}),
        (Line, {"product": "tea"}, Line("tea")),
    ],
)
def test_values_are_read_by_type_hint(hint: Any, value: Any, expected: Any) -> None:
    result = compile_type(hint, "here")(value, "x")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, "1", "x: expected an integer, got '1'"),
        (int, True, "x: expected an integer, got True"),
        (int, 1.5, "x: expected an integer"),
        (bool, 1, "x: expected true or false"),
        (float, "1", "x: expected a number"),
        (str, None, "x: expected a string, got None"),
        (str | None, 3, "x: expected a string, got 3"),
        (int | str, [], "x: expected int | str"),
        (Literal["a", "b"], "c", "x: expected one of 'a', 'b', got 'c'"),
        (list[int], [1, "2"], r"x\[1\]: expected an integer"),
        (tuple[int, int], [1], "x: expected an array of 2"),
        (set[Any], [[1]], "x: expected an array of distinct plain values"),
        (dict[str, int], {"k": None}, "x.k: expected an integer"),
        (datetime, "yesterday", "x: expected an ISO 8601 date and time"),
        (UUID, "1", "x: expected a UUID"),
        (Decimal, "one", "x: expected a decimal number"),
        (Colour, "green", "x: expected one of 'red', 'blue', got 'green'"),
        (Line, {"count": 1}, "x.product: missing field"),
        (Line, {"product": "tea", "colour": 1}, "x.colour: unexpected field"),
        (Line, ["tea"], "x: expected an object"),
        (Options, {"size": "big"}, "x.size: expected an integer"),
        (Positive, {"value": 0}, "x: value must be positive"),
    ],
)
def test_a_mismatch_names_the_field(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        compile_type(hint, "here")(value, "x")


def test_nested_types_survive_the_way_to_json_and_back() -> None:
    order = Order(
        id=UUID(AN_ID),
        lines=[Line("tea", 2), Line("milk")],
        placed_at=datetime(2026, 1, 2, tzinfo=UTC),
        colour=Colour.BLUE,
        parent=Order(UUID(AN_ID), [], datetime(2025, 1, 1, tzinfo=UTC)),
    )
    stored = json.loads(dump_json(order, "args"))
    assert compile_type(Order, "here")(stored, "order") == order
    stored["parent"]["lines"] = [{"product": 5}]
    with pytest.raises(Mismatch, match=r"order.parent.lines\[0\].product: expected a string"):
        compile_type(Order, "here")(stored, "order")


class Reading(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime
    values: tuple[int, ...] = ()


@dataclass
class Report:
    readings: list[Reading]


def test_pydantic_models_are_read_and_written() -> None:
    report = Report([Reading(at=datetime(2026, 1, 2, tzinfo=UTC), values=(1, 2))])
    stored = json.loads(dump_json(report, "args"))
    assert compile_type(Report, "here")(stored, "report") == report
    stored["readings"][0]["values"] = ["one"]
    with pytest.raises(Mismatch, match=r"report.readings\[0\]: 1 validation error(.|\n)*values.0"):
        compile_type(Report, "here")(stored, "report")


def test_constraints_of_pydantic_hold_for_single_parameters() -> None:
    decode = compile_type(Annotated[int, pydantic.Field(gt=0)], "here")
    assert decode(1, "n") == 1
    with pytest.raises(Mismatch, match=r"n: (.|\n)*greater than 0"):
        decode(0, "n")


class Unreadable:
    pass


def test_a_type_without_json_form_is_refused_at_registration() -> None:
    handlers = awa.Handlers()
    with pytest.raises(TypeError, match=r"bad\(thing\): .*Unreadable cannot be read"):

        @handlers.task()
        def bad(thing: Unreadable) -> None: ...

    with pytest.raises(TypeError, match=r"cannot take \*things"):

        @handlers.task()
        def worse(*things: int) -> None: ...


# Registry


def test_sets_of_handlers_combine_and_clash_loudly() -> None:
    first, second = awa.Handlers(), awa.Handlers()

    @first.task()
    def one() -> None: ...

    @second.task(kind="two", queue="other")
    def something() -> None: ...

    both = first | second
    assert {task.kind for task in both} == {"one", "two"}
    assert both.queues == ["default", "other"]
    assert len(first) == 1
    with pytest.raises(ValueError, match='two handlers for kind "one"'):
        both | awa.Handlers({"one": Line})


def test_a_task_is_still_its_function() -> None:
    handlers = awa.Handlers()

    @handlers.task()
    def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    assert double(4) == 8
    assert double.__doc__ == "Twice n."
    assert double.__name__ == double.kind == "double"


def test_insert_sends_arguments_by_name_and_the_options_of_the_task() -> None:
    handlers = awa.Handlers()

    @handlers.task(queue="mail", max_attempts=3, deadline=60, keep_result=True, tags=["a"])
    def send(job: awa.Job, to: str, /, line: Line, *, urgent: bool = False) -> None: ...

    assert send.item("me", Line("tea"), urgent=True) == {
        "kind": "send",
        "args": {"to": "me", "line": Line("tea"), "urgent": True},
        "queue": "mail",
        "max_attempts": 3,
        "opts": {"deadline_seconds": 60.0, "keep_result": True, "tags": ["a"]},
    }
    item = send.options(queue="slow", delay=timedelta(minutes=1), ordering_key="k").item(
        "me", Line("tea")
    )
    assert item["queue"] == "slow"
    assert item["opts"]["delay_seconds"] == 60
    assert item["opts"]["ordering_key"] == "k"
    with pytest.raises(TypeError, match="missing a required argument"):
        send.item("me")  # type: ignore[call-arg]


def test_a_task_is_unique_as_its_decorator_or_one_insert_says() -> None:
    handlers = awa.Handlers()
    spec: dict[str, Any] = {"by": ["args.to"], "period_seconds": 60}

    @handlers.task(unique=spec)
    def send(to: str, unique: str = "") -> None: ...

    @handlers.task(unique=True)
    def sweep() -> None: ...

    @handlers.task()
    def plain() -> None: ...

    def opts(insertion: Any, *args: str) -> Any:
        return insertion.item(*args).get("opts")

    assert opts(send, "me") == {"unique": spec}
    assert opts(sweep) == {"unique": {}}
    assert opts(plain) is None
    assert opts(send.options(unique={"by": ["args"]}), "me") == {"unique": {"by": ["args"]}}
    assert opts(send.options(unique=False), "me") is None
    assert opts(send.options(queue="q"), "me") == {"unique": spec}
    assert opts(plain.options(unique=True)) == {"unique": {}}
    # A parameter of the same name stays the handler's.
    assert send.item("me", unique="x")["args"] == {"to": "me", "unique": "x"}


def test_def_handlers_refuse_what_needs_an_event_loop() -> None:
    handlers = awa.Handlers()
    with pytest.raises(TypeError, match="cannot be stopped from outside"):

        @handlers.task(timeout=1)
        def blocking() -> None: ...


# Outcomes and retry policies


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), timedelta(days=-1)])
def test_outcomes_refuse_impossible_delays(seconds: Any) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        awa.RetryAfter(seconds)
    with pytest.raises(ValueError, match="finite number of seconds"):
        awa.Snooze(seconds)


@given(st.integers(-5, 10**9), st.floats(0, 1), st.floats(0, 10**6), st.floats(1, 1000))
def test_exponential_delays_stay_within_the_cap(
    attempt: int, jitter: float, base: float, factor: float
) -> None:
    policy = awa.Exponential(base, factor, cap_seconds=3600, jitter=jitter)
    assert 0 <= policy(attempt, ValueError()) <= 3600


def test_fixed_delays_repeat_the_last_one() -> None:
    policy = awa.Fixed([1, timedelta(seconds=5)])
    assert [policy(n, ValueError()) for n in (1, 2, 3, 99)] == [1, 5, 5, 5]


def _task(**options: Any) -> awa.Task[..., Any]:
    def handler() -> None: ...

    return awa.Handlers().task(**options)(handler)


def test_the_policy_of_a_kind_decides_about_an_exception() -> None:
    def decide(attempt: int, error: Exception) -> Any:
        return awa.Cancel("gone") if isinstance(error, KeyError) else attempt * 10

    assert error_outcome(_task(), 1, ValueError("x"))["outcome"] == "retry"
    assert "delay_seconds" not in error_outcome(_task(), 1, ValueError("x"))
    assert error_outcome(_task(retry=[7]), 1, ValueError())["delay_seconds"] == 7
    assert error_outcome(_task(retry=decide), 2, ValueError())["delay_seconds"] == 20
    cancelled = error_outcome(_task(retry=decide), 2, KeyError())
    assert (cancelled["outcome"], cancelled["reason"]) == ("cancel", "gone")
    never = error_outcome(_task(never_retry=[LookupError]), 1, KeyError("k"))
    assert (never["outcome"], never["error"]["error"]) == ("fail", "KeyError: 'k'")


def test_a_policy_that_fails_leaves_the_delay_to_the_database(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(attempt: int, error: Exception) -> float:
        raise ZeroDivisionError

    assert error_outcome(_task(retry=broken), 1, ValueError())["outcome"] == "retry"
    assert "retry policy" in caplog.text


def test_errors_are_short_and_can_be_stored() -> None:
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("nul \0, surrogate \ud800, " + "long " * 10_000)

    with pytest.raises(ValueError, match="nul") as caught:
        deep(30)
    error = error_outcome(_task(), 1, caught.value)["error"]
    text = json.dumps(error, ensure_ascii=False).encode()
    assert len(text) < 10_000
    assert "\0" not in error["error"]
    assert "\\ud800" in error["error"]
    assert len(error["traceback"].splitlines()) <= 10
    dump_json(error, "error")


def test_outcomes_carry_their_reason() -> None:
    assert outcome_item(awa.Fail("no\0pe"))["error"] == {"error": "nope"}
    assert outcome_item(awa.Cancel())["reason"] == "cancelled by handler"
    assert outcome_item(awa.RetryAfter(2, "busy")) == {
        "outcome": "retry",
        "delay_seconds": 2.0,
        "error": {"error": "busy"},
    }


# JSON


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "cannot be written as JSON"),
        ({"a": float("inf")}, "cannot be written as JSON"),
        ({"a": object()}, "object has no JSON form"),
        ({("a",): 1}, "cannot be written as JSON"),
        ("a\0b", "holds a NUL character"),
        ({"k\0": 1}, "holds a NUL character"),
        (["\ud800"], "holds a lone surrogate"),
    ],
)
def test_values_that_cannot_be_stored_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(awa.InvalidArgument, match=f"^args {message}|^args.*{message}"):
        dump_json(value, "args")


def test_an_escaped_backslash_is_not_a_nul() -> None:
    assert json.loads(dump_json("\\u0000", "args")) == "\\u0000"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner
            )
        ),
        max_leaves=20,
    )
)
def test_json_values_come_back_equal(value: Any) -> None:
    assert json.loads(dump_json(value, "args")) == value


@given(st.text())
def test_cleaned_text_is_valid_and_bounded(text: str) -> None:
    cleaned = clean_text(text, 20)
    cleaned.encode()
    assert "\0" not in cleaned
    assert len(cleaned) <= 6 * 23


def test_waits_grow_up_to_their_cap() -> None:
    backoff = Backoff(0.1, 1.0)
    waits = [backoff.next() for _ in range(20)]
    assert all(0.5 <= w <= 1.0 for w in waits[5:])
    assert waits[0] <= 0.1
    backoff.reset()
    assert backoff.next() <= 0.1
