"""Directed schedules: orders of moves that are too rare for chance."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import psycopg

from .actors import (
    READ_COMMITTED,
    REPEATABLE_READ,
    Canceller,
    Claimer,
    Maintainer,
    Producer,
)
from .ledger import Broken, Job
from .script import CLAIM_SLOTS, QUEUE_SLOTS
from .world import World


def producer_writes_to_a_left_slot(world: World) -> None:
    """A producer reads the ring and stops; its slot is left and passes the gates of prune; then it
    writes there and commits, and prune goes on."""
    producer, maintainer = Producer(world, "producer"), Maintainer(world, "maintainer")
    world.actors += [producer, maintainer]
    finish_one_job(world)
    start_insert(producer)
    turn(world, "queue")
    start_prune(maintainer, "prune_queue")
    producer.resume()
    producer.end(True)
    finish_prune(maintainer, "prune_queue")
    world.drain()


def claim_writes_to_a_left_slot(world: World) -> None:
    """The same for a claim and the slot of its receipts."""
    claimer, maintainer = Claimer(world, "claimer"), Maintainer(world, "maintainer")
    world.actors += [claimer, maintainer]
    finish_one_job(world)
    world.insert_one()
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1, pause=("receipt", 0))
    must(claimer.thread is not None, "the claim waits at its pause point")
    turn(world, "claim")
    start_prune(maintainer, "prune_claim")
    claimer.resume()
    claimer.end(True)
    finish_prune(maintainer, "prune_claim")
    world.drain()


def producer_writes_while_prune_holds_the_slot(world: World) -> None:
    """A producer with an old view of the ring meets the locks of prune: refused, not forgotten."""
    producer, maintainer = Producer(world, "producer"), Maintainer(world, "maintainer")
    world.actors += [producer, maintainer]
    finish_one_job(world)
    start_insert(producer)
    turn(world, "queue")
    release(world, "prune_queue")
    maintainer.begin(READ_COMMITTED)
    maintainer.tick(["prune_queue"], ("recheck", 0))
    must(maintainer.thread is not None, "prune waits at its pause point")
    producer.resume()
    must(world.seen["Producer 55P03"] == 1, "the producer is refused")
    finish_prune(maintainer, "prune_queue")
    must(world.seen["prune_queue pruned"] == 1, "the slot is pruned")
    world.drain()


def prune_moves_the_cursor_that_a_claim_reads(world: World) -> None:
    """A claim has looked for its lane's cursor in the newest leaf; prune checkpoints the cursor and
    empties the older leaf that held it; then the claim looks further."""
    claimer = Claimer(world, "claimer")
    world.actors.append(claimer)
    finish_one_job(world)
    turn(world, "queue")
    finish_one_job(world, "late")  # its emission row puts blocks into the newest leaf
    world.insert_one()
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1, pause=("newest", 0))
    must(claimer.thread is not None, "the claim waits at its pause point")
    release(world, "prune_queue")
    must(world.tick("prune_queue") == "pruned", "the slot with the cursor is pruned")
    claimer.resume()
    claimer.end(True)
    world.drain()


def cancel_commits_between_read_and_lock(world: World) -> None:
    """A claim has read a row; its cancel commits; then the claim gets the position's lock."""
    canceller, claimer = Canceller(world, "canceller"), Claimer(world, "claimer")
    world.actors += [canceller, claimer]
    job = world.insert_one()
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job)
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1, pause=("leaf", 0))
    must(claimer.thread is not None, "the claim waits at its pause point")
    canceller.end(True)
    claimer.resume()
    claimer.end(True)
    world.drain()


def claim_commits_while_cancel_looks(world: World) -> None:
    """A cancel has found its job waiting; the job is claimed; then the cancel gets its locks."""
    canceller = Canceller(world, "canceller")
    world.actors.append(canceller)
    finish_one_job(world)
    job = world.insert_one()
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job, ("newest", 0))
    must(canceller.thread is not None, "the cancel waits at its pause point")
    world.claim_all()
    canceller.resume()
    canceller.end(True)
    must(world.seen["cancel cancelled_running"] == 1, "the running job is cancelled")
    world.drain()


