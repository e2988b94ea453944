"""`awa settings`: show and change the settings kept in the database."""

from __future__ import annotations

import click

from .database import Row
from .options import Options, common_options, pass_options
from .output import as_json, as_table


@click.group(invoke_without_command=True)
@common_options
@pass_options
@click.pass_context
def settings(ctx: click.Context, options: Options) -> None:
    """Show all settings; change one.

    \b
    Examples:
      awa settings
      awa settings set terminal_retention_seconds 3600
      awa settings reset terminal_retention_seconds
    """
    if ctx.invoked_subcommand is not None:
        return
    with options.connect() as db:
        rows = db.view("settings", order_by="name")
    columns = ("name", "value", "default_value", "unit", "description")
    click.echo(as_json(rows) if options.json else as_table(rows, columns))


@settings.command("set")
@click.argument("name")
@click.argument("value")
@common_options
@pass_options
def set_(options: Options, name: str, value: str) -> None:
    """Change a setting; running workers and producers follow at once."""
    with options.connect() as db:
        db.call("set_setting", name=name, value=value)
        _show(options, db.view("settings", where={"name": name}, order_by="name"))


@settings.command()
@click.argument("name")
@common_options
@pass_options
def reset(options: Options, name: str) -> None:
    """Give a setting its default value again."""
    with options.connect() as db:
        db.call("set_setting", name=name, value=None)
        _show(options, db.view("settings", where={"name": name}, order_by="name"))


def _show(options: Options, rows: list[Row]) -> None:
    [row] = rows
    click.echo(as_json(row) if options.json else f"{row['name']} = {row['value']}")
