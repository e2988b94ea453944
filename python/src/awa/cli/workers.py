"""`awa worker` and `awa tick`: run jobs, and keep house."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import click

from .. import Handlers, run
from ..worker import DEFAULT_CONCURRENCY, DEFAULT_GRACE, Queues
from .database import present
from .loop import rounds
from .options import Failure, Options, Seconds, common_options, pass_options
from .output import as_json, as_table

# How long a worker that was cut short may take to end its process.
EXIT_SECONDS = 3.0


def _queues(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Queues:
    queues: dict[str, int] = {}
    for value in values:
        name, _, limit = value.partition("=")
        if not name or not (limit or "1").isdecimal() or int(limit or "1") < 1:
            raise click.BadParameter(f"{value!r} is not NAME or NAME=N")
        queues[name] = int(limit or DEFAULT_CONCURRENCY)
    return queues or DEFAULT_CONCURRENCY


def queue_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --queue NAME=N."""
    return click.option(
        "-q",
        "--queue",
        "queues",
        metavar="NAME[=N]",
        multiple=True,
        callback=_queues,
        help="Work on this queue, on at most N jobs at once; may be repeated. Without it: on the"
        f" queues that the handlers name. N is {DEFAULT_CONCURRENCY} if it is left out.",
    )(command)


def load_handlers(target: str) -> Handlers:
    """The object that MODULE:NAME names; the current folder may hold the module."""
    module_name, _, name = target.partition(":")
    if not module_name or module_name.startswith("."):
        raise click.BadParameter(f"{target!r} is not MODULE:HANDLERS")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import that fails inside the module is the module's own error and keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise Failure(
            f'there is no module "{module_name}"', "It is looked up from the current folder."
        ) from error
    for attribute in (name or "handlers").split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise Failure(f'module "{module_name}" has no "{attribute}"') from error
    if not isinstance(found, Handlers | Mapping):
        raise Failure(
            f'"{target}" is of type {type(found).__name__}',
            "Name an awa.Handlers, or a dict of functions by kind.",
        )
    try:
        return found if isinstance(found, Handlers) else Handlers(found)
    except (TypeError, ValueError) as error:
        raise Failure(
            f'"{target}" holds what cannot be a handler: {error}',
            "Name an awa.Handlers, or a dict of functions by kind.",
        ) from error


@click.command(short_help="Run jobs until SIGTERM or SIGINT.")
@click.argument("target", metavar="MODULE:HANDLERS")
@queue_option
@click.option(
    "--grace",
    metavar="SECONDS",
    type=Seconds(0),
    default=DEFAULT_GRACE,
    show_default=True,
    help="How long running jobs may go on after SIGTERM or SIGINT.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What to log to stderr.",
)
@common_options
@pass_options
def worker(options: Options, target: str, queues: Queues, grace: float, log_level: str) -> None:
    """Run jobs until SIGTERM or SIGINT; exit with 1 if running handlers had to be cut short.

    HANDLERS is an awa.Handlers, or a dict of functions by kind, in an importable MODULE.

    \b
    Examples:
      awa worker app.tasks:handlers
      awa worker app.tasks:handlers -q default=50 -q mail=5 --grace 30
    """
    handlers = load_handlers(target)
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    code = run(handlers, dsn=options.conninfo, schema=options.schema, queues=queues, grace=grace)
    if code:
        # The interpreter would wait for threads that handlers started themselves.
        _exit_after(EXIT_SECONDS, code)
    sys.exit(code)


def _exit_after(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


@click.command()
@click.option(
    "--every",
    metavar="SECONDS",
    type=Seconds(0.01),
    help="Go on until SIGTERM or SIGINT, one round every so many seconds.",
)
@click.option("--step", "steps", multiple=True, help="Only this step; may be repeated.")
@click.option("--milliseconds", type=int, help="Time budget of a round.")
@click.option("--rows", type=int, help="Row budget of a round.")
@common_options
@pass_options
def tick(
    options: Options,
    every: float | None,
    steps: tuple[str, ...],
    milliseconds: int | None,
    rows: int | None,
) -> None:
    """Do one bounded round of maintenance, and say what each step did.

    Workers do this by themselves; it is for cron jobs and maintenance processes. Any number may run
    at once.

    \b
    Examples:
      awa tick
      awa tick --every 1
      awa tick --step promote --step rescue
    """
    budget = present(steps=list(steps) or None, milliseconds=milliseconds, rows=rows)
    columns = ("step", "outcome", "rows", "milliseconds", "detail")
    with options.connect() as db:
        for _ in rounds(every):
            reports = db.call("tick", budget=json.dumps(budget))
            if options.json:
                click.echo(as_json(reports, compact=every is not None))
            else:
                click.echo(as_table(reports, columns))
