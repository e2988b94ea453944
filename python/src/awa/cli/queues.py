"""`awa queues`: count, watch, declare, pause, resume and drain."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import click
import psycopg

from .database import Database, Row, present
from .loop import rounds
from .options import Options, Seconds, common_options, pass_options
from .output import as_json, as_table, live_view

_PATIENCE = 10.0  # seconds that drain goes on without getting anywhere

_COUNTS = (
    "queue",
    "scheduled",
    "available",
    "running",
    "retryable",
    "completed",
    "failed",
    "cancelled",
    "dead_lettered",
)


@click.group(invoke_without_command=True)
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--every",
    metavar="SECONDS",
    type=Seconds(0.1),
    default=1.0,
    show_default=True,
    help="How often --watch looks.",
)
@common_options
@pass_options
@click.pass_context
def queues(ctx: click.Context, options: Options, watch: bool, every: float) -> None:
    """Count the jobs of every queue by state; act on a queue.

    \b
    Examples:
      awa queues --watch
      awa queues lanes
      awa queues declare mail --shards 4 --dlq
      awa queues pause mail
      awa queues drain mail --yes
    """
    if ctx.invoked_subcommand is not None:
        return
    with options.connect() as db, ExitStack() as stack:
        show = stack.enter_context(live_view()) if watch and not options.json else click.echo
        for _ in rounds(every if watch else None):
            rows = db.counts()
            show(as_json(rows, compact=watch) if options.json else _count_table(rows))


def _count_table(rows: list[Row]) -> str:
    waits = any(row["waiting_external"] for row in rows)
    return as_table(rows, (*_COUNTS, "waiting_external") if waits else _COUNTS)


@queues.command()
@common_options
@pass_options
def lanes(options: Options) -> None:
    """Show how deep each lane is: an upper bound, read without a scan."""
    with options.connect() as db:
        rows = db.call("queue_depths")
    columns = ("queue", "priority", "shard", "depth", "paused")
    click.echo(as_json(rows) if options.json else as_table(rows, columns))


@queues.command()
@click.argument("queue")
@click.option("--shards", "enqueue_shards", type=int, help="Lanes per priority, 1 to 64.")
@click.option("--strict-fifo/--no-strict-fifo", default=None, help="Producers wait for each other.")
@click.option("--dlq/--no-dlq", default=None, help="Keep failed jobs as dead letters.")
@click.option("--notify/--no-notify", default=None, help="Wake sleeping workers by NOTIFY.")
@click.option(
    "--aging", "aging_seconds", type=Seconds(0), help="Seconds until a job gains a priority."
)
@click.option(
    "--deadline", "deadline_seconds", type=Seconds(0), help="Seconds an attempt may take."
)
@common_options
@pass_options
def declare(options: Options, /, queue: str, **opts: object) -> None:
    """Make a queue, or change the given options of one."""
    with options.connect() as db:
        db.call("declare_queue", queue=queue, opts=json.dumps(present(**opts)))
    _say(options, queue, "declared")


@queues.command()
@click.argument("queue")
@common_options
@pass_options
def pause(options: Options, queue: str) -> None:
    """Stop claims from a queue; running jobs go on."""
    with options.connect() as db:
        changed = db.ask("pause_queue", queue=queue)
    _say(options, queue, "paused" if changed else "was paused already")


@queues.command()
@click.argument("queue")
@common_options
@pass_options
def resume(options: Options, queue: str) -> None:
    """Let claims from a queue go on."""
    with options.connect() as db:
        changed = db.ask("resume_queue", queue=queue)
    _say(options, queue, "resumed" if changed else "was not paused")


@queues.command()
@click.argument("queue")
@click.option("--reason", help="Kept with the jobs.")
@click.confirmation_option(prompt="Cancel every job of the queue that waits?")
@common_options
@pass_options
def drain(options: Options, queue: str, reason: str | None) -> None:
    """Cancel all jobs of a queue that wait; running ones go on."""
    with options.connect() as db:
        drained = sum(_portions(db, queue, json.dumps(present(reason=reason))))
    answer = {"queue": queue, "cancelled": drained}
    click.echo(as_json(answer) if options.json else f"{drained} cancelled")


def _portions(db: Database, queue: str, opts: str) -> Iterator[int]:
    patience = time.monotonic() + _PATIENCE
    while True:
        try:
            portion = db.ask("drain_queue", queue=queue, opts=opts)
        except psycopg.errors.SerializationFailure:  # a claim has the lane
            if time.monotonic() > patience:
                raise
            time.sleep(0.02)
            continue
        if portion == 0:
            return
        patience = time.monotonic() + _PATIENCE
        yield portion


def _say(options: Options, queue: str, answer: str) -> None:
    click.echo(as_json({"queue": queue, "answer": answer}) if options.json else answer)
