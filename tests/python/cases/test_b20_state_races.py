"""Case b20: complete, cancel, rescue, snooze and the others on one attempt: one wins.

Shown elsewhere: every way to end an attempt after every other, one after the other
(test_g2_a_stale_token_changes_nothing_and_is_told in test_guarantees.py); a forged token
(test_g2_a_forged_token_changes_nothing); a rescue that has chosen what ends meanwhile
(test_g2_rescue_leaves_alone_what_ended_between_its_choice_and_its_write); cancel of ready,
deferred, running, ended and unknown jobs (cancel_job.sql); workers whose attempt was cancelled or
taken away (test_a_running_handler_learns_of_its_cancellation and
test_a_rescued_attempt_learns_that_its_lease_is_lost in test_worker.py); a completion in the
handler's own transaction (test_of_a_completion_and_a_rescue_exactly_one_wins in
test_completion.py). Callbacks do not exist in this version.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import pytest

from conftest import Database
from engine import (
    Attempt,
    claim,
    complete,
    counts,
    finish,
    insert,
    insert_many,
    open_transaction,
    set_settings,
    tick,
    value,
)

STATUS = "SELECT awa.attempt_status(%s, %s, %s, %s, %s)"
CLOSURES = """
    SELECT c.batch_id, p, count(*) FROM awa.lease_claim_closures c, unnest(awa._to_list(c.closed)) p
    GROUP BY 1, 2 HAVING count(*) > 1
"""


@dataclass(frozen=True)
class Way:
    """A way to end an attempt: what it answers, how the attempt ended, the job's state then."""

    end: Callable[[psycopg.Connection, Attempt], str]
    ended: str
    state: str

    # What a cancel says of a job in this state; a job that waits again is cancelled all the same.
    @property
    def told_to_cancel(self) -> str:
        return {
            "completed": "already_completed",
            "failed": "already_failed",
            "cancelled": "already_cancelled",
        }.get(self.state, "cancelled")


def by_finish(outcome: str) -> Callable[[psycopg.Connection, Attempt], str]:
    return lambda conn, a: finish(conn, [a.item(outcome, delay_seconds=60)])[0]


def by_complete_job(conn: psycopg.Connection, attempt: Attempt) -> str:
    try:
        conn.execute("SELECT awa.complete_job(%s, %s, %s, %s, %s)", attempt.token)
    except psycopg.Error as error:
        if error.sqlstate != "JQ001":
            raise
        return "stale"
    return "done"


def by_cancel_job(conn: psycopg.Connection, attempt: Attempt) -> str:
    return str(value(conn, "SELECT awa.cancel_job(%s)", attempt.job_id))


def by_rescue(conn: psycopg.Connection, attempt: Attempt) -> str:
    """Its deadline has passed."""
    conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
    if tick(conn, "rescue") == {"rescue": "contended"}:
        return "busy"
    return "done" if value(conn, STATUS, *attempt.token) == "rescued" else "stale"


WAYS = {
    "complete_jobs": Way(lambda conn, a: complete(conn, [a])[0], "completed", "completed"),
    "complete_job": Way(by_complete_job, "completed", "completed"),
    "finish completed": Way(by_finish("completed"), "completed", "completed"),
    "retry": Way(by_finish("retry"), "retried", "retryable"),
    "snooze": Way(by_finish("snooze"), "snoozed", "scheduled"),
    "cancel": Way(by_finish("cancel"), "cancelled", "cancelled"),
    "fail": Way(by_finish("fail"), "failed", "failed"),
    "released": Way(by_finish("released"), "released", "available"),
    "cancel_job": Way(by_cancel_job, "cancelled", "cancelled"),
    "rescue": Way(by_rescue, "rescued", "retryable"),
}
WINS = {"done", "cancelled_running"}


def loses(first: str, second: str) -> set[str]:
    """What the second may be told after the first has committed."""
    winner = WAYS[first]
    if second == "cancel_job":
        return {winner.told_to_cancel}
    if second in ("complete_job", "rescue"):
        # Also a rescue finds nothing to do: the attempt is as the first one left it.
        return {"stale"} if first != second or second == "complete_job" else {"done"}
    same = winner.ended == WAYS[second].ended or (first, second) == ("fail", "retry")
    return {"already_done"} if same else {"stale"}


