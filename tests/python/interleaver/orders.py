"""Two or three calls in every order of their pause points.

Each call is a transaction on a connection of its own. It stops where it meets a pause point for the
first time, up to four times, and once more before its commit. An order says who goes on next; all
orders of a pair are found by going back to the last place where somebody else could have gone on.
Everything starts from the same scene, and the ledger must explain what is left. One database and
its sessions serve all orders: between two of them everything is put back.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from rewind import go_back, remember
from tools.edits import Edit

from .actors import (
    READ_COMMITTED,
    Actor,
    Canceller,
    Changer,
    Claimer,
    Finisher,
    Maintainer,
    Producer,
    Rows,
)
from .ledger import Broken, Job, Ledger, Token
from .schedules import claim_one, finish_one_job, insert_with_key, move_one_job, start_insert
from .script import PAUSE_LOCK, QUEUE_SLOTS, STOPS
from .world import World, new_database

SOON = '{"deadline_seconds": 0.001}'  # in a play every deadline has passed
GIVE_UP_SECONDS = 30
KEPT_FILES = 200  # orders whose truncated files stay until the next checkpoint


@dataclass(frozen=True, slots=True)
class Scene:
    """What the ledger knows before an order begins, and what the calls are about."""

    ledger: Ledger
    waiting: int
    failed: int
    running: Token
    leased: Token

    @property
    def owner(self) -> str:
        return self.ledger.owners[self.running]

    def job(self, job_id: int) -> Job:
        return self.ledger.jobs[job_id]


class Stepper:
    """Lets the first statement of an actor go from stop to stop."""

    def __init__(self, world: World, actor: Actor, call: Callable[[], None]) -> None:
        self.world, self.actor, self.call = world, actor, call
        self.keys = [actor.pid * STOPS + stop for stop in range(STOPS)]
        self.has_begun = self.has_ended = self.is_blocked = False
        actor.db.execute("SET lock_timeout = 0")
        actor.db.commit()
        actor.run = self.run  # type: ignore[method-assign]

    def run(
        self,
        sql: str,
        parameters: Iterable[object] = (),
        then: Callable[[Rows], None] = lambda rows: None,
        pause: tuple[str, int] | None = None,
    ) -> None:
        """Stand in for the actor's own way to run a statement."""
        actor = self.actor
        if self.has_begun:  # what it asks afterwards
            Actor.run(actor, sql, parameters, then)
            return
        self.has_begun = True
        values = tuple(parameters)
        actor.world.log(f"{actor.name}: {sql} {values}")
        actor.outcome, actor.then = [], then

        def work() -> None:
            try:
                actor.fetch(
                    "SELECT set_config('awa_test.pause_at', '*', true),"
                    " set_config('awa_test.passed', '{}', true)",
                    (),
                )
                actor.outcome.append(actor.fetch(sql, values))
            except psycopg.Error as error:
                actor.outcome.append(error)

        for key in self.keys:
            self.world.query("SELECT pg_advisory_lock(%s, %s)", PAUSE_LOCK, key)
        actor.thread = threading.Thread(target=work)
        actor.thread.start()

    def move(self) -> None:
        """Go on to the next stop, to the end of the call, or commit."""
        actor = self.actor
        if not self.has_begun:
            actor.begin(READ_COMMITTED)
            self.call()
            self.wait()
        elif actor.thread:
            self.world.log(f"{actor.name}: goes on")
            self.world.query("SELECT pg_advisory_unlock(%s, %s)", PAUSE_LOCK, self.keys.pop(0))
            self.wait()
        else:
            actor.end(True)
            self.has_ended = True

    def wait(self) -> None:
        """Until the call stops, is blocked, or has ended."""
        actor = self.actor
        assert actor.thread is not None
        give_up = time.monotonic() + GIVE_UP_SECONDS
        while actor.thread.is_alive():
            if waits := self.waits_for():
                self.is_blocked = waits == "lock"
                self.world.log(f"{actor.name}: waits for {waits}")
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"{actor.name} neither stops nor ends")
            actor.thread.join(0.0003)
        self.is_blocked = False
        for key in self.keys:
            self.world.query("SELECT pg_advisory_unlock(%s, %s)", PAUSE_LOCK, key)
        self.keys = []
        actor.resume()
        self.has_ended = not actor.is_open

    def waits_for(self) -> str | None:
        sql = "SELECT classid FROM pg_locks WHERE pid = %s AND NOT granted"
        rows = self.world.query(sql, self.actor.pid)
        if not rows:
            return None
        return "the word" if rows == [(PAUSE_LOCK,)] else "lock"


