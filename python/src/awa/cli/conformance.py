"""`awa conformance`: does a worker keep to the contract?"""

from __future__ import annotations

import sys

import click

from .. import conformance as driver
from .options import Options, Seconds, common_options, pass_options
from .output import as_json


@click.command()
@click.option(
    "--worker",
    metavar="COMMAND",
    required=True,
    help="Starts the worker; it gets AWA_DSN and AWA_QUEUE in its environment.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="NUMBER",
    type=click.Choice([rule.number for rule in driver.RULES]),
    help="Check this rule alone, besides W1; may be given again.",
)
@click.option(
    "--timeout",
    type=Seconds(0),
    default=30,
    show_default=True,
    help="Seconds to wait for anything that a rule asks for.",
)
@click.option("--verbose", is_flag=True, help="Show what the worker prints, on stderr.")
@common_options
@pass_options
def conformance(
    options: Options, worker: str, rules: tuple[str, ...], timeout: float, verbose: bool
) -> None:
    """Drive a worker through the rules of docs/conformance.md.

    Use a database that nothing else works on: its settings are changed for the time of the run, and
    connections are ended. Exit status 1 means that the worker breaks a rule.
    """
    verdicts = []
    for verdict in driver.run(
        options.conninfo,
        worker,
        schema=options.schema,
        timeout=timeout,
        rules=rules,
        output=sys.stderr if verbose else None,
    ):
        verdicts.append(verdict)
        if not options.json:
            rule = verdict.rule
            detail = f": {verdict.detail}" if verdict.detail else ""
            click.echo(f"{rule.number:<4} {rule.level:<5} {verdict.answer:<7} {rule.text}{detail}")
    if options.json:
        rows = [
            {
                "rule": v.rule.number,
                "level": v.rule.level,
                "answer": v.answer,
                "text": v.rule.text,
                "detail": v.detail,
            }
            for v in verdicts
        ]
        click.echo(as_json(rows))
    if any(v.answer == "failed" for v in verdicts):
        raise SystemExit(1)
