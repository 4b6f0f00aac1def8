"""``transom status``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from transom_cli.ask import Json, client, finished, job_id
from transom_cli.complete import complete_jobs
from transom_cli.joblist import job_list
from transom_cli.jobpage import job_page
from transom_cli.telling import tell
from transom_cli.text import STATE_STYLES, clip, paint, plain, width, wrapped
from transomd.api.client import Client
from transomd.errors import UnreachableError
from transomd.words import ExitCode, JobState

EVERY_S = 2.0


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--watch", is_flag=True, help="Show it again every two seconds; for one job, until it ends.")
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
@click.option("--all", "everything", is_flag=True, help="Also jobs that ended more than a day ago.")
@click.option("--user", default=None, metavar="USER", help="Only this user's jobs.")
def status(job: str | None, watch: bool, as_json: bool, everything: bool, user: str | None) -> int:
    """Show all jobs; or one JOB (id or name): its state and why, its attempts and launches, what failed, on which
    evidence, what is under way, and what to type next.

    \b
    Examples:
      transom status
      transom status demo
      transom status 12 --watch       ends with the job: exit code 0 or 8
      transom status --all --json | jq -r '.jobs[] | [.id, .state] | @tsv'
    """
    api = client()
    if job is None:
        while True:
            _show(_list_answer(api, everything, user), as_json, redraw=watch)
            if not watch:
                return ExitCode.OK
            time.sleep(EVERY_S)
    number = job_id(api, job)
    return _watch(api, number, as_json) if watch else _once(api, number, as_json)


def _once(api: Client, number: int, as_json: bool) -> int:
    _show(api.get(f"/v1/jobs/{number}"), as_json, redraw=False)
    return ExitCode.OK


def _watch(api: Client, number: int, as_json: bool) -> int:
    """Show one job until it ends; a daemon that does not answer for a while is said and waited for."""
    while True:
        try:
            view = api.get(f"/v1/jobs/{number}")
        except UnreachableError as error:
            tell(f"transom: {error}; trying again")
        else:
            _show(view, as_json, redraw=True)
            if finished(view["job"]):
                return ExitCode.OK if view["job"]["state"] == JobState.COMPLETED else ExitCode.JOB_FAILED
        time.sleep(EVERY_S)


def _list_answer(api: Client, everything: bool, user: str | None) -> Json:
    answer = api.get("/v1/jobs", all=1 if everything else None, user=user)
    return {**answer, "daemon": api.get("/v1/daemon")}


def _show(answer: Json, as_json: bool, *, redraw: bool) -> None:
    if as_json:
        answer = {key: value for key, value in answer.items() if key != "daemon"}
        print(json.dumps(answer, indent=None if redraw else 2), flush=True)
        return
    now, columns = time.time(), width()
    lines = _page(answer, now, columns) if "job" in answer else _list(answer, now, columns)
    if redraw and sys.stdout.isatty():
        lines = ["\x1b[H\x1b[2J" + lines[0], *lines[1:]]
    print("\n".join(lines), flush=True)


def _page(view: Json, now: float, columns: int) -> list[str]:
    first, *rest = job_page(view, now=now, columns=columns)
    return [paint(first, str(view["job"].get("state"))), *rest]


def _list(answer: Json, now: float, columns: int) -> list[str]:
    jobs = answer["jobs"]
    lines = [line for text in _warnings(answer["daemon"]) for line in _short(text, columns)]
    if not jobs:
        return [*lines, "no jobs; submit one with: transom submit job.yaml"]
    return lines + [_coloured(line, state) for line, state in job_list(jobs, now=now, columns=columns)]


def _short(text: str, columns: int) -> list[str]:
    """Wrap a warning, to two lines at most."""
    lines = wrapped(text, columns, indent="")
    return lines if len(lines) < 3 else [lines[0], clip(f"{lines[1]} {lines[2]}", columns)]


def _coloured(row: str, state: str) -> str:
    if state not in STATE_STYLES or f"  {state}" not in row:
        return row
    before, _, after = row.partition(f"  {state}")
    return f"{before}  {paint(state, state)}{after}"


def _warnings(daemon: Mapping[str, Any]) -> list[str]:
    lines = []
    slurm = daemon.get("slurm") or {}
    if slurm.get("ok") is False:
        lines.append(
            f"Slurm does not answer, so this is what was last known: {plain(slurm.get('error') or 'no cause given')}"
        )
    if daemon.get("paused"):
        lines.append(f"{plain(daemon['paused'])}; it looks on and does nothing (transom resume-actions)")
    if daemon.get("tripped"):
        lines.append(plain(daemon["tripped"]))
    return lines
