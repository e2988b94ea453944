"""The plain Python example worker with one fault, by its name: `faulty_worker.py FAULT`.

Each fault is one that the conformance run must report, under the rule that FAULTS names.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/workers"))
Outcome = dict[str, Any] | None

# What goes wrong, and what becomes of the rule: failed, or cannot where a worker may leave it out.
FAULTS = {
    "one heartbeat": ("W1", "failed"),
    "ends at once": ("W1", "failed"),
    "runs twice": ("W2", "failed"),
    "forgets results": ("W2", "failed"),
    "args as text": ("W3", "failed"),
    "drops the result": ("W3", "failed"),
    "errors are successes": ("W4", "failed"),
    "errors without text": ("W4", "failed"),
    "retry fails": ("W5", "failed"),
    "snooze retries": ("W6", "failed"),
    "cancel without reason": ("W7", "failed"),
    "fail retries": ("W8", "failed"),
    "unknown kinds fail": ("W9", "failed"),
    "unknown kinds retry": ("W9", "failed"),
    "dies when stale": ("W10", "failed"),
    "no heartbeat while it runs": ("W11", "failed"),
    "same instance again": ("W12", "failed"),
    "ignores SIGTERM": ("W13", "failed"),
    "drops jobs on SIGTERM": ("W13", "failed"),
    "ends with an error": ("W13", "failed"),
    "ends when paused": ("W14", "failed"),
    "dies of a lost connection": ("W15", "failed"),
    "no tick": ("W16", "cannot"),
    "no progress": ("W17", "failed"),
    "knows no kind of W17": ("W17", "cannot"),
    "no row": ("W18", "failed"),
    "two transactions": ("W18", "failed"),
}


def handlers_with(fault: str) -> Any:
    """The example's handlers, some of them wrong."""
    handlers: Any = importlib.import_module("conformance")

    always: dict[str, tuple[str, Outcome]] = {
        "drops the result": ("echo", None),
        "errors are successes": ("raise", None),
        "errors without text": ("raise", {"outcome": "retry"}),
        "retry fails": ("retry", {"outcome": "fail", "error": "not yet"}),
        "snooze retries": ("snooze", {"outcome": "retry", "delay_seconds": 600}),
        "cancel without reason": ("cancel", {"outcome": "cancel"}),
        "fail retries": ("fail", {"outcome": "retry", "reason": "hopeless"}),
        "unknown kinds fail": ("unknown", {"outcome": "fail"}),
        "unknown kinds retry": ("unknown", {"outcome": "retry", "error": "unknown"}),
        "no progress": ("progress", {"outcome": "completed", "result": None}),
        "no row": ("transaction", None),
    }
    if fault in always:
        kind, outcome = always[fault]
        setattr(handlers, f"conformance_{kind}", lambda _: outcome)
    if fault == "args as text":
        handlers.conformance_echo = lambda args: {"outcome": "completed", "result": str(args)}
    return handlers


def break_calls(worker: Any, fault: str) -> None:
    """Faults of the loop itself: the example's calls, some of them left out or changed."""
    call = worker.Session.call
    tries: dict[int, int] = {}
    began = time.monotonic()

    def broken(session: Any, query: str, *params: Any) -> list[dict[str, Any]]:
        if fault == "one heartbeat" and "heartbeat" in query and time.monotonic() - began > 0.3:
            return []
        if fault == "no heartbeat while it runs" and "heartbeat" in query and busy.is_set():
            return []
        if fault == "no tick" and "tick" in query:
            return []
        if fault == "forgets results" and "finish" in query:
            return [{"result": "done"}]
        if fault == "dies of a lost connection" and session.conn is not None:
            return list(session.conn.execute(query.encode(), params).fetchall())
        rows: list[dict[str, Any]] = call(session, query, *params)
        if fault == "dies when stale" and any(row.get("result") == "stale" for row in rows):
            os._exit(1)
        if fault == "ends when paused" and any(row.get("reason") == "paused" for row in rows):
            os._exit(0)
        return rows

    busy = threading.Event()
    outcome_of = worker.outcome_of

    def outcome(handlers: object, job: dict[str, Any]) -> dict[str, Any]:
        busy.set()
        try:
            if fault == "runs twice":
                tries[job["job_id"]] = tries.get(job["job_id"], 0) + 1
                if tries[job["job_id"]] == 1:
                    return {"outcome": "retry", "delay_seconds": 0}
            if fault == "two transactions" and job["kind"] == "conformance_transaction":
                insert = "INSERT INTO awa_conformance (job_id) VALUES (%s) RETURNING 1"
                worker.Session().call(insert, job["job_id"])
                time.sleep(job["args"]["seconds"])
            result: dict[str, Any] = outcome_of(handlers, job)
            return result
        finally:
            busy.clear()

    worker.Session.call = broken
    worker.outcome_of = outcome


def main() -> None:
    fault = sys.argv.pop()
    assert fault in FAULTS
    if fault == "ends at once":
        return
    worker: Any = importlib.import_module("worker")

    handlers = handlers_with(fault)
    if fault == "two transactions":
        handlers.conformance_transaction = lambda _: None
    if fault == "same instance again":
        worker.ME = uuid.UUID(int=7)
    break_calls(worker, fault)
    on_term: dict[str, Callable[..., Any] | signal.Handlers] = {
        "ignores SIGTERM": signal.SIG_IGN,
        "drops jobs on SIGTERM": lambda *_: os._exit(0),
        "ends with an error": lambda *_: os._exit(1),
    }
    if fault in on_term:
        signal.signal(signal.SIGTERM, on_term[fault])
        worker.signal = types.SimpleNamespace(
            signal=lambda *_: None, SIGTERM=signal.SIGTERM, SIGINT=signal.SIGINT
        )
    sys.argv.append("conformance")
    worker.main()


if __name__ == "__main__":
    main()
