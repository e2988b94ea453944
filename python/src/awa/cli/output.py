"""Print rows as JSON, or as aligned text for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import click

from .database import Row


def as_json(value: object, *, compact: bool = False) -> str:
    """One JSON document; times in ISO 8601, durations in seconds."""
    return json.dumps(
        value, default=_json_default, indent=None if compact else 2, ensure_ascii=False
    )


def _json_default(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def as_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Aligned columns under their names; numbers to the right."""
    cells = [[as_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    right = [
        bool(rows) and all(isinstance(row.get(column), int | None) for row in rows)
        for column in columns
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), *map(line, cells)])


def as_record(row: Row) -> str:
    """One line per column that has a value."""
    present = {name: as_text(value) for name, value in row.items() if value is not None}
    width = max(map(len, present))
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in present.items())


def as_text(value: object) -> str:
    """One line for a terminal: what could steer the terminal is escaped."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
    if isinstance(value, dict | list):
        value = as_json(value, compact=True)
    return one_line(str(value))


def one_line(text: str) -> str:
    """The text with what is not printable escaped, line breaks as well."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextmanager
def live_view() -> Iterator[Callable[[str], Any]]:
    """Show texts, each in the place of the last; below it without a terminal or without rich."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        yield click.echo
        return
    console = Console()
    if not console.is_terminal:
        yield click.echo
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)
