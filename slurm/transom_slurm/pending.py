"""Slurm's reasons for which a job waits: what each means, what ends the wait, and what to type. Pure.

The words are those of squeue(1), JOB REASON CODES, and of Slurm's page on resource limits.
"""

from __future__ import annotations

import re
from enum import Enum
from fnmatch import translate
from typing import NamedTuple

from transom_slurm import outlook
from transom_slurm.types import JobBase, SlurmJob


class Until(Enum):
    """What ends the wait of a job."""

    TURN = "its turn"
    CHANGE = "a change of it, or of a limit"
    RELEASE = "somebody to let it go"
    HOLDER = "whoever holds it to let it go"


class Pending(NamedTuple):
    """Reasons of one meaning, in Slurm's ``words`` (``*`` stands for anything), for people.

    ``command`` shows more, or lets a held job go; empty: there is nothing to look at. ``look`` tells from the nodes
    whether, and why, a job that waits so is stuck after all.
    """

    words: tuple[str, ...]
    until: Until
    meaning: str
    command: str = ""
    look: outlook.Look | None = None

    @property
    def hold(self) -> bool:
        """Whether the job is held, whatever its partitions and QOS."""
        return self.until in (Until.RELEASE, Until.HOLDER)


def explained(job: SlurmJob) -> Pending | None:
    """Return what the reason of a waiting job means; None for one that does not wait, or a reason not known here."""
    if job.status.base is not JobBase.PENDING:
        return None
    reason = plain_reason(job.reason)
    found = next((row for pattern, row in _PATTERNS if pattern.match(reason)), None)
    if found is None:
        return None
    return found._replace(command=found.command.format(job=job.job_id, partition=job.partition.split(",")[0]))


def waits_for_person(job: SlurmJob) -> Pending | None:
    """Return what keeps a waiting job for ever unless a person changes something; None where waiting may end it."""
    found = explained(job)
    if found is None or found.until is Until.TURN:
        return None
    # Of several partitions, or QOS, the reason is that of the one that was tried last: another may start the job.
    several = "," in job.partition or "," in job.qos
    return found if found.hold or not several else None


def told(job: SlurmJob) -> str:
    """Return the reason of a job with what it means and what to look at, where that is known."""
    reason, found = job.reason or "no reason given", explained(job)
    if found is None:
        return reason
    return f"{reason} ({found.meaning}{'; see ' + found.command if found.command else ''})"


def plain_reason(reason: str) -> str:
    """Return a reason in one spelling: releases differ in capitals, blanks and underscores."""
    return re.sub("[ _]", "", reason).lower()


LAUNCH_FAILED = "launch failed requeued held"
_PARTITION = "scontrol show partition {partition}"
_DETAILS = "scontrol show job {job}"
_RELEASE = "scontrol release {job}"
# Released alone, it waits for the rest of the 120 s that slurmctld puts a requeued job off.
_RELEASE_NOW = f"{_RELEASE} && scontrol update jobid={{job}} StartTime=now"
_QOS = "sacctmgr show qos"
_ASSOCIATION = "sacctmgr show assoc user=$USER"

