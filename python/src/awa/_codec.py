"""JSON in and out: what may be enqueued, how Python values are written, and how they are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from psycopg.abc import Buffer
from psycopg.adapt import Loader

from .errors import InvalidArgument, LimitExceeded
from .models import Json

# The most that args_max_bytes can allow; what is larger need not be sent to be refused.
MAX_BYTES = 67_108_864
# The most that a jsonb of the database holds.
MAX_LIST_BYTES = 268_435_455


def _default(value: object) -> Json:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not asdict(): it deep-copies, and nested values come back here anyway.
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID | Decimal | PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return dict(value)
    dump = getattr(value, "model_dump", None)  # pydantic
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


_encoder = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_default
)


def dump_json(value: Json, field: str, most: int = MAX_BYTES) -> str:
    """JSON text of a value; a value that PostgreSQL could not store is refused by field name."""
    try:
        text = _encoder.encode(value)
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} holds a lone surrogate, which is not valid text",
            hint="Decode bytes with errors='replace', or send them as base64.",
        ) from error
    except Exception as error:  # the value's own code may raise anything
        raise InvalidArgument(
            f"{field} cannot be written as JSON: {error}",
            hint="Use None, bool, int, finite float, str, list, dict, or a dataclass of those.",
        ) from error
    if size > most:
        raise LimitExceeded(
            f"{field} has {size} bytes as JSON, the most is {most}",
            hint="Store large data elsewhere and enqueue a reference to it, or insert in portions.",
        )
    # The escape may also stand behind an escaped backslash; only then the slow look is needed.
    if "\\u0000" in text and _has_nul(value):
        raise InvalidArgument(
            f"{field} holds a NUL character, which PostgreSQL cannot store",
            hint="Strip it, or send the bytes as base64.",
        )
    return text


def _has_nul(value: Any) -> bool:
    return _walk_nul(json.loads(_encoder.encode(value)))


def _walk_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in k or _walk_nul(v) for k, v in value.items())
    if isinstance(value, list):
        return any(map(_walk_nul, value))
    return False


def _whole(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


_patient_decoder = json.JSONDecoder(parse_int=_whole)


def load_json(text: str | bytes) -> Any:
    """A stored value; whole numbers of thousands of digits, which Python does not read, as text.

    One of them must hide neither its job nor the other jobs of a listing.
    """
    try:
        return json.loads(text)
    except ValueError:
        return _patient_decoder.decode(text if isinstance(text, str) else text.decode())


class JsonLoader(Loader):
    """Reads jsonb by load_json."""

    def load(self, data: Buffer) -> Any:
        return load_json(bytes(data))


def check_text(text: str, field: str) -> str:
    """The text, refused by field name when PostgreSQL could not store it."""
    if "\0" in text:
        raise InvalidArgument(
            f"{field} holds a NUL character, which PostgreSQL cannot store",
            hint="Leave it out.",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} holds a lone surrogate, which is not valid text",
            hint="Decode bytes with errors='replace'.",
        ) from error
    return text


def clean_text(text: str, limit: int) -> str:
    """Text that PostgreSQL can store: no NUL, no lone surrogate, not longer than the limit."""
    if len(text) > limit:
        text = text[:limit] + "..."
    return text.replace("\0", "").encode("utf-8", "backslashreplace").decode("utf-8")
