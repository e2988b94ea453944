"""The checker of histories: good ones pass, and each violation is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from history import checker
from history.checker import Checker
from history.records import Writer, read

REPO = Path(__file__).parents[2]
LANE = 1 << 42
Line = dict[str, Any]


def line(what: str, at: float, answer: Line, /, commit: str = "known", **args: object) -> Line:
    """A call that took from `at` to `at + 0.5`."""
    end = at + 0.5 if commit == "known" else None
    fields = {"who": "a", "what": what, "args": args, "answer": answer, "commit": commit}
    return fields | {"start": at, "end": end}


def insert(at: float, job: int = 1, commit: str = "known", **args: object) -> Line:
    return line("insert", at, {"job": job}, commit, **({"queue": "q"} | args))


def claim(at: float, lease: int = 1, job: int = 1, commit: str = "known", **more: object) -> Line:
    return line("claim", at, {"job": job, "lease": lease, **more}, commit)


def finish(
    at: float, outcome: str = "completed", lease: int = 1, job: int = 1, result: str = "done"
) -> Line:
    return line("finish", at, {"result": result}, job=job, lease=lease, outcome=outcome)


def cancel(at: float, job: int = 1, answer: str = "cancelled") -> Line:
    return line("cancel", at, {"answer": answer}, job=job)


def retry(at: float, job: int = 1) -> Line:
    return line("retry", at, {"state": "available"}, job=job)


def duplicate(at: float, job: int = 1) -> Line:
    return line("insert", at, {"job": job, "duplicate": True}, key="k")


FIFO = line("promise", 0, {}, queue="q", fifo_within=1)
DRAINED = line("drained", 99, {})
FIRST, SECOND = LANE + 1, LANE + 2

TWO = (insert(1, FIRST), insert(2, SECOND))
TURNED = (claim(3, job=SECOND), claim(4, job=FIRST))
STATE = line("state", 98, {"state": "failed"}, job=1)

GOOD = {
    "one job": [insert(1), claim(2), finish(3), DRAINED],
    "retries": [insert(1), claim(2), finish(3, "retry"), claim(4, 2), finish(5, lease=2), DRAINED],
    "rescue, and a late finish": [
        *(insert(1), claim(2), claim(10, 2)),
        *(finish(12, result="stale"), finish(13, lease=2), DRAINED),
    ],
    "a second life": [insert(1), claim(2), finish(3, "fail"), retry(4), claim(5, 2), cancel(6)],
    "a retry that overlaps a claim": [insert(1), cancel(2), retry(4), claim(4.2)],
    "nobody knows whether it was inserted": [insert(1, commit="unknown"), DRAINED],
    "nobody knows who claimed it": [insert(1), claim(2, commit="unknown"), STATE, DRAINED],
    "nobody told of its end": [insert(1), claim(2), STATE, DRAINED],
    "a finish that began before another claim ended": [
        *(insert(1), claim(2), claim(5, 2)),
        *(finish(5.2, "retry"), finish(6, lease=2)),
    ],
    "in order": [FIFO, *TWO, claim(3, job=FIRST), claim(4, job=SECOND)],
    "in one claim": [FIFO, *TWO, claim(3, job=SECOND), claim(3, job=FIRST)],
    "inserted side by side": [FIFO, insert(1, FIRST), insert(1.2, SECOND), *TURNED],
    "no order was promised": [*TWO, *TURNED],
    "one that was held back by a cancel": [
        *(FIFO, *TWO, *TURNED, cancel(2.5, FIRST, "tried")),
    ],
    "a key after its holder": [
        *(insert(1, key="k"), duplicate(2), claim(3), finish(4, "cancel")),
        *(insert(5, 2, key="k"), claim(6, job=2), finish(7, job=2), DRAINED),
    ],
    "a completed job keeps its key": [insert(1, key="k"), claim(2), finish(3), duplicate(5)],
}
BAD = {
    checker.NEVER_RAN: [insert(1), DRAINED],
    checker.NEVER_ENDED: [insert(1), claim(2), finish(3, "snooze"), DRAINED],
    checker.UNKNOWN_JOB: [claim(2)],
    checker.ID_TWICE: [insert(1), insert(2), claim(3), finish(4)],
    checker.LEASE_TWICE: [insert(1), claim(2), claim(3), finish(4)],
    checker.LEASE_BACK: [insert(1), claim(2, 2), claim(3, 1), finish(4)],
    checker.TWO_OWNERS: [insert(1), claim(2), claim(3, 2), finish(4, "retry")],
    checker.RESURRECTED: [insert(1), claim(2), finish(3), claim(4, 2)],
    checker.ENDED_TWICE: [insert(1), claim(2), finish(3), cancel(4)],
    checker.NOT_ITS_OWNER: [insert(1), finish(3)],
    checker.OUT_OF_ORDER: [FIFO, *TWO, *TURNED],
    checker.TWO_HOLDERS: [
        *(insert(1, key="k"), insert(2, 2, key="k"), claim(3), finish(4)),
        *(claim(3, job=2), finish(4, job=2), DRAINED),
    ],
    checker.FALSE_HOLDER: [insert(1, key="k"), cancel(2), duplicate(3)],
}
MORE_BAD = [
    (checker.RESURRECTED, [insert(1), cancel(2), claim(3)]),
    (checker.RESURRECTED, [insert(1), retry(1.7), cancel(3), claim(4)]),
    (checker.RESURRECTED, [insert(1), claim(2, is_last=True), finish(3, "retry"), claim(4, 2)]),
    (checker.FALSE_HOLDER, [duplicate(1), insert(2, key="k")]),
    (checker.FALSE_HOLDER, [duplicate(1, 7)]),
]


def check(path: Path, lines: list[Line], parts: int | None = None) -> list[str]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [violation.name for violation in Checker([path], parts).violations]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_passes(tmp_path: Path, name: str) -> None:
    assert check(tmp_path / "h", GOOD[name]) == []


@pytest.mark.parametrize(("name", "lines"), [*BAD.items(), *MORE_BAD])
@pytest.mark.parametrize("parts", [1, 3])
def test_each_violation_is_named(tmp_path: Path, name: str, lines: list[Line], parts: int) -> None:
    assert check(tmp_path / "h", lines, parts) == [name]


def test_there_is_a_bad_history_for_each_violation() -> None:
    assert set(checker.VIOLATIONS) == set(BAD)


def test_what_was_written_before_a_commit_counts_as_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "h"
    writer = Writer(path, "a")
    for end in ("commit", "rollback", None):
        writer.intend([("claim", {}, {"job": 1, "lease": 1})], writer.begin())
        if end:
            writer.settle(end)
    os.write(writer.file, b'{"who": "a", "wh')  # killed while it wrote
    events = list(read(path))
    assert [event.commit for event in events] == ["known", "undone", "unknown"]
    assert events[0].start <= events[0].end <= events[1].start
    assert events[2].end == float("inf")


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    for name, lines, code in (("good", GOOD["one job"], 0), ("bad", BAD[checker.RESURRECTED], 1)):
        check(tmp_path / name, lines)
        command = [sys.executable, "-m", "tests.python.history", str(tmp_path / name)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert (checker.RESURRECTED in done.stdout) == (code == 1)