def worker_releases_while_cancel_looks(world: World) -> None:
    """A cancel has found its job waiting; the job is claimed and handed back, to another place; the
    cancel goes on, and a claim comes before it commits."""
    claimer, canceller = Claimer(world, "claimer"), Canceller(world, "canceller")
    world.actors += [claimer, canceller]
    finish_one_job(world)
    job = world.insert_one()
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job, ("newest", 0))
    must(canceller.thread is not None, "the cancel waits at its pause point")
    claim_one(claimer, "one")
    [token] = world.ledger.open
    items = json.dumps([{**token._asdict(), "outcome": "released"}])
    answer = world.query("SELECT result FROM awa.finish_jobs(%s, %s)", claimer.instance, items)
    must(answer == [("done",)], "the job is handed back")
    world.ledger.end(token, "released")
    canceller.resume()
    claim_one(claimer, "one")
    canceller.end(True)
    must(world.seen["cancel cancelled"] == 1, "the job is cancelled")
    world.drain()


def claims_are_rolled_back(world: World) -> None:
    """A transaction empties a lane, sees that it is empty, and rolls back."""
    claimer = Claimer(world, "claimer")
    world.actors.append(claimer)
    world.insert_one()
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1)
    claimer.claim("one", 1)
    claimer.end(False)
    world.drain()


def claim_has_an_older_id_than_a_producer(world: World) -> None:
    """A claim that drew its id before a producer did cannot tell when that producer has ended."""
    producer, claimer = Producer(world, "producer"), Claimer(world, "claimer")
    world.actors += [producer, claimer]
    claimer.begin(READ_COMMITTED)
    claimer.run("SELECT pg_current_xact_id() IS NULL")
    start_insert(producer, None)
    world.insert_one()
    claimer.claim("one", 1)
    claimer.end(True)
    world.claim_all()
    producer.end(True)
    world.drain()


def claim_meets_a_cancel_that_is_rolled_back(world: World) -> None:
    """A claim passes a position that a cancel has locked; the cancel is undone; the ring turns."""
    canceller = Canceller(world, "canceller")
    world.actors.append(canceller)
    canceller.begin(READ_COMMITTED)
    canceller.cancel(world.insert_one())
    world.claim_all()
    canceller.end(False)
    turn(world, "queue")
    for _ in range(2):
        world.tick("prune_queue")
    world.drain()


def producer_stops_between_position_and_row(world: World) -> None:
    """A claim passes a position whose row is written later still."""
    producer = Producer(world, "producer")
    world.actors.append(producer)
    world.insert_one()  # the sequence logs its next values here, which draws an id
    start_insert(producer, ("row", 0))
    world.insert_one()
    world.claim_all()
    producer.resume()
    world.claim_all()
    producer.end(True)
    world.drain()


def newest_id_has_not_ended(world: World) -> None:
    """The owner of a gap has an id above all that have ended: just what xmax says."""
    first, last = Producer(world, "first"), Producer(world, "last")
    world.actors += [first, last]
    for producer in (first, last):
        producer.begin(READ_COMMITTED)
        producer.run("SELECT pg_current_xact_id() IS NULL")
    start_insert(last, None)
    start_insert(first, None)
    first.end(True)
    # Not claim_all(): maintenance writes clocks, in transactions whose ids are newer.
    world.claim_ready()
    last.end(True)
    world.drain()


def producer_commits_while_a_claim_probes(world: World) -> None:
    """A gap's row is committed after its leaf was probed and before the claim draws conclusions."""
    producer, claimer = Producer(world, "producer"), Claimer(world, "claimer")
    world.actors += [producer, claimer]
    start_insert(producer, None)
    world.insert_one()
    world.claim_all()
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1, pause=("leaf", 0))
    must(claimer.thread is not None, "the claim waits at its pause point")
    producer.end(True)
    claimer.resume()
    claimer.end(True)
    world.drain()


def more_late_rows_than_a_claim_may_take(world: World) -> None:
    """Three gaps turn out to have rows, and the next claim asks for one."""
    producer, claimer = Producer(world, "producer"), Claimer(world, "claimer")
    world.actors += [producer, claimer]
    for _ in range(3):
        start_insert(producer, None)
    world.insert_one()
    world.claim_all()
    producer.end(True)
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1)
    claimer.end(True)
    world.drain()


