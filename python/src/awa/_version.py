"""Versions: of this package, and of the oldest schema it works with."""

from __future__ import annotations

__version__ = "0.1.0"
SCHEMA_VERSION = 1
