"""Options that every command takes, and the connection that they describe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import click

from .database import Database
from .output import one_line

F = TypeVar("F", bound=Callable[..., Any])


class Seconds(click.FloatRange):
    """A finite number of seconds: no minimum lets NaN out by itself."""

    name = "seconds"

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number that was given."""
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return seconds


class Failure(click.ClickException):
    """An error for the user: one line, and a hint when there is a way out."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        """Print to stderr, as `error: ...` and `hint: ...`: the words may be anybody's."""
        click.echo(f"error: {one_line(self.message)}", file=file, err=True)
        if self.hint:
            click.echo(f"hint: {one_line(self.hint)}", file=file, err=True)


@dataclass
class Options:
    """The common options as given."""

    dsn: str | None = None
    schema: str = "awa"
    json: bool = False

    @property
    def conninfo(self) -> str:
        """The connection string; an empty one leaves all to libpq's own variables."""
        environment = os.environ.get("AWA_DSN") or os.environ.get("DATABASE_URL")
        return self.dsn or environment or ""

    def connect(self) -> Database:
        """Open the database; close it by `with`."""
        return Database.connect(self.conninfo, schema=self.schema)


pass_options = click.make_pass_decorator(Options, ensure=True)


def common_options(command: F) -> F:
    """Add --dsn, --schema and --json, which work before a subcommand's name and after it."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
        options = ctx.ensure_object(Options)
        if value and parameter.name:
            setattr(options, parameter.name, value)

    for option in (
        click.option(
            "--json", is_flag=True, help="Print JSON.", expose_value=False, callback=remember
        ),
        click.option(
            "--schema",
            metavar="NAME",
            help="The schema that awa is installed in (default: awa).",
            expose_value=False,
            callback=remember,
        ),
        click.option(
            "--dsn",
            metavar="DSN",
            help="Connection string or URL (default: AWA_DSN, then DATABASE_URL).",
            expose_value=False,
            callback=remember,
        ),
    ):
        command = option(command)
    return command
