"""Paced producers keep a backlog near their target, and enqueue all the same."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest

import awa
from conftest import Database
from engine import claim, complete, counts, insert_many, value

TARGET = 40


def depth(conn: psycopg.Connection) -> int:
    return int(value(conn, "SELECT coalesce(sum(depth), 0) FROM awa.queue_depths()"))


def test_a_paced_producer_stops_at_its_target(database: Database, conn: psycopg.Connection) -> None:
    with awa.Client(database.dsn) as client:
        producer = awa.PacedProducer(client, target=TARGET, timeout=0.1)
        with pytest.raises(awa.Backpressure):
            producer.insert_many("k", [{"n": n} for n in range(200)])
        with pytest.raises(awa.Backpressure):
            producer.insert_job("k")
        assert TARGET <= depth(conn) < TARGET + TARGET // 8 + 1
        complete(conn, claim(conn, limit=20))
        assert producer.insert_job("k", opts={"tags": ["t"]}).state == "available"


def test_a_paced_producer_goes_on_as_the_workers_do(
    database: Database, conn: psycopg.Connection
) -> None:
    jobs = 400
    deepest = 0
    ids: list[int] = []
    with awa.Client(database.dsn) as client:
        producer = awa.PacedProducer(client, target=TARGET)
        thread = threading.Thread(
            target=lambda: ids.extend(producer.insert_many("k", [{"n": n} for n in range(jobs)]))
        )
        thread.start()
        done = 0
        while done < jobs:
            deepest = max(deepest, depth(conn))
            done += len(complete(conn, claim(conn, limit=7)))
        thread.join()
    assert len(ids) == jobs
    assert counts(conn) == {"completed": jobs}
    assert 0 < deepest < 2 * TARGET


def test_a_naive_producer_does_not_stop(conn: psycopg.Connection) -> None:
    insert_many(conn, 5 * TARGET)
    assert depth(conn) == 5 * TARGET


def test_several_producers_stay_below_twice_the_target(
    database: Database, conn: psycopg.Connection
) -> None:
    def produce() -> None:
        with awa.Client(database.dsn) as client:
            producer = awa.PacedProducer(client, target=TARGET, timeout=0.1)
            with pytest.raises(awa.Backpressure):
                producer.insert_many("k", [{"n": n} for n in range(5 * TARGET)])

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert TARGET <= depth(conn) < 2 * TARGET


def test_the_async_producer_does_the_same(database: Database, conn: psycopg.Connection) -> None:
    async def produce() -> None:
        async with awa.AsyncClient(database.dsn) as client:
            producer = awa.AsyncPacedProducer(client, target=TARGET, queue="a", timeout=0.1)
            with pytest.raises(awa.Backpressure):
                await producer.insert_many("k", [{"n": n} for n in range(200)])
            with pytest.raises(awa.Backpressure):
                await producer.insert_job("k")

    asyncio.run(produce())
    assert TARGET <= depth(conn) < TARGET + TARGET // 8 + 1


def test_a_paced_producer_refuses_what_it_cannot_do(
    database: Database, conn: psycopg.Connection
) -> None:
    with pytest.raises(TypeError, match="would end the caller's transaction"):
        awa.PacedProducer(awa.Client(conn), target=TARGET)
    with awa.Client(database.dsn) as client, pytest.raises(ValueError, match="at least 1"):
        awa.PacedProducer(client, target=0)


def test_a_signal_reaches_the_client(database: Database) -> None:
    with awa.Client(database.dsn) as client:
        assert client.insert_job("k", opts={"backpressure": "signal"}).pressure == "0"
        with pytest.raises(awa.Backpressure) as error:
            client.insert_job("k", opts={"backpressure": {"reject": 1}})
        assert error.value.hint
