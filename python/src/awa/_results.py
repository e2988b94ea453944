"""What becomes of an attempt, as the items that finish_jobs takes."""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

from ._codec import clean_text
from ._session import logger
from .handlers import Task
from .models import Json
from .outcomes import Outcome, as_seconds

ERROR_LIMIT = 4_000
REASON_LIMIT = 1_000
TRACEBACK_LINES = 10


def error_text(error: BaseException) -> str:
    """Type and message of an exception as the database can store it, whatever its own code does."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the exception's own code
        text = f"(its message cannot be had: {type(broken).__name__})"
    return clean_text(f"{type(error).__name__}: {text}", ERROR_LIMIT)


def failure(reason: str, code: str) -> dict[str, Json]:
    """The outcome of a job that no further attempt would help."""
    text = clean_text(reason, ERROR_LIMIT)
    return {"outcome": "fail", "reason": code, "error": {"error": text}}


def not_completed() -> dict[str, Json]:
    """The outcome of a handler that was to complete its job itself and did not."""
    reason = "the handler returned and its job.complete() was not committed"
    return {"outcome": "retry", "error": {"error": reason}}


def unfinished(value: Any) -> TypeError | None:
    """The mistake of a handler whose return value shows that its work was not done."""
    if isinstance(value, Coroutine | Generator):
        value.close()
    elif isinstance(value, type) and issubclass(value, Outcome):
        return TypeError(f"the handler returned the class {value.__name__} itself: call it")
    elif not isinstance(value, AsyncGenerator):
        return None
    return TypeError(
        f"the handler returned a {type(value).__name__} and did nothing: make it an async def that "
        "awaits it"
    )


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
        "error": error_text(error),
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
