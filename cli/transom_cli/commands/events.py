"""``transom events``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import click

from transom_cli.ask import Json, client, job_id
from transom_cli.complete import complete_jobs, complete_nodes
from transom_cli.follow import follow_events
from transom_cli.text import plain, width, wrapped
from transomd.words import ExitCode


@click.command()
@click.option("--job", default=None, metavar="JOB", help="Only this job's.", shell_complete=complete_jobs)
@click.option("--node", default=None, metavar="NODE", help="Only this node's.", shell_complete=complete_nodes)
@click.option(
    "-n", "--limit", default=50, show_default=True, metavar="N", type=click.IntRange(1, 100_000), help="The newest N."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with those to come, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers; with -f one object a line.")
def events(job: str | None, node: str | None, limit: int, follow: bool, as_json: bool) -> int:
    """Show what transom saw, decided and did, oldest first.

    \b
    Examples:
      transom events
      transom events --job demo -f
      transom events --node gpu-7 -n 1000 --json
    """
    api = client()
    number = job_id(api, job) if job else None
    answer = api.get("/v1/events", job=number, node=node, limit=limit)
    if as_json and not follow:
        print(json.dumps(answer, indent=2))
        return ExitCode.OK
    _print(answer["events"], as_json)
    if not follow and not answer["events"]:
        print("no events")
    if follow:
        for event in follow_events(api, job=number, node=node, after=int(answer.get("last") or 0)):
            _print([event], as_json)
    return ExitCode.OK


def _print(found: Iterable[Json], as_json: bool) -> None:
    for event in found:
        print(json.dumps(event) if as_json else event_lines(event, width()), flush=True)


def event_lines(event: Mapping[str, Any], columns: int) -> str:
    """Return one event: time, kind, job, node, message; in lines of at most ``columns`` (0: one line)."""
    return "\n".join(wrapped(_line(event), columns, indent="    ")).lstrip()


def _line(event: Mapping[str, Any]) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("at") or 0)))
    about = [f"job {event['job_id']}"] if event.get("job_id") is not None else []
    about += [str(event["node"])] if event.get("node") else []
    where = f" [{plain(' '.join(about))}]" if about else ""
    return f"{moment} {plain(event.get('kind'))}{where} {plain(event.get('message'))}"
