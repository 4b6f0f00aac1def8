"""Jobs that will not go on by themselves, with the cause and the exact command. Pure.

Only what nothing but a person (or a node's return) will change is told: a job that merely waits its turn is not stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from transom_slurm.nodesets import fold
from transom_slurm.pending import plain_reason, waits_for_person
from transom_slurm.states import drain_refusal
from transom_slurm.types import JobBase, SlurmJob, SlurmNode

COMPLETING_S = 300.0
"""How long a job may be COMPLETING: above UnkillableStepTimeout (60 s) and a slow epilog by a good margin."""
_OUT_OF_SERVICE = ("DRAIN", "FAIL", "NOT_RESPONDING", "MAINTENANCE", "REBOOT_REQUESTED", "REBOOT_ISSUED", "INVALID_REG")
_NODES_AWAY = ("nodes required for job are down", "reqnodenotavail", "required node not available")
_LAUNCH_ERRORS = ("prolog error", "job env setup error", "batch job complete failure")


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
    if job.status.base is not JobBase.PENDING:
        return None
    reason = plain_reason(job.reason)
    rule = next((rule for word, rule in _RULES.items() if reason.startswith(word)), None)
    if rule is not None:
        return rule(job, nodes, now)
    return _nodes_away(job, nodes) if reason.startswith(_NODES_AWAY) else _never_fits(job)


def _launch_failed(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck:
    bad = [node.name for node in nodes.values() if any(word in node.reason.lower() for word in _LAUNCH_ERRORS)]
    where = f"; nodes that say so: {fold(bad)}" if bad else ""
    # Released alone, it waits for the rest of the 120 s that slurmctld puts a requeued job off.
    command = f"scontrol release {job.job_id} && scontrol update jobid={job.job_id} StartTime=now"
    return Stuck(job, f"its launch failed (most often a prolog), so Slurm put it back and holds it{where}", command)


def _max_requeue(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck:
    cause = f"held: its launch failed as often as MaxBatchRequeue allows ({job.restarts} restarts); find out why first"
    return Stuck(job, cause, f"scontrol release {job.job_id}")


def _begin_time(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck | None:
    if not job.restarts:
        return None
    left = f" for another {job.start_time - now:.0f} s" if job.start_time and job.start_time > now else ""
    cause = f"was requeued, and slurmctld puts that off{left}"
    return Stuck(job, cause, f"scontrol update jobid={job.job_id} StartTime=now")


def _dependency(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck:
    command = f"scontrol update jobid={job.job_id} Dependency=   # or: scancel {job.job_id}"
    return Stuck(job, "a job that it depends on has ended otherwise, so it will never start", command)


def _resources(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck | None:
    """Waiting for resources is normal, unless nothing in its partition is busy: then none will become free."""
    there = _partition(job, nodes)
    away = [node for node in there if _away(node)]
    usable = [node for node in there if not _away(node)]
    if not away or any(node.status.base != "IDLE" or "COMPLETING" in node.status.flags for node in usable):
        return None
    cause = f"needs more than is left of its partition; out of service: {_told(away)}"
    return Stuck(job, cause, f"scontrol show node {fold(node.name for node in away)}")


def _nodes_away(job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> Stuck | None:
    away = [node for node in _partition(job, nodes) if _away(node)]
    if not away:
        return None
    cause = f"nodes that it needs are out of service: {_told(away)}"
    return Stuck(job, cause, f"scontrol show node {fold(node.name for node in away)}")


def _too_large(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Stuck | None:
    if waits_for_person(job) is None:
        return None
    cause = (
        f"asks for what its partition never gives: it has {len(_partition(job, nodes))} nodes, and limits of its own"
    )
    return Stuck(job, cause, f"scontrol show partition {job.partition}   # then: scancel {job.job_id}")


def _never_fits(job: SlurmJob) -> Stuck | None:
    """What somebody holds is meant to wait."""
    found = waits_for_person(job)
    if found is None or found.hold:
        return None
    return Stuck(job, f"{found.meaning} ({job.reason})", f"{found.command}   # then: scancel {job.job_id}")


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


def _partition(job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> list[SlurmNode]:
    wanted = set(job.partition.split(","))
    return [node for node in nodes.values() if wanted & set(node.partitions)]


def _away(node: SlurmNode) -> bool:
    return node.status.base == "DOWN" or bool(node.status.flags & set(_OUT_OF_SERVICE))


def _told(away: Iterable[SlurmNode]) -> str:
    by_reason: dict[str, list[str]] = {}
    for node in away:
        by_reason.setdefault(node.reason or drain_refusal(node) or node.state_text, []).append(node.name)
    return ", ".join(f"{fold(names)} ({reason})" for reason, names in by_reason.items())


_Rule = Callable[[SlurmJob, Mapping[str, SlurmNode], float], Stuck | None]
_RULES: Mapping[str, _Rule] = {
    "launch failed requeued held": _launch_failed,
    "jobholdmaxrequeue": _max_requeue,
    "begintime": _begin_time,
    "dependencyneversatisfied": _dependency,
    "resources": _resources,
    "partitionconfig": _too_large,
    "partitionnodelimit": _too_large,
    "partitiontimelimit": _too_large,
}
