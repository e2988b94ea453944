"""Keys as the database computes them: unique keys, concurrency digests, shards.

For producers that want a key before they talk to the database. The forms are published with vectors
in docs/vectors; `awa.unique_key()` and the other SQL functions give the same.
"""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import Any

from blake3 import blake3

from ._codec import dump_json
from .errors import InvalidArgument
from .models import Json

__all__ = [
    "CONCURRENCY_DOMAIN",
    "MAX_SHARDS",
    "canonical_json",
    "concurrency_digest",
    "digest_shard",
    "ordering_hash",
    "ordering_shard",
    "unique_key",
]

CONCURRENCY_DOMAIN = b"awa.concurrency_key.v1"
MAX_SHARDS = 64


def canonical_json(value: Json) -> str:
    """Return the canonical text of a JSON value, the one that keys are computed over.

    No white space, the keys of an object in the order of their code points, characters unescaped
    where JSON allows it, and numbers as exact decimals without exponent or needless zeros.
    """
    return _write(json.loads(dump_json(value, "value"), parse_float=Decimal, parse_int=Decimal))


def unique_key(
    kind: str, *, queue: str | None = None, args: Json = None, period_bucket: int | None = None
) -> bytes:
    """Return the key of a unique job, 16 bytes; what is None is left out of it."""
    data = kind.encode()
    if queue is not None:
        data += b"\0" + queue.encode()
    if args is not None:
        data += b"\0" + canonical_json(args).encode()
    if period_bucket is not None:
        data += b"\0" + period_bucket.to_bytes(8, "little", signed=True)
    return blake3(data).digest(16)


def concurrency_digest(key: str) -> bytes:
    """Return the digest of a concurrency key, 32 bytes."""
    return hashlib.sha256(CONCURRENCY_DOMAIN + b"\0" + key.encode()).digest()


def digest_shard(digest: bytes, shards: int) -> int:
    """Return the shard of a digest in a queue with so many shards."""
    return int.from_bytes(digest[:8], "big") % _check_shards(shards)


def ordering_shard(key: str, shards: int) -> int:
    """Return the shard of an ordering key in a queue with so many shards."""
    return ordering_hash(key) % _check_shards(shards)


def ordering_hash(key: str) -> int:
    """Return the 64-bit hash of an ordering key: multiply, then add each byte."""
    value = 14695981039346656037
    for byte in key.encode():
        value = (value * 1099511628211 + byte) % 2**64
    return value


def _check_shards(shards: int) -> int:
    if not 1 <= shards <= MAX_SHARDS:
        raise InvalidArgument(
            f"shards is {shards}", hint=f"A queue has 1 to {MAX_SHARDS} enqueue_shards."
        )
    return shards


def _write(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_write(k)}:{_write(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_write, value)) + "]"
    if isinstance(value, Decimal):
        return _write_number(value)
    return json.dumps(value, ensure_ascii=False)


def _write_number(number: Decimal) -> str:
    if not number:
        return "0"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
