"""The command tree and its one error format."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click
import psycopg

from .._install import InstallError
from ..embedded import EmbeddedPostgresError
from ..errors import AwaError
from . import conformance, dead_letters, jobs, queues, server, settings, workers
from .options import Failure, Options, common_options

# A full disk under stdout.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Commands(click.Group):
    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            try:
                return super().main(*args, **extra)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            if error.errno not in (*_NO_SPACE, errno.EPIPE):
                raise
            # The interpreter would try once more to write what is left, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno != errno.EPIPE:
                Failure(f"the output cannot be written: {error.strerror}").show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (psycopg.Error, AwaError) as error:
            raise _failure(error, ctx.ensure_object(Options).schema) from error
        except InstallError as error:
            raise Failure(str(error), error.hint) from error
        except EmbeddedPostgresError as error:
            raise Failure(str(error)) from error
        except click.Abort as error:
            raise Failure("nothing was done: nobody said yes", "Say it by --yes.") from error
        except UnicodeEncodeError as error:
            # How Python passes on bytes of the command line that are not text.
            what = ascii(error.object)
            raise Failure(f"not valid text: {what}", "Give arguments in UTF-8.") from error


_NOT_INSTALLED = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
)


def _failure(error: Exception, schema: str) -> Failure:
    """One line and a hint from what the server or the driver said."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    if isinstance(cause, _NOT_INSTALLED):
        return Failure(f'awa is not installed in schema "{schema}" here', "Run `awa install`.")
    if isinstance(cause, psycopg.errors.ReadOnlySqlTransaction):
        return Failure(
            cause.diag.message_primary or str(cause),
            "This server takes no writes: name the primary, or several hosts with"
            " target_session_attrs=read-write.",
        )
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return Failure(cause.diag.message_primary, cause.diag.message_hint)
    if isinstance(error, AwaError):
        return Failure(error.message, error.hint)
    message = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
    if isinstance(cause, psycopg.OperationalError):
        return Failure(message, "Say which database by --dsn, AWA_DSN or DATABASE_URL.")
    return Failure(message)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="awa-sql", prog_name="awa")
@common_options
def main() -> None:
    """A job queue in PostgreSQL.

    The database is the one that --dsn, AWA_DSN or DATABASE_URL names, else the one that psql would
    connect to. Every command that prints data prints JSON with --json.

    \b
    Try it:
      awa dev                                 a private PostgreSQL with awa in it
      awa install --dsn postgresql:///app     install into a database of yours
      awa upgrade --dsn postgresql:///app     after an update of this package
      awa insert send_email '{"to": "a@example.org"}'
      awa worker app.tasks:handlers --queue default=50
      awa queues --watch
    """


for command in (
    server.dev,
    server.install,
    server.upgrade,
    workers.worker,
    workers.tick,
    jobs.insert,
    jobs.jobs,
    queues.queues,
    dead_letters.dlq,
    settings.settings,
    conformance.conformance,
):
    main.add_command(command)