def start(conn: psycopg.Connection, queue: str) -> Attempt:
    insert(conn, queue)
    [attempt] = claim(conn, queue, limit=1, deadline_seconds=0.001)
    return attempt


def meet(
    first: psycopg.Connection,
    second: psycopg.Connection,
    conn: psycopg.Connection,
    pair: tuple[str, str],
    end: str,
) -> tuple[str, str, str, str]:
    """Both end one attempt, the second one before the first has committed or rolled back."""
    attempt = start(conn, "q")
    mine, theirs = (WAYS[name] for name in pair)
    with ThreadPoolExecutor(1) as pool:
        one = mine.end(first, attempt)
        other = pool.submit(theirs.end, second, attempt)
        waits = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
        while not other.done() and not value(conn, waits, second.info.backend_pid):
            pass
        first.commit() if end == "commit" else first.rollback()
        answer = other.result()
    while answer == "busy":
        answer = theirs.end(second, attempt)
    state = str(value(conn, "SELECT (awa.job(%s)).state", attempt.job_id))
    if pair[1] == "rescue" and answer == "stale" and end == "rollback":
        # A rescue does not wait: it was passed over, and the next one has it.
        assert state == "running"
        answer = theirs.end(second, attempt)
        state = str(value(conn, "SELECT (awa.job(%s)).state", attempt.job_id))
    return one, answer, str(value(conn, STATUS, *attempt.token)), state


# Broken by a closure that is written without the lock of its batch (_lock_batch). Long, since now
# and then the rescue finds nothing, and why is not known yet.
@pytest.mark.long
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_b20_of_two_who_end_an_attempt_the_first_to_commit_wins(
    database: Database, conn: psycopg.Connection, end: str
) -> None:
    pairs = [(first, second) for first in WAYS for second in WAYS]
    with open_transaction(database) as first, database.connect() as second:
        for pair in pairs:
            one, other, status, state = meet(first, second, conn, pair, end)
            assert one in WINS, pair
            if end == "rollback":
                assert other in WINS, (pair, other)
                assert (status, state) == (WAYS[pair[1]].ended, WAYS[pair[1]].state), pair
                continue
            assert other in loses(*pair), (pair, other)
            assert status == WAYS[pair[0]].ended, pair
            # Waiting again, it was cancelled after that.
            expected = "cancelled" if other == "cancelled" else WAYS[pair[0]].state
            assert state == expected, pair
    assert conn.execute(CLOSURES).fetchall() == []
    assert sum(counts(conn, "q").values()) == len(pairs)


# Broken likewise, and by counting a job twice when it ended twice.
@pytest.mark.parametrize("many", [150, pytest.param(20_000, marks=pytest.mark.long)])
def test_b20_of_many_who_end_attempts_at_once_each_has_one_winner(
    database: Database, conn: psycopg.Connection, many: int
) -> None:
    set_settings(conn, errors_max_count=5)
    attempts: list[Attempt] = []
    for _ in range(many // 10):
        insert_many(conn, 10)
        attempts += claim(conn, limit=10, deadline_seconds=0.001)
    answers: Counter[str] = Counter()
    lock = threading.Lock()

    def end_all(seed: int) -> None:
        chance = random.Random(seed)
        mine: Counter[str] = Counter()
        with database.connect() as own:
            for attempt in chance.sample(attempts, many):
                name = chance.choice([name for name in WAYS if name != "rescue"])
                if chance.random() < 0.05:
                    tick(own, "rescue")
                answer = WAYS[name].end(own, attempt)
                mine[answer if answer not in WINS else "won"] += 1
        with lock:
            answers.update(mine)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(end_all, range(5)))
    complete(conn, attempts)
    assert set(answers) <= {
        *("won", "stale", "busy", "already_done", "cancelled"),
        *("already_completed", "already_failed", "already_cancelled"),
    }
    assert conn.execute(CLOSURES).fetchall() == []
    closed = "SELECT sum(awa._cardinality(closed)) FROM awa.lease_claim_closures"
    assert value(conn, closed) == many
    assert sum(counts(conn).values()) == many
    assert "running" not in counts(conn)