def finish(finisher: Finisher, token: Token, outcome: str, wish: str) -> None:
    item: dict[str, object] = {**token._asdict(), "outcome": outcome}
    item |= {"delay_seconds": 0} if outcome == "retry" else {}
    finisher.run(
        "SELECT result FROM awa.finish_jobs(%s, %s)",
        (finisher.owner(token), json.dumps([item])),
        lambda rows: finisher.answered([(token, wish)], rows),
    )


def insert_later(producer: Producer) -> None:
    job = Job(0, producer.world.new_mark(), "one", 2, 25, is_late=True)

    def got(rows: Rows) -> None:
        [(job.job_id,)] = rows
        producer.pending.append(job)

    sql = "SELECT job_id FROM awa.insert_job('k', %s, 'one', opts => %s)"
    producer.run(sql, (json.dumps({"mark": job.mark}), '{"delay_seconds": 0.001}'), got)


def insert_unique(producer: Producer) -> None:
    producer.insert_unique(Job(0, producer.world.new_mark(), "one", 2, 25, key=1), ("key", 0))


def tick_of(step: str) -> Callable[[Any, Scene], None]:
    return lambda maintainer, scene: maintainer.tick([step])


Call = tuple[type[Actor], Callable[[Any, Scene], None]]
CALLS: dict[str, Call] = {
    "insert": (Producer, lambda a, scene: start_insert(a)),
    "insert later": (Producer, lambda a, scene: insert_later(a)),
    "insert unique": (Producer, lambda a, scene: insert_unique(a)),
    "claim": (Claimer, lambda a, scene: a.claim("one", 3, pause=("leaf", 0))),
    "complete": (Finisher, lambda a, scene: a.complete([scene.running], scene.owner, None)),
    "finish with retry": (Finisher, lambda a, scene: finish(a, scene.running, "retry", "retried")),
    "finish of a lease": (Finisher, lambda a, scene: finish(a, scene.leased, "fail", "failed")),
    "cancel of a waiting job": (Canceller, lambda a, scene: a.cancel(scene.waiting)),
    "cancel of a running job": (Canceller, lambda a, scene: a.cancel(scene.running.job_id)),
    "cancel of a lease": (Canceller, lambda a, scene: a.cancel(scene.leased.job_id)),
    "retry of a failed job": (
        Changer,
        lambda a, scene: a.retry(scene.job(scene.failed), ("key", 0)),
    ),
    **{step: (Maintainer, tick_of(step)) for step in (*Maintainer.steps, "unique_keys")},
}


def end(world: World, token: Token, outcome: str, wish: str) -> None:
    items = json.dumps([{**token._asdict(), "outcome": outcome}])
    owner = world.ledger.owners[token]
    world.query("SELECT result FROM awa.finish_jobs(%s, %s)", owner, items)
    world.ledger.end(token, wish)


class Theatre(World):
    """Where orders are played, one after the other, each from the same scene."""

    def __init__(self, dsn: str) -> None:
        self.idle: list[psycopg.Connection] = []
        super().__init__(dsn, seed=0)
        self.scene = play_scene(self)
        self.leave()
        remember(self.monitor)
        self.orders = 0

    def new_connection(self) -> psycopg.Connection:
        return self.idle.pop() if self.idle else super().new_connection()

    def leave(self) -> None:
        """Let the actors of an order go; where it broke, end what they are about."""
        for actor in self.actors:
            if actor.thread:
                self.query("SELECT pg_terminate_backend(%s, 10000)", actor.pid)
                actor.thread.join()
                actor.db.close()
            else:
                actor.db.rollback()
                self.idle.append(actor.db)
        self.query("SELECT pg_advisory_unlock_all()")
        self.actors.clear()
        self.moves.clear()

    def begin(self) -> Scene:
        """Put everything back; return the scene with a ledger of its own."""
        self.leave()
        go_back(self.monitor)
        self.query("SELECT setseed(0)")
        self.orders += 1
        if self.orders % KEPT_FILES == 0:
            self.monitor.execute("CHECKPOINT")
        self.ledger = copy.deepcopy(self.scene.ledger)
        self.marks = itertools.count(1000)
        return replace(self.scene, ledger=self.ledger)

    def __exit__(self, *words: object) -> None:
        self.leave()
        super().__exit__(*words)
        for connection in self.idle:
            connection.close()


@contextmanager
def new_theatre(server_dsn: str, edits: Sequence[Edit] = ()) -> Iterator[Theatre]:
    """A database in which every call has something to do."""
    with (
        new_database(server_dsn, f"orders_{uuid.uuid4().hex[:12]}", edits) as dsn,
        Theatre(dsn) as theatre,
    ):
        yield theatre