REASONS: tuple[Pending, ...] = (
    Pending(("JobHeldUser",), Until.HOLDER, "its user or an operator holds it", _RELEASE),
    Pending(("JobHeldAdmin",), Until.HOLDER, "an administrator holds it", f"{_RELEASE}, by an administrator"),
    Pending(
        ("JobHoldMaxRequeue",),
        Until.RELEASE,
        "its launch failed as often as MaxBatchRequeue allows; find out why first",
        _RELEASE,
    ),
    Pending(
        (LAUNCH_FAILED,),
        Until.RELEASE,
        "its launch failed (most often a prolog), so Slurm put it back and holds it",
        _RELEASE_NOW,
        outlook.launch_failed,
    ),
    Pending(
        ("user env retrieval failed requeued held",),
        Until.RELEASE,
        "the environment of its user could not be read on its node, so Slurm put it back and holds it",
        _RELEASE_NOW,
    ),
    Pending(
        ("DependencyNeverSatisfied",),
        Until.RELEASE,
        "a job that it depends on has ended otherwise, so it will never start",
        "scontrol update jobid={job} Dependency=",
    ),
    Pending(
        ("PartitionNodeLimit",),
        Until.CHANGE,
        "it asks for more or fewer nodes than its partition gives a job",
        _PARTITION,
    ),
    Pending(("PartitionTimeLimit",), Until.CHANGE, "its time limit is above its partition's", _PARTITION),
    Pending(
        ("PartitionConfig",),
        Until.CHANGE,
        "it asks for nodes, time or memory that its partition does not give",
        _PARTITION,
    ),
    Pending(
        ("BadConstraints",),
        Until.CHANGE,
        "no nodes have the features, GPUs or memory it asks for; once some have, scontrol release lets it go",
        "sinfo -N -o '%N %f %G %m'",
    ),
    Pending(
        ("InvalidAccount", "AccountNotAllowed"),
        Until.TURN,
        "its account is unknown, or barred from its partition: Slurm looks again each time",
        _ASSOCIATION,
    ),
    Pending(
        ("InvalidQOS", "QOSNotAllowed"),
        Until.TURN,
        "its QOS is unknown, or may not be used there: Slurm looks again each time",
        _QOS,
    ),
    Pending(
        ("ReservationDeleted",), Until.CHANGE, "the reservation that it asks for is gone", "scontrol show reservation"
    ),
    Pending(("MaxMemPerLimit",), Until.CHANGE, "it asks for more memory than a job may have", _DETAILS),
    Pending(
        ("QOSMax*PerJob*", "QOSMax*PerNode*"), Until.CHANGE, "it alone asks for more than its QOS allows a job", _QOS
    ),
    Pending(("QOSMin*",), Until.CHANGE, "it asks for less than its QOS demands", _QOS),
    Pending(
        ("AssocMax*PerJob*", "AssocMax*PerNode*"),
        Until.CHANGE,
        "it alone asks for more than its account allows a job",
        _ASSOCIATION,
    ),
    Pending(
        ("PartitionDown", "PartitionInactive"),
        Until.TURN,
        "its partition starts no jobs until an administrator sets it UP",
        _PARTITION,
    ),
    Pending(
        ("QOSGrp*RunMinutes*", "AssocGrp*RunMinutes*"),
        Until.TURN,
        "what runs under the same limit still has too much time",
        "squeue -t R",
    ),
    Pending(
        (
            *("QOSGrp*Minutes*", "AssocGrp*Minutes*", "QOSGrp*WallLimit*", "AssocGrp*WallLimit*"),
            *("QOSTimeLimit", "AssociationTimeLimit"),
        ),
        Until.TURN,
        "the time that its account or QOS may use is used up: it waits until more is granted",
        _ASSOCIATION,
    ),
    Pending(
        (
            *("QOSGrp*", "AssocGrp*", "QOSJobLimit", "QOSResourceLimit"),
            *("AssociationJobLimit", "AssociationResourceLimit", "Max*PerAccount"),
        ),
        Until.TURN,
        "its account or QOS has as much in use as it may; if the job alone asks for more, it never starts",
    ),
    Pending(
        ("QOSMax*PerUser*", "QOSMaxJobs*", "AssocMaxJobs*", "QOSMaxSubmit*", "AssocMaxSubmit*"),
        Until.TURN,
        "its user has as much in use as one may; if the job alone asks for more, it never starts",
        "squeue --me",
    ),
    Pending(("QOSUsageThreshold",), Until.TURN, "its account has used too much of late for this QOS", _QOS),
    Pending(
        ("ReqNodeNotAvail*", "Nodes required for job are DOWN*", "Required node not available*", "NodeDown"),
        Until.TURN,
        "nodes that it needs are down, drained or reserved: it waits until they are back",
        "sinfo -R",
        outlook.nodes_away,
    ),
    Pending(("Reservation", "ReqResv*"), Until.TURN, "its reservation has not begun", "scontrol show reservation"),
    Pending(("Licenses",), Until.TURN, "the licences that it asks for are in use", "scontrol show licenses"),
    Pending(("BeginTime",), Until.TURN, "its start was put off", look=outlook.put_off),
    Pending(("Dependency",), Until.TURN, "a job that it depends on has not ended", _DETAILS),
    Pending(("Priority",), Until.TURN, "jobs of higher priority go first"),
    Pending(
        ("Resources",), Until.TURN, "it is next, and waits for nodes to become free", look=outlook.none_becomes_free
    ),
    Pending(("Prolog",), Until.TURN, "its prolog runs"),
    Pending(("Cleaning",), Until.TURN, "what is left of its last run is being ended"),
)
"""The first that fits counts."""
_PATTERNS = tuple((re.compile("|".join(translate(plain_reason(word)) for word in row.words)), row) for row in REASONS)
