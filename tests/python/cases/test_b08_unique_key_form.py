"""Case b08: which arguments have the same unique key.

Published vectors, from SQL and from Python, are in test_keys.py over docs/vectors; the paths of
`by` in tests/sql/api/unique_jobs.sql. Each version of the server runs all of this.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

import awa
from awa import keys
from engine import value

COMPOSED, DECOMPOSED = "\u00e9", "e\u0301"
# JSON as a producer might write it, and whether the keys are the same: the table of the contract.
PAIRS: list[tuple[str, str, bool]] = [
    ('{"a": 1, "b": {"c": 2, "d": 3}}', '{"b": {"d": 3, "c": 2}, "a": 1}', True),
    ('[{"a": 1, "b": 2}]', '[{"b": 2, "a": 1}]', True),
    (
        '{"bb": 1, "a": 2, "\\ue000": 3, "\\ud83d\\ude00": 4}',
        '{"\\ud83d\\ude00": 4, "\\ue000": 3, "a": 2, "bb": 1}',
        True,
    ),
    ('{"n": 1}', '{"n": 1.0}', True),
    ('{"n": 1}', '{"n": 1e0}', True),
    ('{"n": 100}', '{"n": 1E+2}', True),
    ('{"n": 0}', '{"n": -0}', True),
    ('{"n": 0.10}', '{"n": 0.1}', True),
    ('{"a": 1, "a": 2}', '{"a": 2}', True),
    ('"\\u00e9"', f'"{COMPOSED}"', True),
    ('"a\\/b"', '"a/b"', True),
    ('{"n": 1}', '{"n": "1"}', False),
    ('{"n": true}', '{"n": 1}', False),
    ('{"x": null}', "{}", False),
    ("null", '"null"', False),
    ("{}", "[]", False),
    ('{"n": 10000000000000001}', '{"n": 10000000000000000}', False),
    ('{"n": 9007199254740993}', '{"n": 9007199254740992}', False),
    ('{"n": 0.1}', '{"n": 0.1000000000000000055511151231257827}', False),
    (f'"{COMPOSED}"', f'"{DECOMPOSED}"', False),
    ('"A"', '"a"', False),
    ('{"A": 1}', '{"a": 1}', False),
    ("[1, 2]", "[2, 1]", False),
    ('["ab", "c"]', '["a", "bc"]', False),
    ('{"a": "b,c"}', '{"a": "b", "c": ""}', False),
    ('"a"', '"a "', False),
]
# What a Python producer can give; a longer fraction than a float has is not among it.
IN_PYTHON = [pair for pair in PAIRS if "0055511151231257827" not in pair[1]]
UNIQUE: dict[str, Any] = {"unique": {}}


def by_sql(conn: psycopg.Connection, kind: str, text: str) -> bool:
    """Insert as a raw SQL producer does; whether it was a duplicate."""
    query = "SELECT duplicate FROM awa.insert_job(%s, %s::jsonb, opts => '{\"unique\": {}}')"
    return bool(value(conn, query, kind, text))


def by_python(conn: psycopg.Connection, kind: str, text: str) -> bool:
    return awa.Client(conn).insert_job(kind, json.loads(text), opts=UNIQUE).duplicate


def by_python_key(conn: psycopg.Connection, kind: str, text: str) -> bool:
    """Insert with a key that the client has computed."""
    key = keys.unique_key(kind, args=json.loads(text))
    assert isinstance(key, bytes)
    assert len(key) == 16
    opts = {"unique": {"key": key.hex()}}
    return awa.Client(conn).insert_job(kind, None, opts=opts).duplicate


# The first insert and the second one.
WAYS = [(by_sql, by_python), (by_python, by_sql), (by_python_key, by_sql), (by_sql, by_sql)]


# Broken by canonical JSON as jsonb prints it (1.0 apart from 1; keys by length), and by a client
# that reads numbers as floats.
def test_b08_each_pair_has_the_same_key_or_not_from_every_entry(conn: psycopg.Connection) -> None:
    wrong = []
    for number, pair in enumerate(PAIRS):
        one, other, is_same = pair
        for first, second in WAYS if pair in IN_PYTHON else [(by_sql, by_sql)]:
            kind = f"{number} {first.__name__} {second.__name__}"
            assert not first(conn, kind, one)
            if second(conn, kind, other) != is_same:
                wrong.append((*pair, first.__name__, second.__name__))
        # Whichever was inserted, it is a duplicate of itself.
        assert first(conn, kind, one)
        assert second(conn, kind, other)
    assert wrong == []


# A float is the shortest decimal that reads back as it, in JSON as in the key.
def test_b08_numbers_are_not_rounded(conn: psycopg.Connection) -> None:
    for number in (0.1, 1e16, 1e22, 1e23, 5e-324, 2**53 + 1, -(2**63), 10**30):
        key = keys.unique_key("k", args=number)
        in_sql = "SELECT awa.unique_key('k', NULL, %s::jsonb, NULL)"
        assert value(conn, in_sql, json.dumps(number)) == key
        neighbour = number + 1 if isinstance(number, int) else number * 2
        assert keys.unique_key("k", args=neighbour) != key


def test_b08_kind_and_named_parts_are_apart_and_priority_is_no_part(
    conn: psycopg.Connection,
) -> None:
    client = awa.Client(conn)

    def is_new(kind: str = "k", queue: str = "q", priority: int = 2, **unique: Any) -> bool:
        return not client.insert_job(
            kind, {"a": "x", "b": "y"}, queue=queue, priority=priority, opts={"unique": unique}
        ).duplicate

    assert is_new()
    assert not is_new(priority=1)
    assert not is_new(queue="other")  # unless the queue is named
    assert is_new(kind="K")
    assert is_new(by=["queue", "args"])
    assert is_new(by=["queue", "args"], queue="other")
    assert not is_new(by=["queue", "args"], queue="other", priority=4)
    # Where one part ends and the next begins matters.
    assert is_new("ab", "c", by=["queue"])
    assert is_new("a", "bc", by=["queue"])
    assert not is_new("a", "bc", by=["queue"])
    for args in ({"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}, {"b": "abc"}, {"a": "abc"}):
        by = {"unique": {"by": ["args.a", "args.b"]}}
        assert not client.insert_job("parts", args, opts=by).duplicate


def test_b08_the_period_is_that_of_the_insert_by_the_clock_of_the_database(
    conn: psycopg.Connection,
) -> None:
    client = awa.Client(conn)
    # Half of a period of ten years lies ahead, whatever the day: none ends while this runs.
    now = value(conn, "SELECT extract(epoch FROM clock_timestamp())::float8")
    period = 315_360_000 if now % 315_360_000 < 315_359_000 else 315_000_000
    unique = {"unique": {"period_seconds": period}}
    first = client.insert_job("k", {}, opts={**unique, "delay_seconds": 3600})
    again = client.insert_job("k", {}, opts=unique)
    assert (again.job_id, again.duplicate) == (first.job_id, True)
    key = keys.unique_key("k", args={}, period_bucket=int(now // period))
    assert client.cancel_by_unique_key(key) == first.job_id
