"""``transom history``."""

from __future__ import annotations

import json
import time

import click

from transom_cli.ask import Json, client, job_view
from transom_cli.complete import complete_jobs_and_nodes
from transom_cli.historypage import all_history, job_history, node_history
from transom_cli.text import width
from transomd.api.client import Client
from transomd.errors import NotFoundError
from transomd.words import ExitCode


@click.command()
@click.argument("what", required=False, metavar="[JOB|NODE]", shell_complete=complete_jobs_and_nodes)
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
def history(what: str | None, as_json: bool) -> int:
    """Show what happened: to a JOB its attempts, launches, incidents and drains; to a NODE its incidents in all jobs
    and its drains; without either the nodes that were blamed again and again, and the newest incidents.
    What is not a job of one's own is for administrators.

    \b
    Examples:
      transom history
      transom history demo
      transom history gpu-7
    """
    api = client()
    now, columns = time.time(), width()
    view = _job(api, what) if what else None
    if view is not None:
        answer, lines = view, job_history(view, now=now, columns=columns)
    elif what:
        answer = _node(api, what)
        lines = node_history(what, answer, now=now, columns=columns)
    else:
        answer = api.get("/v1/history")
        lines = all_history(answer, now=now, columns=columns)
    print(json.dumps(answer, indent=2) if as_json else "\n".join(lines))
    return ExitCode.OK


def _job(api: Client, word: str) -> Json | None:
    """Return the job that a word means; None if it means none. A number is a job's id and nothing else."""
    try:
        return job_view(api, word)
    except NotFoundError:
        if word.isdigit():
            raise
        return None


def _node(api: Client, word: str) -> Json:
    """Return the history of a node. Raises NotFoundError when neither Slurm nor transom knows it."""
    answer = api.get("/v1/history", node=word)
    known = answer["incidents"] or answer["drains"]
    if not known and word not in {node.get("name") for node in api.get("/v1/nodes")["nodes"]}:
        raise NotFoundError(f"'{word}' is neither a job nor a node", hint="transom status --all; transom nodes")
    return answer
