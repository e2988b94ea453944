"""Versions: of this package, and of the oldest schema it works with."""

from __future__ import annotations

from .errors import VersionMismatch

__version__ = "0.2.0"
SCHEMA_VERSION = 2


def check_schema(schema: str, number: int) -> None:
    """Refuse a schema that is older than this package needs."""
    if number < SCHEMA_VERSION:
        raise VersionMismatch(
            f'schema "{schema}" has number {number}, this client needs {SCHEMA_VERSION}',
            hint="Upgrade it: awa upgrade, or ALTER EXTENSION awa UPDATE.",
        )
