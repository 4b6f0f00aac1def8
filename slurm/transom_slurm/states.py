"""Reads job and node states as any of Slurm's tools prints them, and tells whose the drain of a node is.

A word that is not in the table (:mod:`.statewords`) is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from transom_slurm.statewords import JOB_BASES, JOB_FLAGS, NODE_BASES, NODE_FLAGS
from transom_slurm.types import JobBase, JobStatus, NodeStatus, SlurmNode

_BASE_BY_WORD = {w.word: JobBase(w.word) for w in JOB_BASES} | {w.code: JobBase(w.word) for w in JOB_BASES}
_FLAG_BY_WORD = {w.word: w.word for w in JOB_FLAGS} | {w.code: w.word for w in JOB_FLAGS if w.code}


def parse_job_status(text: str | Iterable[str]) -> JobStatus:
    """Read a job state as any Slurm tool prints it: ``CANCELLED by 0``, ``R``, ``COMPLETED+COMPLETING`` or a JSON list.

    The base is UNKNOWN where only a flag is shown (text tools print one word, flags first) and for a word never heard
    of, which is kept as a flag, so that such a job never counts as ended.
    """
    parts = text.split("+") if isinstance(text, str) else list(text)
    words = [words[0].upper() for part in parts if (words := part.split())]
    bases = [_BASE_BY_WORD[word] for word in words if word in _BASE_BY_WORD]
    flags = frozenset(_FLAG_BY_WORD.get(word, word) for word in words if word not in _BASE_BY_WORD)
    if len(bases) != 1:
        return JobStatus(JobBase.UNKNOWN, flags | {base.value for base in bases})
    return JobStatus(bases[0], flags)


def job_waiting(status: JobStatus) -> bool:
    """Whether the job waits in the queue, held or not, and has no nodes."""
    waiting = {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    if status.base is JobBase.PENDING:
        return "COMPLETING" not in status.flags
    return status.base is JobBase.UNKNOWN and bool(status.flags) and status.flags <= waiting


_SUFFIX_FLAGS = {w.suffix: w.word for w in NODE_FLAGS if w.suffix} | {"#": "POWERING_UP"}

# What sinfo prints for several flags at once, long and compact; the base is UNKNOWN where the word hides it.
_NODE_ALIASES: dict[str, tuple[str, ...]] = {
    "UNK": ("UNKNOWN",),
    "ALLOC": ("ALLOCATED",),
    "MIX": ("MIXED",),
    "FUTR": ("FUTURE",),
    "ERR": ("ERROR",),
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "DRNG": ("ALLOCATED", "DRAIN"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FAILG": ("ALLOCATED", "FAIL"),
    "MAINT": ("MAINTENANCE",),
    "REBOOT": ("REBOOT_REQUESTED",),
    "BOOT": ("REBOOT_REQUESTED",),
    "CANCEL_REBOOT": ("REBOOT_CANCEL",),
    "CANC_R": ("REBOOT_CANCEL",),
    "RESV": ("IDLE", "RESERVED"),
    "PLND": ("IDLE", "PLANNED"),
    "BLOCK": ("IDLE", "BLOCKED"),
    "INVAL": ("INVALID_REG",),
    "COMP": ("COMPLETING",),
    "EXT": ("EXTERNAL",),
    "POW_DN": ("POWER_DOWN",),
    "POW_UP": ("POWER_UP",),
    "POWRING_DN": ("POWERING_DOWN",),
    "POWERED_DN": ("POWERED_DOWN",),
    "RESM": ("RESUME",),
    "NO_RESPOND": ("NOT_RESPONDING",),
}


def parse_node_status(text: str | Iterable[str]) -> NodeStatus:
    """Read a node state: ``IDLE+DRAIN`` (scontrol), ``drng*`` or ``mix-`` (sinfo), or a JSON list.

    A word never heard of is kept as a flag; the node is then left alone.
    """
    parts = text.strip().split("+") if isinstance(text, str) else list(text)
    bases: list[str] = []
    flags: set[str] = {"COMPLETING"} if len(parts) > 1 and not parts[-1] else set()
    for part in parts:
        word = part.strip().upper()
        bare = word.rstrip("".join(_SUFFIX_FLAGS))
        flags.update(_SUFFIX_FLAGS[sign] for sign in word[len(bare) :])
        for name in _NODE_ALIASES.get(bare, (bare,)) if bare else ():
            (bases.append if name in NODE_BASES else flags.add)(name)
    if not bases or len(set(bases)) > 1:
        return NodeStatus("UNKNOWN", frozenset(flags | set(bases)))
    return NodeStatus(bases[0], frozenset(flags))


class ReasonSource(str, Enum):
    """Who wrote a node's reason."""

    NONE = "none"
    OWN = "own"
    SLURM = "slurm"
    PERSON = "person"


# Reasons that slurmctld and slurmd write by themselves (their sources, 22.05 to 26.05), lower case, as beginnings.
SLURM_REASONS: tuple[str, ...] = (
    "not responding",
    "node unexpectedly rebooted",
    "prolog error",
    "prolog failed",
    "job env setup error",
    "epilog error",
    "kill task failed",
    "batch job complete failure",
    "duplicate jobid",
    "low realmemory",
    "low tmpdisk",
    "low socket*core*thread count",
    "low cpus",
    "gres/",
    "reboot requested",
    "reboot asap",
    "reboot issued",
    "reboot complete",
    "reboot timed out",
    "resumetimeout reached",
    "resumeprogram failed",
    "suspendtimeout reached",
    "node count mismatch",
    "duplicate slurmd",
    "fatal error on node",
    "invalid number of sockets",
    "job on node caused",
)

OWN_PREFIX = "transom["


def reason_source(reason: str, *, prefix: str = OWN_PREFIX) -> ReasonSource:
    """Who wrote this reason, by its text alone; whether a drain is transom's own takes :func:`drain_is_own`."""
    text = reason.strip()
    if not text or text.lower() in ("none", "(null)"):
        return ReasonSource.NONE
    if text.startswith(prefix):
        return ReasonSource.OWN
    if any(text.lower().startswith(known) for known in SLURM_REASONS):
        return ReasonSource.SLURM
    return ReasonSource.PERSON


def drain_refusal(node: SlurmNode) -> str:
    """Why transom must not drain this node now, or ``""``: it is reserved, or a person's words stand in its reason."""
    if node.status.reserved_for_people:
        return f"{node.name} is {node.state_text}"
    if reason_source(node.reason) is ReasonSource.PERSON:
        return f"{node.name} bears a reason that {node.reason_user or 'a person'} wrote: {node.reason}"
    return ""


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """What transom read back right after it drained a node: the reason, who set it, and when (Unix seconds)."""

    reason: str
    user: str
    time: float


def drain_is_own(node: SlurmNode, record: DrainRecord | None) -> bool:
    """Whether the drain on this node is still exactly the one that was recorded: same reason, same user, same second.

    Anything else, an edit by a person or by slurmctld included, makes it somebody else's for good.
    """
    return node.status.drain and reason_is_own(node, record)


def reason_is_own(node: SlurmNode, record: DrainRecord | None) -> bool:
    """Whether the words on this node, drained or DOWN, are still exactly those that were recorded."""
    if record is None or node.reason_time is None:
        return False
    return (node.reason, node.reason_user, int(node.reason_time)) == (record.reason, record.user, int(record.time))
