"""Jobs that complete in the handler's own transaction, whose connection dies around COMMIT."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest

import awa
from conftest import Database
from connections import LIBRARIES
from engine import claim_all, insert, open_transaction, value, wait_until_blocked
from proxy import CUTS, UNANSWERED, Proxy, proxy

ENDS = {"completed", "failed", "cancelled"}
# "none" goes around the proxy; "cancelled" is told by the database that it is too late.
# So many that their number has no factor in common with that of the libraries.
HOW = (*CUTS, *CUTS, "none", "none", "cancelled")


async def effect(job: awa.Job, library: str, dsn: str) -> None:
    """One business row and the completion, committed together."""
    async with LIBRARIES[library](dsn) as app, app.transaction():
        await app.execute(f"INSERT INTO effects VALUES ({job.id}, {job.attempt})")
        completing = job.complete(app.conn)
        receipt = await completing if asyncio.iscoroutine(completing) else completing
        assert receipt.outcome == "completed"


def handlers_for(database: Database, through: Proxy) -> awa.Handlers:
    handlers = awa.Handlers()

    def dsn(job: awa.Job, how: str) -> str:
        # The second attempt is cut in another way, the third one is not.
        attempts = {how: 1} if how not in CUTS else {how: 1, CUTS[CUTS.index(how) - 1]: 2}
        return next(
            (through.dsn(h) for h, n in attempts.items() if n == job.attempt and h in CUTS),
            database.dsn,
        )

    def cancel(job: awa.Job) -> None:
        with database.connect() as other:
            assert awa.Client(other).cancel_job(job.id) == "cancelled_running"

    @handlers.task(completes_itself=True, retry=[0])
    async def asynchronous(job: awa.Job, library: str, how: str) -> None:
        if how == "cancelled":
            await asyncio.to_thread(cancel, job)
        await effect(job, library, dsn(job, how))

    @handlers.task(completes_itself=True, retry=[0])
    def blocking(job: awa.Job, library: str, how: str) -> None:
        if how == "cancelled":
            cancel(job)
        asyncio.run(effect(job, library, dsn(job, how)))

    return handlers


def wanted() -> Iterator[dict[str, object]]:
    """Jobs without end: every library meets every kind of cut."""
    pairs = zip(itertools.cycle(HOW), itertools.cycle(LIBRARIES), strict=False)
    for number, (how, library) in enumerate(pairs):
        yield {
            "kind": "asynchronous" if "async" in library else "blocking",
            "args": {"library": library, "how": how},
            "max_attempts": 1 + number % 3,
        }


@pytest.mark.parametrize("cuts", [60, pytest.param(500, marks=pytest.mark.long)])
def test_the_effect_exists_exactly_as_often_as_the_job_completed(
    database: Database, conn: psycopg.Connection, caplog: pytest.LogCaptureFixture, cuts: int
) -> None:
    """Red when the worker takes a lost answer to COMMIT for a success."""
    caplog.set_level(logging.CRITICAL, "awa")
    conn.execute("CREATE TABLE effects (job_id bigint, attempt integer)")
    client = awa.Client(conn)
    ids: list[int] = []
    jobs = wanted()

    async def enough(worker: awa.Worker, through: Proxy) -> None:
        while through.cuts.total() < cuts:
            ids.extend(
                r.job_id for r in client.insert_jobs(list(itertools.islice(jobs, cuts // 2)))
            )
            while client.queue_counts("default").available + worker.running > 10:
                await asyncio.sleep(0.01)
        while not all(client.job(job_id).state in ENDS for job_id in ids):
            await asyncio.sleep(0.05)

    async def scenario() -> Counter[str]:
        with proxy(database.dsn) as through:
            handlers = handlers_for(database, through)
            async with (
                asyncio.timeout(30 + cuts),
                awa.Worker(database.dsn, handlers, queues={"default": 6}) as worker,
            ):
                await enough(worker, through)
            assert through.cuts.total() >= cuts
            assert set(through.cuts) == set(CUTS)
            assert sum(through.cuts[cut] for cut in UNANSWERED) >= cuts // 10
            return worker.finisher.reconciled

    answers = asyncio.run(scenario())
    assert {a for a in answers if answers[a]} == {
        "committed",
        "rolled_back",
        "in_doubt",
        "taken_away",
    }
    states = Counter(client.job(job_id).state for job_id in ids)
    assert set(states) == ENDS
    effects: dict[int, int] = dict(
        conn.execute("SELECT job_id, count(*) FROM effects GROUP BY 1").fetchall()
    )
    for job_id in ids:
        assert effects.get(job_id, 0) == (client.job(job_id).state == "completed")
    assert value(conn, "SELECT count(*) FROM effects") == states["completed"]


RESCUE = "SELECT awa._rescue_attempts(500, clock_timestamp() + interval %s)"


def rescue(conn: psycopg.Connection) -> int:
    """Rescue as it would be when the worker has been silent for days."""
    conn.execute("SELECT setval('awa.rescue_clock', 0, false)")
    rescued = [value(conn, RESCUE.replace("%s", f"'{days} days'")) for days in (1, 2)]
    return sum(map(int, rescued))


def test_of_a_completion_and_a_rescue_exactly_one_wins(
    database: Database, conn: psycopg.Connection
) -> None:
    """Red when the completion, or the rescue, goes without the lock of the batch."""
    client = awa.Client(conn)
    with open_transaction(database) as mine:
        insert(conn)
        [first] = claim_all(conn)
        awa.Client(mine).complete_job(*first.token)
        assert rescue(conn) == 0
        mine.commit()
    assert rescue(conn) == 0
    assert client.attempt_status(*first.token) == "completed"

    insert(conn)
    [second] = claim_all(conn)
    caught: list[BaseException] = []
    with database.connect() as other, open_transaction(database) as rescuing:
        assert rescue(rescuing) == 1

        def complete() -> None:
            try:
                awa.Client(other).complete_job(*second.token)
            except awa.StaleAttempt as error:
                caught.append(error)

        thread = threading.Thread(target=complete)
        thread.start()
        wait_until_blocked(conn, other)
        rescuing.commit()
        thread.join()
    assert len(caught) == 1
    assert client.attempt_status(*second.token) == "rescued"