def play_scene(world: World) -> Scene:
    claimer = Claimer(world, "owner")
    world.actors.append(claimer)
    finish_one_job(world)
    failed = world.insert_one()
    claim_one(claimer, "one")
    [token] = world.ledger.open
    end(world, token, "fail", "failed")
    leased = move_one_job(world, SOON)
    world.insert_one("late")  # in a slot so old that it is evacuated
    for _ in range(QUEUE_SLOTS):
        world.tick("plan_queue")
        world.tick("publish_queue")
        world.insert_one("two")
        claim_one(claimer, "two")
        for token in [token for token in world.ledger.open if token.job_id != leased]:
            end(world, token, "completed", "completed")
    world.insert_one("two")
    claim_one(claimer, "two", SOON)
    producer = Producer(world, "producer")
    world.actors.append(producer)
    insert_with_key(world, producer)
    world.insert_one(later=True)
    waiting = world.insert_one()
    for ring in ("queue", "claim"):
        world.tick(f"prune_{ring}")  # a slot is released, so that the next time it is emptied
    tokens = {token.job_id == leased: token for token in world.ledger.open}
    return Scene(world.ledger, waiting, failed, tokens[False], tokens[True])


# ---- orders


class Order:
    """Who may go on at each place of a play, and who did."""

    def __init__(self, wanted: Sequence[int], chooser: random.Random | None = None) -> None:
        self.wanted, self.chooser = wanted, chooser
        self.choices: list[tuple[int, list[int]]] = []

    def choose(self, able: list[int]) -> int:
        place = len(self.choices)
        if self.chooser is not None:
            choice = self.chooser.choice(able)
        elif place < len(self.wanted) and self.wanted[place] in able:
            choice = self.wanted[place]
        else:
            choice = able[0]
        self.choices.append((choice, able))
        return choice

    def next(self) -> list[int] | None:
        """The first places of the next order: at the last possible place somebody else goes on."""
        for place in range(len(self.choices) - 1, -1, -1):
            choice, able = self.choices[place]
            if later := [number for number in able if number > choice]:
                return [c for c, _ in self.choices[:place]] + [later[0]]
        return None


def play_order(theatre: Theatre, names: Sequence[str], order: Order) -> str | None:
    """Make the calls in one order; return what broke."""
    scene = theatre.begin()
    steppers = [new_stepper(theatre, scene, name, n) for n, name in enumerate(names)]
    try:
        while left := [n for n, stepper in enumerate(steppers) if not stepper.has_ended]:
            for number in left:
                if steppers[number].is_blocked:
                    steppers[number].wait()
            able = [number for number in left if not steppers[number].is_blocked]
            if able:
                steppers[order.choose(able)].move()
        check_the_end(theatre)
    except Broken as error:
        return "\n    ".join([str(error), *theatre.moves])
    return None


def new_stepper(world: World, scene: Scene, name: str, number: int) -> Stepper:
    kind, call = CALLS[name]
    actor = kind(world, f"{number + 1} {name}")
    world.actors.append(actor)
    return Stepper(world, actor, lambda: call(actor, scene))


def check_the_end(world: World) -> None:
    """What the ledger knows is so, and what it does not know is not."""
    world.check_counts()
    for job_id in world.ledger.jobs:
        world.audit_job(job_id)
    for token in (*world.ledger.open, *world.ledger.closed):
        world.audit_attempt(token)
    world.claim_all()
    lost = [job for job in world.ledger.jobs.values() if job.state == "waiting"]
    if lost:
        raise Broken(f"{len(lost)} committed jobs are lost: {lost[:5]}")
    world.finish_all()
    world.check_counts()


@dataclass(frozen=True, slots=True)
class Played:
    """How many orders were played, and the first that broke."""

    orders: int
    broken: str | None


def play_all(theatre: Theatre, names: Sequence[str]) -> Played:
    """Play every order of some calls, until one breaks."""
    count = 0
    wanted: list[int] | None = []
    while wanted is not None:
        order = Order(wanted)
        count += 1
        if broken := play_order(theatre, names, order):
            return Played(count, broken)
        wanted = order.next()
    return Played(count, None)


def play_some(theatre: Theatre, names: Sequence[str], seed: int, count: int) -> Played:
    """Play orders that a seed chooses, until one breaks."""
    chooser = random.Random(seed)
    for number in range(1, count + 1):
        if broken := play_order(theatre, names, Order((), chooser)):
            return Played(number, broken)
    return Played(count, None)