def claim_comes_twice_in_a_transaction(world: World) -> None:
    """The second claim reads a horizon that its own, unended transaction is."""
    producer, claimer = Producer(world, "producer"), Claimer(world, "claimer")
    writer = Producer(world, "writer")
    world.actors += [producer, claimer, writer]
    start_insert(producer, None)
    world.insert_one()
    writer.begin(READ_COMMITTED)
    writer.run("SELECT pg_current_xact_id() IS NULL")
    claimer.begin(READ_COMMITTED)
    claimer.claim("one", 1)
    claimer.claim("one", 1)
    claimer.end(True)
    producer.end(True)
    world.drain()


def cancel_has_an_old_snapshot(world: World) -> None:
    """A job is claimed after the snapshot was taken in which a cancel looks for it."""
    canceller = Canceller(world, "canceller")
    world.actors.append(canceller)
    job = world.insert_one()
    canceller.begin(REPEATABLE_READ)
    canceller.run("SELECT 1")
    world.claim_all()
    canceller.cancel(job)
    canceller.end(True)
    world.drain()


def plan_is_rolled_back(world: World) -> None:
    """A planned rotation is undone; whoever comes next must not meet its slot."""
    maintainer = Maintainer(world, "maintainer")
    world.actors.append(maintainer)
    finish_one_job(world)
    maintainer.begin(READ_COMMITTED)
    maintainer.tick(["plan_queue"])
    maintainer.end(False)
    finish_one_job(world)
    world.drain()


def cancel_comes_while_evacuation_moves(world: World) -> None:
    """Evacuation has read what waits in an old slot and is about to move it; a cancel comes by."""
    claimer, maintainer = Claimer(world, "claimer"), Maintainer(world, "maintainer")
    canceller = Canceller(world, "canceller")
    world.actors += [claimer, maintainer, canceller]
    job = world.insert_one()
    for _ in range(QUEUE_SLOTS):
        world.tick("plan_queue")
        world.tick("publish_queue")
        world.insert_one("two")
        claim_one(claimer, "two")
        world.finish_all()
    maintainer.begin(READ_COMMITTED)
    maintainer.tick(["evacuate"], ("evacuate", 0))
    must(maintainer.thread is not None, "evacuation waits at its pause point")
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job)
    if canceller.is_open:
        canceller.end(True)
    maintainer.resume()
    maintainer.end(True)
    must(world.seen["evacuate moved"] == 1, "evacuation went on")
    world.claim_all()
    world.finish_all()
    world.audit_job(job)
    world.drain()


def finish_commits_while_cancel_of_a_lease_looks(world: World) -> None:
    """A cancel has found the lease of its job; the attempt ends; then the cancel gets its lock."""
    canceller = Canceller(world, "canceller")
    world.actors.append(canceller)
    job = move_one_job(world)
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job, ("cancel_lease", 0))
    must(canceller.thread is not None, "the cancel waits at its pause point")
    world.finish_all()
    canceller.resume()
    canceller.end(True)
    must(world.seen["cancel already_completed"] == 1, "the cancel comes too late")
    world.drain()


def finish_commits_while_rescue_of_a_lease_looks(world: World) -> None:
    """Rescue has found a lease past its deadline; the attempt ends; then rescue gets the lock."""
    maintainer = Maintainer(world, "maintainer")
    world.actors.append(maintainer)
    move_one_job(world, '{"deadline_seconds": 0.001}')
    maintainer.begin(READ_COMMITTED)
    maintainer.tick(["rescue"], ("rescue_lease", 0))
    must(maintainer.thread is not None, "rescue waits at its pause point")
    world.finish_all()
    maintainer.resume()
    maintainer.end(True)
    must(world.seen["rescued"] == 0, "nothing was rescued")
    world.drain()


def job_is_deferred_into_a_bucket_that_is_pruned(world: World) -> None:
    """A bucket is seen without jobs; one comes; then prune goes on."""
    maintainer = Maintainer(world, "maintainer")
    world.actors.append(maintainer)
    first = world.insert_one(later=True)
    world.claim_all()
    world.query("SELECT setval('awa.job_ids', %s)", first + 16)  # the next id has the same bucket
    start_prune(maintainer, "prune_deferred")
    world.insert_one(later=True)
    maintainer.resume()
    maintainer.end(True)
    world.drain()


