"""`awa dlq`: look at dead letters, retry or purge them."""

from __future__ import annotations

import click

from .options import Options, common_options, pass_options
from .output import as_json, as_table


@click.group(invoke_without_command=True)
@click.option("-q", "--queue", help="Only this queue.")
@click.option("-k", "--kind", help="Only this kind.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many."
)
@common_options
@pass_options
@click.pass_context
def dlq(
    ctx: click.Context, options: Options, queue: str | None, kind: str | None, limit: int
) -> None:
    """List dead letters, newest first; retry or purge one.

    \b
    Examples:
      awa dlq --queue mail
      awa dlq retry 4398046511105
      awa dlq purge 4398046511105
    """
    if ctx.invoked_subcommand is not None:
        return
    with options.connect() as db:
        rows = db.view(
            "dlq",
            where={"queue": queue, "kind": kind},
            order_by="finalized_at",
            descending=True,
            limit=limit,
        )
    columns = ("job_id", "kind", "queue", "attempt", "reason", "finalized_at")
    click.echo(as_json(rows) if options.json else as_table(rows, columns))


@dlq.command()
@click.argument("job_id", type=int)
@common_options
@pass_options
def retry(options: Options, job_id: int) -> None:
    """Enqueue a dead letter again, with its attempts reset."""
    with options.connect() as db:
        [result] = db.call("retry_dlq", job_id=job_id)
    click.echo(as_json(result) if options.json else f"{result['job_id']}  {result['state']}")


@dlq.command()
@click.argument("job_id", type=int)
@common_options
@pass_options
def purge(options: Options, job_id: int) -> None:
    """Delete a dead letter."""
    with options.connect() as db:
        purged = db.ask("purge_dlq", job_id=job_id)
    answer = "purged" if purged else "not there"
    click.echo(as_json({"job_id": job_id, "answer": answer}) if options.json else answer)
