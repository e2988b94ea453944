"""Plays of the interleaver in which statements are ended at their pause points, by force.

A statement that is suspended inside a function is cancelled, or its backend is terminated, or
killed: then the server restarts, everybody's transaction is gone, and all connect again. What had
committed is in the play's ledger, and must hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import psycopg

from crashes.recovery import kill_backend
from crashes.scenes import Stage
from interleaver.actors import Actor
from interleaver.ledger import Broken
from interleaver.script import PAUSE_LOCK
from interleaver.world import KEY_SEED, PERIOD, World
from tools.servers import Cluster

How = Literal["kill", "terminate", "cancel"]
HOWS: tuple[How, ...] = get_args(How)
SQLSTATES = {"terminate": "57P01", "cancel": "57014"}
CHANCE = 0.01  # that a step ends a suspended statement
SOURCES = Path(__file__).parents[3] / "sql"


def pause_points() -> set[str]:
    """All there are: those of the sources, and the one that the test build adds."""
    texts = (path.read_text() for path in SOURCES.rglob("*.sql"))
    return {"row"}.union(*(re.findall(r"^ *-- pause point: (\w+)$", t, re.M) for t in texts))


def interrupt(cluster: Cluster, world: World, victim: Actor, how: How) -> None:
    """End a suspended statement by force."""
    assert victim.thread
    world.log(f"{victim.name}: {how} at {victim.point}")
    if how == "kill":
        crash(cluster, world, victim.pid)
        return
    call = f"SELECT pg_{how}_backend(%s)"
    world.query(call, victim.pid)
    victim.thread.join()
    world.query("SELECT pg_advisory_unlock(%s, %s)", PAUSE_LOCK, victim.pid)
    expect(victim, SQLSTATES[how])
    if how == "terminate":
        victim.db.close()
        victim.connect()
    else:
        victim.db.rollback()
        victim.reset()


def expect(victim: Actor, sqlstate: str | None) -> None:
    """The statement must have ended in the way that was meant."""
    victim.thread = None
    answer = victim.outcome[0]
    if not isinstance(answer, psycopg.Error) or (sqlstate and answer.sqlstate != sqlstate):
        raise Broken(f"{victim.name}: answered {answer!r}, not {sqlstate}")


def crash(cluster: Cluster, world: World, pid: int) -> None:
    """Kill a backend; then everybody connects again."""
    kill_backend(cluster, world.dsn, pid)
    world.monitor.close()
    world.connect()
    for actor in world.actors:
        if actor.thread:
            actor.thread.join()
            expect(actor, None)
        actor.db.close()
        actor.connect()


def play_scenes(cluster: Cluster, dsn: str, course: Iterable[tuple[str, How]]) -> None:
    """Play scenes, end their statements by force, and see at the end that all is as it was."""
    with World(dsn, KEY_SEED) as world:
        stage = Stage(world)
        for name, how in course:
            world.log(f"scene: {name}, {how}")
            interrupt(cluster, world, stage.play(name), how)
        stage.tidy()
        world.drain()


def play_at_random(cluster: Cluster, dsn: str, seed: int, steps: int) -> Counter[str]:
    """Play, and end suspended statements by force now and then; return how often and how."""
    done = Counter[str]()
    with World(dsn, seed) as world:
        world.cast()
        for step in range(steps):
            if step % PERIOD == 0:
                world.new_period()
            world.step()
            suspended = [actor for actor in world.actors if actor.thread]
            if suspended and world.random.random() < CHANCE:
                victim = world.random.choice(suspended)
                how = world.random.choice(HOWS)
                done[how] += 1
                interrupt(cluster, world, victim, how)
        world.drain()
    return done