def job_is_deferred_while_prune_holds_its_bucket(world: World) -> None:
    """A bucket is seen without jobs under the lock of prune; one comes: refused, not forgotten."""
    maintainer = Maintainer(world, "maintainer")
    world.actors.append(maintainer)
    first = world.insert_one(later=True)
    world.claim_all()
    world.query("SELECT setval('awa.job_ids', %s)", first + 16)
    maintainer.begin(READ_COMMITTED)
    maintainer.tick(["prune_deferred"], ("recheck", 0))
    must(maintainer.thread is not None, "prune waits at its pause point")
    with suppress(psycopg.errors.LockNotAvailable):
        world.insert_one(later=True)
    maintainer.resume()
    maintainer.end(True)
    must(world.seen["prune_deferred pruned"] == 1, "the bucket is pruned")
    world.drain()


def key_is_taken_over_while_a_producer_looks(world: World) -> None:
    """A producer has found a key whose job has ended; another producer takes it over; then the
    first one goes on."""
    first, second = Producer(world, "first"), Producer(world, "second")
    world.actors += [first, second]
    insert_with_key(world, second)
    world.claim_all()
    world.finish_all()
    insert_with_key(world, first, ("key", 0))
    must(first.thread is not None, "the producer waits at its pause point")
    insert_with_key(world, second)
    first.resume()
    first.end(True)
    must(world.seen["unique new"] == 2, "the other two producers have the key")
    must(world.seen["unique duplicate"] == 1, "the first one has not")
    world.drain()


def holder_ends_after_a_snapshot(world: World) -> None:
    """A job ends after the snapshot was taken in which a producer looks for who has its key."""
    first, second = Producer(world, "first"), Producer(world, "second")
    world.actors += [first, second]
    insert_with_key(world, second)
    first.begin(REPEATABLE_READ)
    first.run("SELECT 1 FROM awa.queue_meta LIMIT 1")
    [job_id] = world.ledger.holders(1)
    must(world.query("SELECT awa.cancel_job(%s)", job_id) == [("cancelled",)], "the job ends")
    world.ledger.cancel(job_id)
    first.insert_unique(Job(0, world.new_mark(), "one", 2, 25, key=1))
    first.end(True)
    must(world.seen["unique new"] == 2, "both have got the key")
    world.drain()


def cancel_meets_a_move_between_buckets(world: World) -> None:
    """A deferred job has been found in the far leaf; it is moved; then it is cancelled there."""
    world.query("SELECT setval('awa.job_ids', 32)")
    job = world.insert_one(later=True)
    must(job % 17 == 16, "the job is far")
    canceller = Canceller(world, "canceller")
    world.actors.append(canceller)
    canceller.begin(READ_COMMITTED)
    canceller.cancel(job, ("take", 0))
    must(canceller.thread is not None, "the cancel waits at its pause point")
    world.tick("refill")
    canceller.resume()
    canceller.end(True)
    must(world.seen["cancel cancelled"] == 1, "the job is cancelled")
    world.drain()


SCHEDULES: dict[str, Callable[[World], None]] = {
    "producer writes to a left slot": producer_writes_to_a_left_slot,
    "claim writes to a left slot": claim_writes_to_a_left_slot,
    "producer writes while prune holds the slot": producer_writes_while_prune_holds_the_slot,
    "prune moves the cursor that a claim reads": prune_moves_the_cursor_that_a_claim_reads,
    "cancel commits between read and lock": cancel_commits_between_read_and_lock,
    "claim commits while cancel looks": claim_commits_while_cancel_looks,
    "worker releases while cancel looks": worker_releases_while_cancel_looks,
    "claims are rolled back": claims_are_rolled_back,
    "claim has an older id than a producer": claim_has_an_older_id_than_a_producer,
    "claim meets a cancel that is rolled back": claim_meets_a_cancel_that_is_rolled_back,
    "producer stops between position and row": producer_stops_between_position_and_row,
    "newest id has not ended": newest_id_has_not_ended,
    "producer commits while a claim probes": producer_commits_while_a_claim_probes,
    "more late rows than a claim may take": more_late_rows_than_a_claim_may_take,
    "claim comes twice in a transaction": claim_comes_twice_in_a_transaction,
    "cancel has an old snapshot": cancel_has_an_old_snapshot,
    "plan is rolled back": plan_is_rolled_back,
    "cancel comes while evacuation moves": cancel_comes_while_evacuation_moves,
    "finish commits while cancel of a lease looks": finish_commits_while_cancel_of_a_lease_looks,
    "finish commits while rescue of a lease looks": finish_commits_while_rescue_of_a_lease_looks,
    "job is deferred into a bucket that is pruned": job_is_deferred_into_a_bucket_that_is_pruned,
    "job is deferred while prune holds its bucket": job_is_deferred_while_prune_holds_its_bucket,
    "cancel meets a move between buckets": cancel_meets_a_move_between_buckets,
    "key is taken over while a producer looks": key_is_taken_over_while_a_producer_looks,
    "holder ends after a snapshot": holder_ends_after_a_snapshot,
}


