"""``transom cancel``."""

from __future__ import annotations

import json

import click

from transom_cli.ask import Json, client, job_id
from transom_cli.complete import complete_jobs
from transom_cli.telling import say, tell
from transomd.errors import TransomError, UnreachableError
from transomd.words import ExitCode


@click.command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)
@click.option("--json", "as_json", is_flag=True, help="Print one object: the jobs, and what could not be done.")
def cancel(jobs: tuple[str, ...], as_json: bool) -> int:
    """Cancel jobs: the program is ended, its allocation given back, and nothing is started again.

    \b
    Examples:
      transom cancel 12
      transom cancel demo 14 15
    """
    done: list[Json] = []
    faults: list[Json] = []
    try:
        for word in jobs:
            try:
                done.append(_cancel(word))
            except UnreachableError:
                raise
            except TransomError as error:
                faults.append({"job": word, "error": str(error), "hint": error.hint, "code": int(error.exit_code)})
                tell(f"transom: {word}: {error}")
                if error.hint:
                    tell(f"next: {error.hint}", indent="  ")
            else:
                if not as_json:
                    say(_said(done[-1]))
    finally:
        if as_json:
            print(json.dumps({"jobs": done, "errors": faults}, indent=2))
    return max((fault["code"] for fault in faults), default=int(ExitCode.OK))


def _cancel(word: str) -> Json:
    api = client()
    job: Json = api.post(f"/v1/jobs/{job_id(api, word)}/cancel")["job"]
    return job


def _said(job: Json) -> str:
    return f"job {job['id']} {job['name']}: {job['state']}, {job['reason']}"
