"""A small application: orders, and what happens after them."""

from __future__ import annotations

import psycopg

import awa

handlers = awa.Handlers()


@handlers.task(queue="mail", max_attempts=3, retry=[60, 600])
def send_receipt(job: awa.Job, order_id: int) -> None:
    deliver(f"receipt of order {order_id}, attempt {job.attempt}")


@handlers.task()
async def remind(order_id: int) -> None:
    deliver(f"reminder of order {order_id}")


def place_order(conn: psycopg.Connection, order_id: int) -> None:
    """Enqueue in the caller's transaction."""
    conn.execute("INSERT INTO orders (id) VALUES (%s)", [order_id])
    send_receipt.insert(conn, order_id)
    remind.options(delay=7 * 86400).insert(conn, order_id)


def deliver(text: str) -> None:
    """Stands for the mail server."""
    print(text)
