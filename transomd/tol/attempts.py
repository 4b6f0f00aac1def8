"""The records of an attempt and its submission. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from transom_slurm.types import SlurmJob, SlurmNode
from transom_sql.records import Attempt, Incident, Intent

from transomd.tol import facts
from transomd.tol.drains import drain_key
from transomd.tol.view import JobView, World
from transomd.words import IntentKind, IntentState

EXCLUDE_FOR_S = 86400.0
"""How long a node stays excluded from a job's next attempts after the last failure that it was blamed for."""


def first_attempt(view: JobView, now: float) -> Attempt:
    """Return a job's first attempt."""
    return Attempt(job_id=view.job.id, number=1, tag=facts.first_tag(view.job), created_at=now)


def next_attempt(view: JobView, world: World, now: float) -> Attempt:
    """Return the attempt after the current one, without the nodes that were blamed lately."""
    number = view.attempt.number + 1
    tag = f"{view.attempt.tag.rsplit('-', 1)[0]}-{number}"
    return Attempt(job_id=view.job.id, number=number, tag=tag, created_at=now, excluded=_excluded(view, world, now))


def _excluded(view: JobView, world: World, now: float) -> tuple[str, ...]:
    """Exclusions expire, end with a drain that is lifted, and the oldest give way where too few nodes would be left."""
    blamed = {n: i for i in sorted(view.incidents, key=lambda i: i.detected_at) for n in i.nodes}
    recent = {n for n, i in blamed.items() if now - i.detected_at < EXCLUDE_FOR_S}
    older = [n for n in view.attempt.excluded if n in recent and n not in view.attempt.barred]
    excluded = [*older, *view.attempt.barred]
    nodes = world.slurm.nodes
    if nodes is None:
        return tuple(excluded)
    wanted = _partitions(view, world, nodes)
    pool = {n.name for n in nodes.values() if _in_service(n) and (not wanted or wanted & set(n.partitions))}
    # sbatch refuses a whole request for one name that it does not know.
    excluded = [n for n in excluded if n in nodes and not (n in blamed and _lifted(view, blamed[n], nodes[n]))]
    while excluded and len(pool - set(excluded)) < view.spec.total_nodes:
        excluded.pop(0)
    return tuple(excluded)


def _partitions(view: JobView, world: World, nodes: Mapping[str, SlurmNode]) -> set[str]:
    """Return the partitions whose nodes the job may get; none known: any. One that names none gets Slurm's default."""
    job = world.slurm.job(view.attempt)
    named = view.spec.partition or (job.partition if isinstance(job, SlurmJob) else "")
    if named:
        return set(named.split(","))
    had = [set(nodes[n].partitions) for n in view.attempt.nodes if n in nodes]
    return set.intersection(*had) if had else set()


def _in_service(node: SlurmNode) -> bool:
    return not node.status.drain and node.status.base != "DOWN"


def _lifted(view: JobView, incident: Incident, node: SlurmNode) -> bool:
    """Whether a node was drained for an incident and is in service again: somebody has seen to it."""
    drain = view.intent(drain_key(node.name, incident))
    return drain is not None and drain.state == IntentState.DONE and _in_service(node)


def submit_intent(attempt: Attempt, now: float) -> Intent:
    """Return the intent that submits an attempt."""
    return Intent(
        key=facts.submit_key(attempt),
        kind=IntentKind.SUBMIT.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=attempt.job_id or None,
        args={"attempt": attempt.number, "tag": attempt.tag, "excluded": list(attempt.excluded)},
    )
