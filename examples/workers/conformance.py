"""Handlers of the kinds that `awa conformance` enqueues, for worker.py."""

from __future__ import annotations

import time
from typing import Any

Outcome = dict[str, Any] | None


def conformance_succeed(args: Any) -> Outcome:
    return None


def conformance_echo(args: Any) -> Outcome:
    return {"outcome": "completed", "result": args}


def conformance_raise(args: Any) -> Outcome:
    raise RuntimeError("no luck")


def conformance_retry(args: Any) -> Outcome:
    return {"outcome": "retry", "delay_seconds": 0, "error": "not yet"}


def conformance_snooze(args: Any) -> Outcome:
    return {"outcome": "snooze", "delay_seconds": 600}


def conformance_cancel(args: Any) -> Outcome:
    return {"outcome": "cancel", "reason": "not needed"}


def conformance_fail(args: Any) -> Outcome:
    return {"outcome": "fail", "reason": "hopeless"}


def conformance_sleep(args: Any) -> Outcome:
    time.sleep(args["seconds"])
    return None
