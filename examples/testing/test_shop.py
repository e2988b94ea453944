"""Tests of the shop, with the fixtures of awa's pytest plugin."""

from __future__ import annotations

from datetime import timedelta

import pytest
import shop

import awa
from awa.testing import Database


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    monkeypatch.setattr(shop, "deliver", sent.append)
    return sent


def test_an_order_enqueues_its_receipt(awa_database: Database) -> None:
    with awa_database.connect(autocommit=False) as conn:
        shop.place_order(conn, 7)
        awa_database.assert_not_enqueued("send_receipt")  # not before the commit
    awa_database.assert_enqueued("send_receipt", queue="mail", args={"order_id": 7}, count=1)


def test_the_receipt_is_sent_at_once_and_the_reminder_a_week_later(
    awa_database: Database, outbox: list[str]
) -> None:
    with awa_database.connect() as conn:
        shop.place_order(conn, 7)
    awa_database.drain(shop.handlers)
    assert outbox == ["receipt of order 7, attempt 1"]
    awa_database.advance(timedelta(days=7))
    [run] = awa_database.drain(shop.handlers)
    assert (run.kind, outbox[-1]) == ("remind", "reminder of order 7")


def test_a_receipt_is_tried_again_after_a_minute(
    awa_database: Database,
    awa_client: awa.Client,
    outbox: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(text: str) -> None:
        raise ConnectionError("no mail server")

    job_id = shop.send_receipt.insert(awa_client, order_id=7).job_id
    with monkeypatch.context() as patch:
        patch.setattr(shop, "deliver", unreachable)
        with pytest.raises(ConnectionError, match="no mail server"):
            awa_database.drain(shop.handlers)
    assert awa_database.drain(shop.handlers) == []  # it is not due yet
    awa_database.advance(60)
    awa_database.drain(shop.handlers)
    assert outbox == ["receipt of order 7, attempt 2"]
    assert awa_client.job(job_id).state == "completed"
