"""The jobs that the benchmarks enqueue: an object with padding, 120 bytes as JSON text."""

from __future__ import annotations

import json

KIND = "noop"
QUEUE = "default"
ARGS_BYTES = 120


def args_text(number: int, **more: int) -> str:
    """JSON text of one job's arguments."""
    value: dict[str, int | str] = {"i": number, **more, "pad": ""}
    value["pad"] = "x" * (ARGS_BYTES - len(json.dumps(value)))
    return json.dumps(value)
