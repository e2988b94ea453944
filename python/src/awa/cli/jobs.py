"""`awa insert` and `awa jobs`: enqueue jobs, look at them, cancel, retry and change them."""

from __future__ import annotations

import json
from datetime import datetime

import click

from .database import present
from .options import Options, Seconds, common_options, pass_options
from .output import as_json, as_record, as_table

STATES = (
    "scheduled",
    "available",
    "running",
    "completed",
    "retryable",
    "failed",
    "cancelled",
    "waiting_external",
)


class _AwareTime(click.ParamType[datetime]):
    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        try:
            time = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not an ISO 8601 time, such as 2030-01-31T12:00:00+01:00")
        if time.utcoffset() is None:
            self.fail(f"{value!r} has no offset from UTC; write {value}Z or {value}+01:00")
        return time


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class _JsonObject(click.ParamType[str]):
    """JSON text, handed to the database as it is; only what JSON does not know is refused here."""

    name = "json"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        text = str(value)
        try:
            json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}")
        return text


@click.command()
@click.argument("kind")
@click.argument("args", metavar="[ARGS_JSON]", type=_JsonObject(), required=False)
@click.option("-q", "--queue", help="Queue (default: default).")
@click.option("-p", "--priority", type=int, help="1, the most urgent, to 4 (default: 2).")
@click.option("--max-attempts", type=int, help="Attempts before the job fails (default: 25).")
@click.option("--run-at", type=_AwareTime(), help="Not before this time; ISO 8601 with an offset.")
@click.option(
    "--delay", "delay_seconds", type=Seconds(0), help="Not before so many seconds from now."
)
@click.option(
    "--deadline", "deadline_seconds", type=Seconds(0), help="Seconds that an attempt may take."
)
@click.option("--tag", "tags", multiple=True, help="A tag; may be repeated.")
@click.option("--metadata", type=_JsonObject(), help="A JSON object kept with the job.")
@click.option("--ordering-key", help="Jobs with the same key go through the same shard, in order.")
@click.option("--keep-result", is_flag=True, default=None, help="Keep what the handler returns.")
@common_options
@pass_options
def insert(
    options: Options,
    /,
    kind: str,
    args: str | None,
    queue: str | None,
    priority: int | None,
    max_attempts: int | None,
    run_at: datetime | None,
    metadata: str | None,
    tags: tuple[str, ...],
    **other_opts: object,
) -> None:
    """Enqueue one job and print its id.

    \b
    Examples:
      awa insert send_email '{"to": "a@example.org"}'
      awa insert report -q slow -p 4 --delay 60 --tag monthly
      awa insert report --run-at 2030-01-31T12:00:00+01:00
    """
    opts = present(
        tags=list(tags) or None, metadata=metadata and json.loads(metadata), **other_opts
    )
    with options.connect() as db:
        [result] = db.call(
            "insert_job",
            kind=kind,
            opts=json.dumps(opts),
            **present(
                args=args, queue=queue, priority=priority, max_attempts=max_attempts, run_at=run_at
            ),
        )
    click.echo(as_json(result) if options.json else f"{result['job_id']}  {result['state']}")


@click.group(invoke_without_command=True)
@click.option("-q", "--queue", help="Only this queue.")
@click.option("-s", "--state", type=click.Choice(STATES), help="Only this state.")
@click.option("-k", "--kind", help="Only this kind.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many."
)
@common_options
@pass_options
@click.pass_context
def jobs(
    ctx: click.Context,
    options: Options,
    queue: str | None,
    state: str | None,
    kind: str | None,
    limit: int,
) -> None:
    """List jobs, newest first; show, cancel, retry or change one.

    \b
    Examples:
      awa jobs --state retryable --limit 10
      awa jobs show 4398046511105
      awa jobs explain 4398046511105
      awa jobs cancel 4398046511105 --reason "sent twice"
      awa jobs retry 4398046511105
      awa jobs update 4398046511105 '{"priority": 1, "args": {"to": "b@example.org"}}'
    """
    if ctx.invoked_subcommand is not None:
        return
    with options.connect() as db:
        rows = db.view(
            "jobs",
            where={"queue": queue, "state": state, "kind": kind},
            order_by="created_at",
            descending=True,
            limit=limit,
        )
    columns = ("job_id", "state", "kind", "queue", "priority", "attempt", "max_attempts", "run_at")
    click.echo(as_json(rows) if options.json else as_table(rows, columns))


@jobs.command()
@click.argument("job_id", type=int)
@common_options
@pass_options
def show(options: Options, job_id: int) -> None:
    """Show all that is known about one job."""
    with options.connect() as db:
        [job] = db.call("job", job_id=job_id)
    click.echo(as_json(job) if options.json else as_record(job))


@jobs.command()
@click.argument("job_id", type=int)
@common_options
@pass_options
def explain(options: Options, job_id: int) -> None:
    """Say in one sentence why a job is where it is, and name the facts."""
    with options.connect() as db:
        [answer] = db.call("explain_job", job_id=job_id)
    if options.json:
        click.echo(as_json(answer))
    else:
        click.echo(f"{answer['sentence']}\n\n{as_record(answer['facts'])}")


@jobs.command()
@click.argument("job_id", type=int)
@click.option("--reason", help="Kept with the job.")
@common_options
@pass_options
def cancel(options: Options, job_id: int, reason: str | None) -> None:
    """Cancel one job, whatever its state; a running handler is told."""
    with options.connect() as db:
        answer = db.ask("cancel_job", job_id=job_id, **present(reason=reason))
    click.echo(as_json({"job_id": job_id, "answer": answer}) if options.json else answer)


@jobs.command()
@click.argument("job_id", type=int)
@click.option("-q", "--queue", help="Another queue.")
@click.option("-p", "--priority", type=int, help="Another priority.")
@click.option(
    "--delay", "delay_seconds", type=Seconds(0), help="Not before so many seconds from now."
)
@common_options
@pass_options
def retry(options: Options, /, job_id: int, **opts: object) -> None:
    """Make a job that failed, was cancelled or waits for its time run now."""
    with options.connect() as db:
        [result] = db.call("retry_job", job_id=job_id, opts=json.dumps(present(**opts)))
    click.echo(as_json(result) if options.json else f"{result['job_id']}  {result['state']}")


@jobs.command()
@click.argument("job_id", type=int)
@click.argument("changes", metavar="CHANGES_JSON", type=_JsonObject())
@common_options
@pass_options
def update(options: Options, job_id: int, changes: str) -> None:
    """Change a job that waits: args, queue, priority, run_at, max_attempts, tags and so on."""
    with options.connect() as db:
        state = db.ask("update_job", job_id=job_id, changes=changes)
    click.echo(as_json({"job_id": job_id, "state": state}) if options.json else state)
