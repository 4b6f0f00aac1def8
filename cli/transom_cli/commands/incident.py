"""``transom incident``."""

from __future__ import annotations

import json
import time

import click

from transom_cli.ask import client
from transom_cli.incidentpage import incident_page
from transom_cli.text import width
from transomd.words import ExitCode


@click.command()
@click.argument("number", type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
def incident(number: int, as_json: bool) -> int:
    """Show one incident whole: the verdict and its evidence, when what happened, and for each node that it names
    why it was drained or why not. transom status JOB and transom history show the numbers.

    \b
    Examples:
      transom incident 3
    """
    answer = client().get(f"/v1/incidents/{number}")
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(incident_page(answer, now=time.time(), columns=width())))
    return ExitCode.OK