def must(condition: bool, what: str) -> None:
    """A schedule that is no longer what it was proves nothing."""
    if not condition:
        raise AssertionError(f"not so: {what}")


def finish_one_job(world: World, queue: str = "one") -> None:
    """Leave something to prune in the present slots."""
    world.insert_one(queue)
    world.claim_all()
    world.finish_all()


def move_one_job(world: World, options: str = "{}") -> int:
    """Start a job and let evacuation turn its receipt into a lease; return its id."""
    job = world.insert_one()
    claimer = Claimer(world, "first claimer")
    world.actors.append(claimer)
    claim_one(claimer, "one", options)
    for _ in range(CLAIM_SLOTS):
        world.tick("plan_claim")
        world.tick("publish_claim")
        world.insert_one("two")
        world.claim_all()
        world.tick("evacuate")
    must((job,) in world.query("SELECT job_id FROM awa.leases"), "the attempt is moved")
    return job


def claim_one(claimer: Claimer, queue: str, options: str = "{}") -> None:
    claimer.begin(READ_COMMITTED)
    claimer.claim(queue, 1, options)
    claimer.end(True)


def turn(world: World, ring: str) -> None:
    cursor = f"SELECT last_value FROM awa.{ring}_ring"
    before = world.query(cursor)
    world.tick(f"plan_{ring}")
    world.tick(f"publish_{ring}")
    must(world.query(cursor) != before, "the ring has turned")


def start_insert(producer: Producer, pause: tuple[str, int] | None = ("insert", 0)) -> None:
    job = Job(0, producer.world.new_mark(), "one", 2, 25, is_late=True)

    def got(rows: list[tuple[int]]) -> None:
        [(job.job_id,)] = rows
        producer.pending.append(job)

    if not producer.is_open:
        producer.begin(READ_COMMITTED)
    args = json.dumps({"mark": job.mark})
    sql = "SELECT job_id FROM awa.insert_job('k', %s, 'one')"
    producer.run(sql, (args,), got, pause)
    must((producer.thread is None) == (pause is None), "the producer waits at its pause point")


def release(world: World, step: str) -> None:
    """The first of the two transactions in which a slot goes."""
    must(world.tick(step) == "released", "the slot is released")


def insert_with_key(world: World, producer: Producer, pause: tuple[str, int] | None = None) -> None:
    """Let a producer insert a job with the same key each time, and commit unless it pauses."""
    producer.begin(READ_COMMITTED)
    producer.insert_unique(Job(0, world.new_mark(), "one", 2, 25, key=1), pause)
    if pause is None:
        producer.end(True)


def start_prune(maintainer: Maintainer, step: str) -> None:
    if step != "prune_deferred":
        release(maintainer.world, step)
    maintainer.begin(READ_COMMITTED)
    maintainer.tick([step], ("prune", 0))
    must(maintainer.thread is not None, "prune waits at its pause point")


def finish_prune(maintainer: Maintainer, step: str) -> None:
    maintainer.resume()
    maintainer.end(True)
    must(any(maintainer.world.seen[f"{step} {o}"] for o in ("in_use", "pruned")), "prune went on")


def run_schedule(dsn: str, name: str) -> str | None:
    """Run one directed schedule in a database made for it; return what broke."""
    with World(dsn, seed=0) as world:
        try:
            SCHEDULES[name](world)
        except Broken as error:
            return "\n    ".join([str(error), *world.moves])
    return None
