"""What each test database starts with."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest


@pytest.fixture(scope="session")
def awa_prepare() -> Callable[[str], None]:
    def migrate(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")

    return migrate
