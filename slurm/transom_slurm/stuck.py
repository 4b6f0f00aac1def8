"""Jobs that will not go on by themselves, with the cause and the exact command. Pure.

Only what nothing but a person (or a node's return) will change is told: a job that merely waits its turn is not stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from transom_slurm.nodesets import fold
from transom_slurm.outlook import Seen
from transom_slurm.pending import Pending, Until, explained, waits_for_person
from transom_slurm.types import JobBase, SlurmJob, SlurmNode

COMPLETING_S = 300.0
"""How long a job may be COMPLETING: above UnkillableStepTimeout (60 s) and a slow epilog by a good margin."""


class Stuck(NamedTuple):
    """One job, why it does not go on, and what to type."""

    job: SlurmJob
    cause: str
    command: str


def stuck_jobs(jobs: Iterable[SlurmJob], nodes: Mapping[str, SlurmNode], *, now: float) -> list[Stuck]:
    """Return every job that is stuck, by id. Jobs and nodes are whole answers of Slurm of about the same moment."""
    jobs = sorted(jobs, key=lambda job: job.job_id)
    busy = frozenset(node for job in jobs if job.status.base is JobBase.RUNNING for node in job.nodes)
    found = (_stuck(job, nodes, busy, now) for job in jobs)
    return [one for one in found if one is not None]


def completing_late(job: SlurmJob, now: float) -> bool:
    """Whether a job has been COMPLETING for so long that it will not end by itself."""
    return "COMPLETING" in job.status.flags and job.end_time is not None and now - job.end_time >= COMPLETING_S


def does_not_end(
    job: SlurmJob, jobs: Iterable[SlurmJob], nodes: Mapping[str, SlurmNode], *, now: float
) -> Stuck | None:
    """Return what is to be told of a job that has been COMPLETING for too long; None where it has not."""
    busy = frozenset(node for other in jobs if other.status.base is JobBase.RUNNING for node in other.nodes)
    return _completing(job, nodes, busy, now) if completing_late(job, now) else None


def _stuck(job: SlurmJob, nodes: Mapping[str, SlurmNode], busy: frozenset[str], now: float) -> Stuck | None:
    if "COMPLETING" in job.status.flags:
        return _completing(job, nodes, busy, now)
    if "SPECIAL_EXIT" in job.status.flags:
        return Stuck(job, "put back and held for a special exit code of its own", f"scontrol release {job.job_id}")
    why = explained(job)
    return None if why is None else _waiting(job, why, why.look(job, nodes, now) if why.look else None)


def _waiting(job: SlurmJob, why: Pending, seen: Seen | None) -> Stuck | None:
    """What a person holds is meant to wait."""
    if seen is None and (why.until is Until.HOLDER or waits_for_person(job) is None):
        return None
    cause = f"{why.meaning} ({job.reason}){f'; {seen.text}' if seen else ''}"
    if seen is not None and seen.command:
        return Stuck(job, cause, seen.command)
    return Stuck(job, cause, f"{why.command}   # {'or' if why.hold else 'then'}: scancel {job.job_id}")


def _completing(job: SlurmJob, nodes: Mapping[str, SlurmNode], busy: frozenset[str], now: float) -> Stuck | None:
    if job.end_time is None or not completing_late(job, now):
        return None
    still = [n for n in job.nodes if n in nodes and "COMPLETING" in nodes[n].status.flags] or list(job.nodes)
    names = fold(still)
    cause = f"ended {now - job.end_time:.0f} s ago, but its processes or the epilog on {names} do not end"
    if busy.intersection(still):
        cause += "; other jobs run there"
        return Stuck(job, cause, f"ssh {still[0]} ps -eo pid,stat,wchan:20,args")
    # What is stuck in the kernel only a reboot ends; DOWN lets slurmctld close the job, and would end any other.
    return Stuck(job, cause, f"scontrol update nodename={names} state=down reason='job {job.job_id} does not end'")
