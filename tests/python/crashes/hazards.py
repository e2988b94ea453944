"""What happens to a storm: each hazard does one thing and says what it did, or nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import psycopg

from crashes import recovery

if TYPE_CHECKING:
    from crashes.storm import Storm

Hazard = Callable[["Storm", random.Random], str]

# Sessions by what they are for: the actors' are called by name, the workers' by role.
SESSIONS = (
    "producer",
    "claimer",
    "ticker",
    "awa claim",
    "awa finish",
    "awa heartbeat",
    "awa maintenance",
    "awa listener",
)
BACKENDS = """
    SELECT pid, application_name, query FROM pg_stat_activity
    WHERE application_name LIKE %s || '%%' AND datname = current_database()
    ORDER BY state = 'active' DESC, random()
    LIMIT 1
"""
TIMEOUTS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
)


def timeouts(version: int) -> tuple[str, ...]:
    """The settings of a server version that end what takes too long."""
    return (*TIMEOUTS, "transaction_timeout") if version >= 17 else TIMEOUTS


def _backend(storm: Storm, role: str) -> tuple[int, str] | None:
    """A backend of a role, in the middle of a statement if there is one."""
    with storm.connect() as conn:
        row = conn.execute(BACKENDS, [role]).fetchone()
    return (row[0], f"{row[1]}, {' '.join(row[2].split())[:40]!r}") if row else None


def kill_backend(role: str, storm: Storm, _: random.Random) -> str:
    """SIGKILL one backend."""
    found = _backend(storm, role)
    if found is None:
        return ""
    recovery.kill_backend(storm.cluster, storm.stage.dsn, found[0])
    return f"kill -9 of the backend of {found[1]}"


def end_backend(how: str, role: str, storm: Storm, _: random.Random) -> str:
    """Terminate or cancel one backend."""
    found = _backend(storm, role)
    if found is None:
        return ""
    with storm.connect() as conn:
        conn.execute(f"SELECT pg_{how}_backend(%s)".encode(), [found[0]])
    return f"{how} {found[1]}"


def kill_postmaster(storm: Storm, _: random.Random) -> str:
    """SIGKILL the postmaster alone; the backends notice by themselves."""
    os.kill(storm.cluster.pid, signal.SIGKILL)
    storm.cluster.restart()
    return "kill -9 of the postmaster"


def kill_server(storm: Storm, _: random.Random) -> str:
    """SIGKILL all processes of the server at once."""
    storm.cluster.kill()
    storm.cluster.restart()
    return "kill -9 of the whole server"


def kill_actor(role: str, storm: Storm, rng: random.Random) -> str:
    """SIGKILL a process of the race."""
    return f"kill -9 of {storm.replace_actor(role, rng)}"


def kill_worker(storm: Storm, rng: random.Random) -> str:
    """SIGKILL a worker process."""
    return f"kill -9 of worker {storm.replace_worker(rng)}"


def stop_worker(storm: Storm, rng: random.Random) -> str:
    """SIGSTOP a worker process until after its attempts were rescued; it goes on then."""
    storm.suspend_worker(rng)
    return "SIGSTOP of a worker"


def set_timeout(storm: Storm, rng: random.Random) -> str:
    """Let new sessions, and one that is there, meet a short timeout."""
    with storm.connect() as conn:
        name = rng.choice(timeouts(conn.info.server_version // 10000))
        value = rng.choice((1, 3, 10, 30, 100))
        conn.execute(f"ALTER DATABASE {storm.database} SET {name} = {value}".encode())
        role = rng.choice(SESSIONS)
        row = conn.execute(BACKENDS, [role]).fetchone()
        if row:
            conn.execute("SELECT pg_terminate_backend(%s)", [row[0]])
    storm.pause(rng.uniform(0.1, 0.4))
    with storm.connect() as conn:
        conn.execute(f"ALTER DATABASE {storm.database} RESET {name}".encode())
    return f"{name} = {value} ms"


def set_clock(offset: int, storm: Storm, _: random.Random) -> str:
    """Step the server's clock to so many seconds from the right time, and look that all goes on."""
    storm.step_clock(offset)
    return f"clock at {offset:+} s"


def fill_disk(storm: Storm, rng: random.Random) -> str:
    """Let the disk be full for a while."""
    return storm.fill_disk(rng.uniform(0.3, 1.0))


def fill_wal(storm: Storm, rng: random.Random) -> str:
    """Write WAL until there is no room for more, and leave it so for a while."""
    with suppress(psycopg.OperationalError), storm.connect() as conn:
        while True:
            storm.disk.fill()
            conn.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
    return storm.fill_disk(rng.uniform(0.3, 1.0))


KILLS: tuple[Hazard, ...] = (
    kill_postmaster,
    kill_server,
    *(partial(kill_backend, role) for role in SESSIONS),
    *(partial(kill_actor, role) for role in ("producer", "claimer", "ticker")),
    kill_worker,
    kill_worker,
    stop_worker,
)
ENDS: tuple[Hazard, ...] = (
    *(partial(end_backend, how, role) for how in ("terminate", "cancel") for role in SESSIONS),
    *((set_timeout,) * 16),
)
# Some of each, for a short storm.
MIXED: tuple[Hazard, ...] = (
    *KILLS,
    *(
        partial(end_backend, how, role)
        for how, role in zip(("terminate", "cancel") * 4, SESSIONS, strict=True)
    ),
    *((set_timeout,) * 4),
)
FULL_DISK: tuple[Hazard, ...] = (fill_disk,) * 2
FULL_WAL: tuple[Hazard, ...] = (fill_wal,) * 2
DAY = 86400
CLOCKS: tuple[Hazard, ...] = tuple(
    partial(set_clock, offset)
    # Two minutes back, a day back, two hours forward, a day forward.
    for offset in (-120, -120 - DAY, 7080 - DAY, 7080)
)
