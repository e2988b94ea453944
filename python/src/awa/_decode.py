"""Turns JSON values into the types that a handler's parameters name, or says what does not fit."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from collections.abc import Set as AbstractSet
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, Union
from uuid import UUID

from .models import Json

# A decoder takes the JSON value and the path to it, and returns the Python value.
Decoder = Callable[[Any, str], Any]

_MISSING = object()


class Mismatch(Exception):
    """A value does not fit the type that the handler asks for."""


def _wrong(path: str, expected: str, value: Json) -> Mismatch:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return Mismatch(f"{path}: expected {expected}, got {shown}")


def _any(value: Json, path: str) -> Json:
    return value


def _none(value: Json, path: str) -> None:
    if value is not None:
        raise _wrong(path, "null", value)


def _bool(value: Json, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong(path, "true or false", value)


def _int(value: Json, path: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # JSON has one number type; 3.0 is how some producers write 3.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _wrong(path, "an integer", value)


def _float(value: Json, path: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _wrong(path, "a number", value)


def _str(value: Json, path: str) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(path, "a string", value)


def _parsed(parse: Callable[[str], Any], expected: str) -> Decoder:
    def decode(value: Json, path: str) -> Any:
        if isinstance(value, str):
            try:
                return parse(value)
            except (ValueError, InvalidOperation):
                pass
        raise _wrong(path, expected, value)

    return decode


def _decimal(value: Json, path: str) -> Decimal:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return Decimal(str(value))
        except InvalidOperation:
            pass
    raise _wrong(path, "a decimal number", value)


def _timedelta(value: Json, path: str) -> timedelta:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except OverflowError:
            pass
    raise _wrong(path, "a number of seconds", value)


_SCALARS: dict[Any, Decoder] = {
    Any: _any,
    object: _any,
    None: _none,
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    datetime: _parsed(datetime.fromisoformat, "an ISO 8601 date and time"),
    date: _parsed(date.fromisoformat, "an ISO 8601 date"),
    time: _parsed(time.fromisoformat, "an ISO 8601 time"),
    timedelta: _timedelta,
    UUID: _parsed(UUID, "a UUID"),
    Decimal: _decimal,
    Path: _parsed(Path, "a path"),
    PurePath: _parsed(PurePath, "a path"),
}
_LISTS = {list, Sequence, MutableSequence, Iterable, Collection}
_SETS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    set: set,
    frozenset: frozenset,
    AbstractSet: frozenset,
}
_DICTS = {dict, Mapping, MutableMapping}


def compile_type(hint: Any, where: str) -> Decoder:
    """The decoder for a type hint; TypeError when the hint has no JSON form."""
    return _compile(hint, where, {})


def _compile(hint: Any, where: str, seen: dict[Any, Decoder]) -> Decoder:
    try:
        if hint in _SCALARS:
            return _SCALARS[hint]
    except TypeError:  # an unhashable hint, such as Annotated with a list
        pass
    if isinstance(hint, TypeVar):
        return _compile(hint.__bound__ or Any, where, seen)
    if isinstance(hint, typing.NewType):
        return _compile(hint.__supertype__, where, seen)
    if hasattr(hint, "__value__"):  # type X = ... of Python 3.12
        return _compile(hint.__value__, where, seen)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated and _has_constraints(hint):
        return _pydantic(hint)
    if origin is typing.Annotated or origin in (typing.Required, typing.NotRequired):
        return _compile(arguments[0], where, seen)
    if origin is Union or origin is types.UnionType:
        return _union([_compile(a, where, seen) for a in arguments], _name(hint))
    if origin is Literal:
        return _literal(arguments)
    base = origin or hint
    if base in _LISTS:
        return _list(_compile(arguments[0] if arguments else Any, where, seen))
    if base in _SETS:
        return _set(_SETS[base], _compile(arguments[0] if arguments else Any, where, seen))
    if base is tuple:
        return _tuple(arguments, where, seen)
    if base in _DICTS:
        key, item = arguments or (str, Any)
        return _dict(_compile_key(key, where, seen), _compile(item, where, seen))
    if isinstance(base, type):
        return _class(base, where, seen)
    raise TypeError(f"{where}: arguments of type {_name(hint)} cannot be read from JSON")


def _class(cls: type[Any], where: str, seen: dict[Any, Decoder]) -> Decoder:
    if cls in seen:
        return seen[cls]
    decoder: Decoder

    # Types may refer to themselves: what stands in `seen` looks the decoder up when it is called.
    def later(value: Json, path: str) -> Any:
        return decoder(value, path)

    seen[cls] = later
    if issubclass(cls, Enum):
        decoder = _enum(cls)
    elif dataclasses.is_dataclass(cls):
        decoder = _fields(
            cls,
            {
                f.name: (hint, _has_no_default(f))
                for f, hint in _hinted(cls, dataclasses.fields(cls))
                if f.init
            },
            where,
            seen,
        )
    elif typing.is_typeddict(cls):
        decoder = _fields(dict, _typed_dict_hints(cls), where, seen)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints = typing.get_type_hints(cls)
        defaults = cls._field_defaults  # type: ignore[attr-defined]
        decoder = _fields(
            cls,
            {name: (hints.get(name, Any), name not in defaults) for name in cls._fields},
            where,
            seen,
        )
    elif hasattr(cls, "model_validate"):
        decoder = _pydantic(cls)
    else:
        raise TypeError(f"{where}: arguments of type {_name(cls)} cannot be read from JSON")
    return decoder


def _typed_dict_hints(cls: Any) -> dict[str, tuple[Any, bool]]:
    # Python leaves NotRequired undetected where annotations are strings.
    hints = typing.get_type_hints(cls, include_extras=True)
    marks = {typing.Required: True, typing.NotRequired: False}
    return {
        name: (hint, marks.get(typing.get_origin(hint), name in cls.__required_keys__))
        for name, hint in hints.items()
    }


def _hinted(
    cls: type[Any], fields: Iterable[dataclasses.Field[Any]]
) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(f, hints[f.name]) for f in fields]


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _fields(
    build: Callable[..., Any],
    hints: Mapping[str, tuple[Any, bool]],
    where: str,
    seen: dict[Any, Decoder],
) -> Decoder:
    decoders = {
        name: (_compile(hint, f"{where}.{name}", seen), required)
        for name, (hint, required) in hints.items()
    }

    def decode(value: Json, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value)
        fields = decode_fields(value, decoders, path)
        try:
            return build(**fields)
        except ValueError as error:  # from __post_init__
            raise Mismatch(f"{path}: {error}") from error

    return decode


def decode_fields(
    value: Mapping[str, Json], decoders: Mapping[str, tuple[Decoder, bool]], path: str
) -> dict[str, Any]:
    """The decoded fields of an object; unknown and missing ones are a mismatch."""
    prefix = path + "." if path else ""
    unknown = value.keys() - decoders.keys()
    if unknown:
        raise Mismatch(f"{prefix}{min(unknown)}: unexpected field")
    result = {}
    for name, (decoder, required) in decoders.items():
        item = value.get(name, _MISSING)
        if item is not _MISSING:
            result[name] = decoder(item, prefix + name)
        elif required:
            raise Mismatch(f"{prefix}{name}: missing field")
    return result


def _union(decoders: list[Decoder], name: str) -> Decoder:
    # An exact match first: a union of int and float must not turn 1.5 away or 1 into 1.0.
    def decode(value: Json, path: str) -> Any:
        reasons = []
        candidate = _MISSING
        for decoder in decoders:
            try:
                result = decoder(value, path)
            except Mismatch as mismatch:
                reasons.append(str(mismatch))
                continue
            if type(result) is type(value):
                return result
            if candidate is _MISSING:
                candidate = result
        if candidate is not _MISSING:
            return candidate
        if len([d for d in decoders if d is not _none]) == 1 and value is not None:
            raise Mismatch(next(r for r in reasons if "expected null" not in r))
        raise _wrong(path, name, value)

    return decode


def _literal(values: tuple[Any, ...]) -> Decoder:
    allowed = {(type(v.value), v.value) if isinstance(v, Enum) else (type(v), v): v for v in values}
    expected = "one of " + ", ".join(repr(key[1]) for key in allowed)

    def decode(value: Json, path: str) -> Any:
        try:
            return allowed[type(value), value]
        except (KeyError, TypeError):
            raise _wrong(path, expected, value) from None

    return decode


def _enum(cls: type[Enum]) -> Decoder:
    expected = "one of " + ", ".join(repr(member.value) for member in cls)

    def decode(value: Json, path: str) -> Any:
        try:
            return cls(value)
        except (ValueError, TypeError):
            raise _wrong(path, expected, value) from None

    return decode


def _list(item: Decoder) -> Decoder:
    def decode(value: Json, path: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, "an array", value)
        return [item(v, f"{path}[{i}]") for i, v in enumerate(value)]

    return decode


def _set(build: Callable[[Iterable[Any]], Any], item: Decoder) -> Decoder:
    items = _list(item)

    def decode(value: Json, path: str) -> Any:
        try:
            return build(items(value, path))
        except TypeError:
            raise _wrong(path, "an array of distinct plain values", value) from None

    return decode


def _tuple(arguments: tuple[Any, ...], where: str, seen: dict[Any, Decoder]) -> Decoder:
    if not arguments or (len(arguments) == 2 and arguments[1] is Ellipsis):
        items = _list(_compile(arguments[0] if arguments else Any, where, seen))
        return lambda value, path: tuple(items(value, path))
    decoders = [] if arguments == ((),) else [_compile(a, where, seen) for a in arguments]

    def decode(value: Json, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(decoders):
            raise _wrong(path, f"an array of {len(decoders)}", value)
        pairs = zip(decoders, value, strict=True)
        return tuple(d(v, f"{path}[{i}]") for i, (d, v) in enumerate(pairs))

    return decode


def _compile_key(hint: Any, where: str, seen: dict[Any, Decoder]) -> Decoder:
    # JSON keys are strings; integers are the one other key that people write.
    if hint is int:
        return _parsed(int, "an integer key")
    return _compile(hint, where, seen)


def _dict(key: Decoder, item: Decoder) -> Decoder:
    def decode(value: Json, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value)
        return {key(k, f"{path}.{k}"): item(v, f"{path}.{k}") for k, v in value.items()}

    return decode


def _has_constraints(hint: Any) -> bool:
    return any(
        type(mark).__module__.partition(".")[0] in ("annotated_types", "pydantic")
        for mark in hint.__metadata__
    )


def _pydantic(hint: Any) -> Decoder:
    from pydantic import TypeAdapter  # installed, since somebody wrote a hint with it

    adapter = TypeAdapter(hint)

    def decode(value: Json, path: str) -> Any:
        try:
            # As JSON: a strict model takes a time from a string only there.
            return adapter.validate_json(json.dumps(value))
        except ValueError as error:
            raise Mismatch(f"{path}: {error}") from error

    return decode


def _name(hint: Any) -> str:
    return getattr(hint, "__qualname__", None) or str(hint).replace("typing.", "")
