"""Whether a wait that most often passes will pass this time: what the job itself and the nodes say of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from transom_slurm.nodesets import fold
from transom_slurm.states import drain_refusal
from transom_slurm.types import SlurmJob, SlurmNode

_OUT_OF_SERVICE = {"DRAIN", "FAIL", "NOT_RESPONDING", "MAINTENANCE", "REBOOT_REQUESTED", "REBOOT_ISSUED", "INVALID_REG"}
_LAUNCH_ERRORS = ("prolog error", "job env setup error", "batch job complete failure")


class Seen(NamedTuple):
    """What keeps a job from going on by itself, and what to type; an empty ``command``: what its reason names."""

    text: str
    command: str = ""


Look = Callable[[SlurmJob, Mapping[str, SlurmNode], float], Seen | None]
"""Looks at a waiting job and all nodes, at a time; None: nothing is to be seen that keeps it for ever."""


def launch_failed(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Seen | None:
    """Return which nodes say that a launch failed there."""
    bad = [node.name for node in nodes.values() if any(word in node.reason.lower() for word in _LAUNCH_ERRORS)]
    return Seen(f"nodes that say so: {fold(bad)}") if bad else None


def put_off(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Seen | None:
    """Return how long a job is put off that was requeued; a start that its user chose keeps nobody."""
    if not job.restarts:
        return None
    left = f" for another {job.start_time - now:.0f} s" if job.start_time and job.start_time > now else ""
    return Seen(
        f"it was requeued, and slurmctld puts that off{left}", f"scontrol update jobid={job.job_id} StartTime=now"
    )


def none_becomes_free(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Seen | None:
    """Return which nodes are missing where nothing in the partition is busy: then none will become free."""
    usable = [node for node in _partition(job, nodes) if not _away(node)]
    if any(node.status.base != "IDLE" or "COMPLETING" in node.status.flags for node in usable):
        return None
    return _missing(job, nodes, "that is more than is left of its partition; out of service")


def nodes_away(job: SlurmJob, nodes: Mapping[str, SlurmNode], now: float) -> Seen | None:
    """Return which nodes of the partition are out of service."""
    return _missing(job, nodes, "out of service")


def _missing(job: SlurmJob, nodes: Mapping[str, SlurmNode], what: str) -> Seen | None:
    by_reason: dict[str, list[str]] = {}
    for node in filter(_away, _partition(job, nodes)):
        by_reason.setdefault(node.reason or drain_refusal(node) or node.state_text, []).append(node.name)
    if not by_reason:
        return None
    told = ", ".join(f"{fold(names)} ({reason})" for reason, names in by_reason.items())
    away = (name for names in by_reason.values() for name in names)
    return Seen(f"{what}: {told}", f"scontrol show node {fold(away)}")


def _partition(job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> list[SlurmNode]:
    wanted = set(job.partition.split(","))
    return [node for node in nodes.values() if wanted & set(node.partitions)]


def _away(node: SlurmNode) -> bool:
    return node.status.base == "DOWN" or bool(node.status.flags & _OUT_OF_SERVICE)
