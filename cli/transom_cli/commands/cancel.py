"""``transom cancel``."""

from __future__ import annotations

import sys

import click

from transom_cli.ask import client, job_id
from transom_cli.complete import complete_jobs
from transom_cli.text import plain
from transomd.errors import TransomError, UnreachableError
from transomd.words import ExitCode


@click.command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)
def cancel(jobs: tuple[str, ...]) -> int:
    """Cancel jobs: the program is ended, its allocation given back, and nothing is started again.

    \b
    Examples:
      transom cancel 12
      transom cancel demo 14 15
    """
    api = client()
    worst = int(ExitCode.OK)
    for word in jobs:
        try:
            job = api.post(f"/v1/jobs/{job_id(api, word)}/cancel")["job"]
        except UnreachableError:
            raise
        except TransomError as error:
            print(f"transom: {plain(word)}: {plain(error)}", file=sys.stderr)
            if error.hint:
                print(f"  next: {plain(error.hint)}", file=sys.stderr)
            worst = max(worst, int(error.exit_code))
        else:
            print(f"job {job['id']} {plain(job['name'])}: {plain(job['state'])}, {plain(job['reason'])}")
    return worst
