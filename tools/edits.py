"""The install script with known changes: how the engine is broken on purpose."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import awa

BUILT = Path(__file__).resolve().parent.parent / "build" / f"awa--{awa.__version__}.sql"
DEFINITION = r"CREATE OR REPLACE FUNCTION @extschema@\.{name}\(.*?^COMMENT ON FUNCTION "


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement in one function, whose text must hold `old` exactly once.

    The script may define a function twice, before and after the tables; both are edited.
    """

    function: str
    old: str
    new: str


class ScriptError(Exception):
    """The script does not have the text that an edit replaces."""


def install_script() -> Path:
    """The script that tests install as plain SQL: as built, unless the environment names another.

    Tests that create the extension find theirs by the server's extension_control_path.
    """
    return Path(os.environ.get("AWA_TEST_SCRIPT", BUILT))


def apply(text: str, edit: Edit) -> str:
    """Replace text inside one function."""
    pattern = DEFINITION.format(name=re.escape(edit.function))
    parts = re.split(f"({pattern})", text, flags=re.M | re.S)
    found = [part.count(edit.old) for part in parts[1::2]]
    if not found or set(found) != {1}:
        raise ScriptError(f"function {edit.function}: {edit.old!r} found {found} times")
    parts[1::2] = [part.replace(edit.old, edit.new) for part in parts[1::2]]
    return "".join(parts)


def apply_all(text: str, edits: Iterable[Edit]) -> str:
    """Replace text inside some functions, one edit after the other."""
    for edit in edits:
        text = apply(text, edit)
    return text
