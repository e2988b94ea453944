"""The published keys: vectors, the database and the package say the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import psycopg
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from awa import InvalidArgument, keys
from engine import value

VECTORS = Path(__file__).parents[2] / "docs/vectors"
BLAKE3_INPUTS = 2000
BLAKE3_EDGES = (0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 4096)
WIDTHS = {"1", "2", "4", "8", "64"}


def vectors(name: str) -> list[dict[str, Any]]:
    found = json.loads((VECTORS / f"{name}.json").read_text())["vectors"]
    assert len(found) >= 7
    return list(found)


def test_unique_keys_are_the_published_ones(conn: psycopg.Connection) -> None:
    for vector in vectors("unique_keys"):
        parts = {name: part for name, part in vector.items() if name not in {"key", "kind"}}
        key = bytes.fromhex(vector["key"])
        assert keys.unique_key(vector["kind"], **parts) == key, vector
        args = json.dumps(vector["args"]) if "args" in vector else None
        assert key == value(
            conn,
            "SELECT awa.unique_key(%s, %s, %s::jsonb, %s)",
            *(vector["kind"], vector.get("queue"), args, vector.get("period_bucket")),
        )


def test_canonical_json_is_the_published_one(conn: psycopg.Connection) -> None:
    for vector in vectors("canonical_json"):
        assert keys.canonical_json(json.loads(vector["json"])) == vector["canonical"]
        in_sql = value(conn, "SELECT awa._canonical_json(%s::jsonb)", vector["json"])
        assert in_sql == vector["canonical"]


def test_concurrency_digests_are_the_published_ones(conn: psycopg.Connection) -> None:
    text = (VECTORS / "concurrency_digests.json").read_text()
    assert json.loads(text)["domain"] == keys.CONCURRENCY_DOMAIN.decode()
    for vector in vectors("concurrency_digests"):
        digest = bytes.fromhex(vector["digest"])
        assert keys.concurrency_digest(vector["key"]) == digest
        assert value(conn, "SELECT awa.concurrency_digest(%s)", vector["key"]) == digest
        assert vector["shards"].keys() == WIDTHS
        for width, shard in vector["shards"].items():
            assert keys.digest_shard(digest, int(width)) == shard
            assert value(conn, "SELECT awa._digest_shard(%s, %s)", digest, int(width)) == shard


def test_ordering_keys_route_as_published(conn: psycopg.Connection) -> None:
    for vector in vectors("ordering_shards"):
        assert str(keys.ordering_hash(vector["key"])) == vector["hash"]
        assert vector["shards"].keys() == WIDTHS
        for width, shard in vector["shards"].items():
            assert keys.ordering_shard(vector["key"], int(width)) == shard
            in_sql = value(conn, "SELECT awa.ordering_shard(%s, %s)", vector["key"], int(width))
            assert in_sql == shard


def test_blake3_in_sql_equals_the_package(conn: psycopg.Connection) -> None:
    chance = random.Random(2)
    lengths = [*BLAKE3_EDGES, *(edge + 1 for edge in BLAKE3_EDGES), 3 * 1024, 7 * 1024 + 1, 9000]
    while len(lengths) < BLAKE3_INPUTS:
        lengths.append(chance.choice((chance.choice(BLAKE3_EDGES[:5]), chance.randrange(300))))
    inputs = [chance.randbytes(length) for length in lengths]
    rows = conn.execute(
        "SELECT awa._blake3(u.i) FROM unnest(%s::bytea[]) WITH ORDINALITY u (i, o) ORDER BY u.o",
        [inputs],
    ).fetchall()
    wrong = [
        len(data)
        for data, (digest,) in zip(inputs, rows, strict=True)
        if digest != blake3(data).digest()
    ]
    assert wrong == []


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def test_database_and_package_write_the_same_canonical_json(conn: psycopg.Connection) -> None:
    @given(JSON_VALUES)
    def check(generated: Any) -> None:
        text = json.dumps(generated)
        in_sql = value(conn, "SELECT awa._canonical_json(%s::jsonb)", text)
        assert keys.canonical_json(generated) == in_sql

    check()


def test_canonical_json_goes_as_deep_as_args_may(conn: psycopg.Connection) -> None:
    text = '{"a":[' * 127 + "1" + "]}" * 127
    assert value(conn, "SELECT awa._canonical_json(%s::jsonb)", text) == text
    assert keys.canonical_json(json.loads(text)) == text


@pytest.mark.parametrize("shards", [0, 65, -1])
def test_a_width_that_no_queue_has_is_refused(shards: int) -> None:
    with pytest.raises(InvalidArgument, match="shards is"):
        keys.ordering_shard("key", shards)
    with pytest.raises(InvalidArgument, match="shards is"):
        keys.digest_shard(bytes(32), shards)
