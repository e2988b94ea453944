"""A scene for each place with a pause point: what must be there for a statement to stop at it."""

from __future__ import annotations

import json
from collections.abc import Callable

from interleaver.actors import (
    READ_COMMITTED,
    Actor,
    Canceller,
    Changer,
    Claimer,
    Finisher,
    Maintainer,
    Producer,
)
from interleaver.ledger import Job
from interleaver.schedules import claim_one, finish_one_job, start_insert, turn
from interleaver.script import CLAIM_SLOTS, QUEUE_SLOTS
from interleaver.world import World

DEADLINE = '{"deadline_seconds": 0.001}'


class Stage:
    """A cast that plays one scene after the other in one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.producer = Producer(world, "producer")
        self.claimer = Claimer(world, "claimer")
        self.finisher = Finisher(world, "finisher")
        self.canceller = Canceller(world, "canceller")
        self.changer = Changer(world, "changer")
        self.maintainer = Maintainer(world, "maintainer")
        for actor in (self.producer, self.claimer, self.finisher):
            world.actors.append(actor)
        for other in (self.canceller, self.changer, self.maintainer):
            world.actors.append(other)
        self.keys = 0

    def play(self, name: str) -> Actor:
        """Play a scene up to its pause point; return who is suspended there."""
        point, scene = SCENES[name]
        self.tidy()
        scene(self)
        for actor in self.world.actors:
            if actor.thread:
                assert actor.point == point
                return actor
        raise AssertionError(f"in the scene {name!r} nobody stops")

    def tidy(self) -> None:
        """End what is open, and leave slots that are empty."""
        for actor in self.world.actors:
            if actor.is_open:
                actor.end(True)
        self.world.claim_all()
        self.world.finish_all()
        for _ in range(QUEUE_SLOTS):
            if not {"pruned", "released"} & {
                self.world.tick("prune_claim"),
                self.world.tick("prune_queue"),
            }:
                return

    # ---- what scenes have in common

    def insert(self, shape: str) -> None:
        """One of the calls by which jobs come in, stopped before it takes a position."""
        job = json.dumps([{"kind": "k", "queue": queue} for queue in ("one", "two")])
        calls = {
            "many": "SELECT * FROM awa.insert_many('k', ARRAY['{}'::jsonb], 'one')",
            "mixed": f"SELECT job_id FROM awa.insert_jobs('{job}')",
        }
        self.producer.begin(READ_COMMITTED)
        self.producer.run(calls[shape], pause=("insert", 0))

    def insert_with_key(self, key: int, pause: tuple[str, int] | None = None) -> None:
        self.producer.begin(READ_COMMITTED)
        self.producer.insert_unique(Job(0, self.world.new_mark(), "one", 2, 25, key=key), pause)
        if pause is None:
            self.producer.end(True)

    def new_key(self) -> int:
        self.keys += 1
        return 1000 + self.keys

    def claim(self, point: str) -> None:
        self.world.insert_one()
        self.claimer.begin(READ_COMMITTED)
        self.claimer.claim("one", 1, pause=(point, 0))

    def tick(self, step: str, point: str) -> bool:
        """A step of maintenance; whether it stops."""
        self.maintainer.begin(READ_COMMITTED)
        self.maintainer.tick([step], (point, 0))
        if self.maintainer.thread is None:
            self.maintainer.end(True)
        return self.maintainer.thread is not None

    def start_one(self, options: str = "{}") -> int:
        job = self.world.insert_one()
        claim_one(self.claimer, "one", options)
        return job

    def cancel(self, job: int, point: str) -> None:
        self.canceller.begin(READ_COMMITTED)
        self.canceller.cancel(job, (point, 0))

    def cancelled_one(self) -> Job:
        """A job that was cancelled before it ran, and its slot left."""
        job = self.world.insert_one()
        self.canceller.begin(READ_COMMITTED)
        self.canceller.cancel(job)
        self.canceller.end(True)
        return self.world.ledger.jobs[job]

    def retry(self, point: str) -> None:
        job = self.cancelled_one()
        self.changer.begin(READ_COMMITTED)
        self.changer.retry(job, (point, 0))

    # ---- scenes

    def take_a_key(self) -> None:
        key = self.new_key()
        self.insert_with_key(key)
        self.world.claim_all()
        self.world.finish_all()
        self.insert_with_key(key, ("key", 0))

    def complete(self) -> None:
        self.start_one()
        [token] = self.world.ledger.open
        self.finisher.begin(READ_COMMITTED)
        self.finisher.complete([token], self.finisher.owner(token), ("finish", 0))

    def finish(self) -> None:
        self.start_one()
        [token] = self.world.ledger.open
        self.finisher.begin(READ_COMMITTED)
        self.world.wanted = {"finish"}
        item = json.dumps([{**token._asdict(), "outcome": "retry", "delay_seconds": 0}])
        self.finisher.run(
            "SELECT result FROM awa.finish_jobs(%s, %s)",
            (self.finisher.owner(token), item),
            lambda rows: self.finisher.answered([(token, "retried")], rows),
            ("finish", 0),
        )

    def cancel_deferred(self) -> None:
        self.cancel(self.world.insert_one(later=True), "take")

    def update(self) -> None:
        job = self.world.ledger.jobs[self.world.insert_one()]
        self.changer.begin(READ_COMMITTED)
        self.world.wanted = {"update"}
        while self.changer.thread is None:  # it may stop at a second time, which never comes
            self.changer.update(job)
        self.world.wanted = ()

    def publish(self) -> None:
        finish_one_job(self.world)
        self.world.tick("plan_queue")
        self.tick("publish_queue", "publish")

    def prune(self, ring: str, point: str) -> None:
        finish_one_job(self.world)
        turn(self.world, ring)
        for _ in range(2 * QUEUE_SLOTS):  # older slots first, and each in two steps
            if self.tick(f"prune_{ring}", point):
                return

    def prune_deferred(self, point: str) -> None:
        self.world.insert_one(later=True)
        self.world.claim_all()
        self.tick("prune_deferred", point)

    def promote(self) -> None:
        self.world.insert_one(later=True)
        self.world.tick("refill")
        self.tick("promote", "insert")

    def evacuate(self) -> None:
        self.world.insert_one()
        for _ in range(3 * QUEUE_SLOTS):
            self.world.tick("plan_queue")
            self.world.tick("publish_queue")
            self.world.insert_one("two")
            claim_one(self.claimer, "two")
            self.world.finish_all()
            if self.tick("evacuate", "evacuate"):
                return

    def fill_claim_ring(self, point: str) -> None:
        """While one attempt stays open the claim ring turns, until evacuation moves it."""
        for _ in range(2 * CLAIM_SLOTS):
            self.world.tick("plan_claim")
            self.world.tick("publish_claim")
            self.world.insert_one("two")
            self.world.claim_all()
            if self.tick("evacuate", point):
                return

    def lease(self) -> None:
        self.start_one()
        self.fill_claim_ring("lease")

    def move_one(self, options: str = "{}") -> int:
        job = self.start_one(options)
        self.fill_claim_ring("never")
        return job

    def cancel_lease(self) -> None:
        self.cancel(self.move_one(), "cancel_lease")

    def rescue(self) -> None:
        self.start_one(DEADLINE)
        self.tick("rescue", "rescue")

    def rescue_lease(self) -> None:
        self.move_one(DEADLINE)
        self.tick("rescue", "rescue_lease")


Scene = Callable[[Stage], None]
SCENES: dict[str, tuple[str, Scene]] = {
    "insert_job": ("insert", lambda s: start_insert(s.producer)),
    "insert_job has its position": ("row", lambda s: start_insert(s.producer, ("row", 0))),
    "insert_many": ("insert", lambda s: s.insert("many")),
    "insert_jobs": ("insert", lambda s: s.insert("mixed")),
    "insert_job with a key": ("insert", lambda s: s.insert_with_key(s.new_key(), ("insert", 0))),
    "insert_job takes a key over": ("key", Stage.take_a_key),
    "claim looks for its cursor": ("newest", lambda s: s.claim("newest")),
    "claim looks for rows": ("probe", lambda s: s.claim("probe")),
    "claim looks into a leaf": ("leaf", lambda s: s.claim("leaf")),
    "claim writes its cursor": ("write", lambda s: s.claim("write")),
    "claim writes its receipt": ("receipt", lambda s: s.claim("receipt")),
    "complete_jobs": ("finish", Stage.complete),
    "finish_jobs": ("finish", Stage.finish),
    "cancel of a waiting job": ("cancel", lambda s: s.cancel(s.world.insert_one(), "cancel")),
    "cancel of a running job": ("newest", lambda s: s.cancel(s.start_one(), "newest")),
    "cancel of a deferred job": ("take", Stage.cancel_deferred),
    "cancel of a lease": ("cancel_lease", Stage.cancel_lease),
    "retry_job": ("retry", lambda s: s.retry("retry")),
    "retry_job looks for the end": ("undo", lambda s: s.retry("undo")),
    "retry_job undoes the end": ("undo_seen", lambda s: s.retry("undo_seen")),
    "update_job": ("update", Stage.update),
    "publish": ("publish", Stage.publish),
    "promote": ("insert", Stage.promote),
    "rescue": ("rescue", Stage.rescue),
    "rescue of a lease": ("rescue_lease", Stage.rescue_lease),
    "evacuation of waiting jobs": ("evacuate", Stage.evacuate),
    "evacuation of attempts": ("lease", Stage.lease),
    "prune of a queue slot": ("prune", lambda s: s.prune("queue", "prune")),
    "prune of a claim slot": ("prune", lambda s: s.prune("claim", "prune")),
    "prune of a bucket": ("prune", lambda s: s.prune_deferred("prune")),
    "prune has locked a queue slot": ("recheck", lambda s: s.prune("queue", "recheck")),
    "prune has locked a claim slot": ("recheck", lambda s: s.prune("claim", "recheck")),
    "prune has locked a bucket": ("recheck", lambda s: s.prune_deferred("recheck")),
}
