"""What the commands ask the daemon: the client of a command, and which job a word means."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from typing import Any

import click

from transom_cli.text import plain
from transomd.api.client import Client
from transomd.errors import NotFoundError, UsageError
from transomd.words import JobState

Json = dict[str, Any]

FINAL = frozenset(str(state) for state in JobState if state.final)


def client() -> Client:
    """Return the client for the address given to the running command."""
    return Client(click.get_current_context().find_root().obj or "")


def finished(job: Mapping[str, Any]) -> bool:
    """Whether a job has come to its end."""
    return str(job.get("state")) in FINAL


def job_view(api: Client, word: str) -> Json:
    """Return everything about the job that ``word`` (id or name) means. Raises NotFoundError or UsageError."""
    return api.get(f"/v1/jobs/{job_id(api, word)}")


def job_id(api: Client, word: str) -> int:
    """Return the id of the job that ``word`` means: an id, or a name that is one job's.

    Of several of a name, one's own goes before other people's, and one that has not ended before those that have.
    """
    if word.isascii() and word.isdigit():
        return int(word)
    jobs = [job for job in api.get("/v1/jobs", all=1)["jobs"] if job.get("name") == word]
    if not jobs:
        raise NotFoundError(f"there is no job called '{plain(word)}'", hint="transom status --all")
    jobs = _narrowed(jobs, [job for job in jobs if job.get("user") == getpass.getuser()])
    jobs = _narrowed(jobs, [job for job in jobs if not finished(job)])
    if len(jobs) > 1:
        ids = ", ".join(str(job["id"]) for job in jobs)
        raise UsageError(
            f"{len(jobs)} jobs are called '{plain(word)}': {ids}", hint=f"name one by its id: {jobs[-1]['id']}"
        )
    return int(jobs[0]["id"])


def _narrowed(jobs: Sequence[Json], better: Sequence[Json]) -> list[Json]:
    return list(better or jobs)


def node_names(words: Sequence[str]) -> list[str]:
    """Return the names in host lists. Raises UsageError for what is none."""
    from transom_slurm.nodesets import HostlistError, expand

    try:
        names = [name for word in words for name in expand(word)]
    except HostlistError as error:
        raise UsageError(str(error), hint="write nodes as gpu-[1-4,7], in quotes") from None
    if not names:
        raise UsageError("no node is named", hint="write nodes as gpu-[1-4,7], in quotes")
    return list(dict.fromkeys(names))
