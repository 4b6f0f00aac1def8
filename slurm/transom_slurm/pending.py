"""Slurm's reasons for which a job waits: what each means, whether waiting ends it, and what to type. Pure.

The words are those of squeue(1), JOB REASON CODES, and of Slurm's page on resource limits.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from transom_slurm.types import JobBase, SlurmJob


class Pending(NamedTuple):
    """Why a job waits, for people.

    ``command`` shows more of it, or, of a ``hold``, lets the job go; empty: there is nothing to look at. ``ends``:
    whether the job goes on without a change to it or to a limit.
    """

    meaning: str
    command: str
    ends: bool
    hold: bool = False


def explained(job: SlurmJob) -> Pending | None:
    """Return what the reason of a waiting job means; None for one that does not wait, or a reason not known here."""
    if job.status.base is not JobBase.PENDING:
        return None
    reason = plain_reason(job.reason)
    found = next((row for pattern, row in _TABLE if pattern.match(reason)), None)
    if found is None:
        return None
    return found._replace(command=found.command.format(job=job.job_id, partition=job.partition.split(",")[0]).strip())


def waits_for_person(job: SlurmJob) -> Pending | None:
    """Return what keeps a waiting job for ever unless a person changes something; None where waiting may end it."""
    found = explained(job)
    if found is None or found.ends:
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
    return reason.replace("_", " ").lower()


_PARTITION = "scontrol show partition {partition}"
_DETAILS = "scontrol show job {job}"
_QOS = "sacctmgr show qos"
_ASSOCIATION = "sacctmgr show assoc user=$USER"


def _never(meaning: str, command: str) -> Pending:
    return Pending(meaning, command, ends=False)


def _held(meaning: str, command: str) -> Pending:
    return Pending(meaning, command, ends=False, hold=True)


def _waits(meaning: str, command: str = "") -> Pending:
    return Pending(meaning, command, ends=True)


_ROWS: tuple[tuple[str, Pending], ...] = (
    ("jobhelduser$", _held("its user or an operator holds it", "scontrol release {job}")),
    ("jobheldadmin$", _held("an administrator holds it", "scontrol release {job}, by an administrator")),
    ("jobholdmaxrequeue$", _held("its launch failed as often as MaxBatchRequeue allows", "scontrol release {job}")),
    (
        "dependencyneversatisfied$",
        _held("a job that it depends on has ended otherwise", "scontrol update jobid={job} Dependency="),
    ),
    (
        "partitionnodelimit$",
        _never("it asks for more or fewer nodes than its partition gives a job", _PARTITION),
    ),
    ("partitiontimelimit$", _never("its time limit is above its partition's", _PARTITION)),
    ("partitionconfig$", _never("it asks for nodes, time or memory that its partition does not give", _PARTITION)),
    (
        "badconstraints$",
        _never(
            "no nodes have the features, GPUs or memory it asks for; once some have, scontrol release lets it go",
            "sinfo -N -o '%N %f %G %m'",
        ),
    ),
    (
        "invalidaccount$|accountnotallowed$",
        _waits("its account is unknown, or barred from its partition: Slurm looks again each time", _ASSOCIATION),
    ),
    (
        "invalidqos$|qosnotallowed$",
        _waits("its QOS is unknown, or may not be used there: Slurm looks again each time", _QOS),
    ),
    ("reservationdeleted$", _never("the reservation that it asks for is gone", "scontrol show reservation")),
    ("maxmemperlimit$", _never("it asks for more memory than a job may have", _DETAILS)),
    ("qosmax.*per ?(job|node)", _never("it alone asks for more than its QOS allows a job", _QOS)),
    ("qosmin", _never("it asks for less than its QOS demands", _QOS)),
    ("assocmax.*per ?(job|node)", _never("it alone asks for more than its account allows a job", _ASSOCIATION)),
    ("partition(down|inactive)$", _waits("its partition starts no jobs until an administrator sets it UP", _PARTITION)),
    (
        "(qos|assoc)grp.*runminutes",
        _waits("what runs under the same limit still has too much time", "squeue -t R"),
    ),
    (
        "(qos|assoc)grp.*(minutes|walllimit)|(qos|association)timelimit$",
        _waits("the time that its account or QOS may use is used up: it waits until more is granted", _ASSOCIATION),
    ),
    (
        "(qos|assoc)grp|(qos|association)(job|resource)limit$|max.*peraccount$",
        _waits("its account or QOS has as much in use as it may; if the job alone asks for more, it never starts"),
    ),
    (
        "qosmax.*peruser|qosmaxjobs|assocmaxjobs|(qos|assoc)maxsubmit",
        _waits(
            "its user has as much in use as one may; if the job alone asks for more, it never starts", "squeue --me"
        ),
    ),
    ("qosusagethreshold$", _waits("its account has used too much of late for this QOS", _QOS)),
    (
        "reqnodenotavail|nodes required for job are down|required node not available|nodedown$",
        _waits("nodes that it needs are down, drained or reserved: it waits until they are back", "sinfo -R"),
    ),
    ("reservation$|reqresv", _waits("its reservation has not begun", "scontrol show reservation")),
    ("licenses$", _waits("the licences that it asks for are in use", "scontrol show licenses")),
    ("begintime$", _waits("its start was put off")),
    ("dependency$", _waits("a job that it depends on has not ended", _DETAILS)),
    ("priority$", _waits("jobs of higher priority go first")),
    ("resources$", _waits("it is next, and waits for nodes to become free")),
    ("prolog$", _waits("its prolog runs")),
    ("cleaning$", _waits("what is left of its last run is being ended")),
)
_TABLE = tuple((re.compile(pattern), row) for pattern, row in _ROWS)
