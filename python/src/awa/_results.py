"""What becomes of an attempt, as the items that finish_jobs takes."""

from __future__ import annotations

import traceback
from typing import Any

from ._codec import clean_text
from ._session import logger
from .handlers import Task
from .models import Json
from .outcomes import Outcome, as_seconds

ERROR_LIMIT = 4_000
REASON_LIMIT = 1_000
TRACEBACK_LINES = 10


def failure(reason: str, code: str) -> dict[str, Json]:
    """The outcome of a job that no further attempt would help."""
    text = clean_text(reason, ERROR_LIMIT)
    return {"outcome": "fail", "reason": code, "error": {"error": text}}


def outcome_item(outcome: Outcome) -> dict[str, Json]:
    """The finish_jobs keys of an outcome, with text that the database can store."""
    item = outcome.item()
    if isinstance(item.get("reason"), str):
        item["reason"] = clean_text(item["reason"], REASON_LIMIT)
    if isinstance(item.get("error"), dict):
        item["error"] = {
            key: clean_text(str(text), ERROR_LIMIT) for key, text in item["error"].items()
        }
    return item


def error_outcome(task: Task[..., Any], attempt: int, error: BaseException) -> dict[str, Json]:
    """What becomes of an attempt that raised: the task's policy, or the database's backoff."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    last_lines = "".join(lines).splitlines()[-TRACEBACK_LINES:]
    described = {
        "error": clean_text(f"{type(error).__name__}: {error}", ERROR_LIMIT),
        "traceback": clean_text("\n".join(last_lines), ERROR_LIMIT),
    }
    if task.never_retry and isinstance(error, task.never_retry):
        return {"outcome": "fail", "reason": "never_retry", "error": described}
    outcome: dict[str, Json] = {"outcome": "retry", "error": described}
    if task.retry is None or not isinstance(error, Exception):
        return outcome
    try:
        decision = task.retry(attempt, error)
        if isinstance(decision, Outcome):
            return {**outcome_item(decision), "error": described}
        if decision is not None:
            outcome["delay_seconds"] = as_seconds(decision, "the retry policy")
    except Exception:  # noqa: BLE001 - the user's function
        logger.exception('the retry policy of "%s" failed', task.kind)
    return outcome
