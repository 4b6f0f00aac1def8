"""The one table of Slurm's job and node states: words, codes, flags, what counts as ended, whom a node belongs to.

Source: ``slurm.h`` and ``slurm_protocol_defs.c`` of 22.05 to 26.05. A word that is in neither table is kept as it is
and never read as an end, a drain or a fitness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from transom_slurm.types import JobBase, JobStatus, NodeStatus, SlurmNode


@dataclass(frozen=True, slots=True)
class JobWord:
    """One word of a job's state. ``code`` is squeue's short form, ``live`` says that the job has not ended for good."""

    word: str
    code: str
    live: bool
    meaning: str


JOB_BASES: tuple[JobWord, ...] = (
    JobWord("PENDING", "PD", True, "waits for nodes"),
    JobWord("RUNNING", "R", True, "has its nodes"),
    JobWord("SUSPENDED", "S", True, "stopped by an administrator or gang scheduling"),
    JobWord("COMPLETED", "CD", False, "exit code 0"),
    JobWord("CANCELLED", "CA", False, "ended by a person, by its owner or by slurmctld"),
    JobWord("FAILED", "F", False, "exit code other than 0"),
    JobWord("TIMEOUT", "TO", False, "time limit reached"),
    JobWord("NODE_FAIL", "NF", False, "a node was lost"),
    JobWord("PREEMPTED", "PR", True, "made way for another job; ended unless it may be requeued"),
    JobWord("BOOT_FAIL", "BF", False, "a node did not boot"),
    JobWord("DEADLINE", "DL", False, "could not end before its deadline"),
    JobWord("OUT_OF_MEMORY", "OOM", False, "killed for memory"),
)

JOB_FLAGS: tuple[JobWord, ...] = (
    JobWord("COMPLETING", "CG", True, "processes or epilogs are still ending"),
    JobWord("STAGE_OUT", "SO", True, "burst buffer is being copied out"),
    JobWord("CONFIGURING", "CF", True, "nodes boot or run their prolog"),
    JobWord("EXPEDITING", "", True, "being requeued with its nodes kept (25.11 and later)"),
    JobWord("RESIZING", "RS", True, "its set of nodes changes"),
    JobWord("REQUEUED", "RQ", True, "being put back into the queue"),
    JobWord("REQUEUE_FED", "RF", True, "being put back into the queue by the federation"),
    JobWord("REQUEUE_HOLD", "RH", True, "put back into the queue, held"),
    JobWord("SPECIAL_EXIT", "SE", True, "put back into the queue, held, for its exit code"),
    JobWord("STOPPED", "ST", True, "got SIGSTOP, keeps its nodes"),
    JobWord("REVOKED", "RV", True, "runs on another cluster of the federation"),
    JobWord("RESV_DEL_HOLD", "RD", True, "held because its reservation was deleted"),
    JobWord("SIGNALING", "SI", True, "a signal is on its way to it"),
    JobWord("POWER_UP_NODE", "", True, "its nodes are being powered up"),
    JobWord("LAUNCH_FAILED", "", False, "its launch failed"),
    JobWord("GETENV_FAILED", "", False, "the user's environment could not be read"),
    JobWord("RECONFIG_FAIL", "", False, "node configuration failed"),
    JobWord("UPDATE_DB", "", False, "bookkeeping of slurmctld (JSON up to 24.05)"),
)

_BASE_BY_WORD = {w.word: JobBase(w.word) for w in JOB_BASES} | {w.code: JobBase(w.word) for w in JOB_BASES}
_FLAG_BY_WORD = {w.word: w.word for w in JOB_FLAGS} | {w.code: w.word for w in JOB_FLAGS if w.code}
_ENDED_BASES = frozenset(JobBase(w.word) for w in JOB_BASES if not w.live)
_QUIET_FLAGS = frozenset(w.word for w in JOB_FLAGS if not w.live)


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


def job_terminal(status: JobStatus, *, may_requeue: bool = True) -> bool:
    """Whether a job in this state has ended for good.

    PREEMPTED is an end only for a job that cannot be requeued (``may_requeue=False``, as for every job that transom
    submits). An administrator may still requeue a finished job, so the answer holds for now, not for ever.
    """
    ended = status.base in _ENDED_BASES or (status.base is JobBase.PREEMPTED and not may_requeue)
    return ended and status.flags <= _QUIET_FLAGS


def job_waiting(status: JobStatus) -> bool:
    """Whether the job waits in the queue, held or not, and has no nodes."""
    waiting = {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    if status.base is JobBase.PENDING:
        return "COMPLETING" not in status.flags
    return status.base is JobBase.UNKNOWN and bool(status.flags) and status.flags <= waiting


@dataclass(frozen=True, slots=True)
class NodeWord:
    """One flag of a node's state. ``foreign`` says that a person or a maintenance owns a node that bears it."""

    word: str
    suffix: str
    foreign: bool
    meaning: str


NODE_BASES: dict[str, str] = {
    "UNKNOWN": "slurmctld has not heard of it yet, or the text shows only a flag",
    "DOWN": "cannot be used",
    "IDLE": "no job",
    "ALLOCATED": "all of it is given to jobs",
    "MIXED": "a part of it is given to jobs",
    "ERROR": "an error that slurmctld does not name",
    "FUTURE": "defined for later use",
}

NODE_FLAGS: tuple[NodeWord, ...] = (
    NodeWord("DRAIN", "", True, "takes no new job"),
    NodeWord("COMPLETING", "+", False, "a job's processes or epilog are still ending"),
    NodeWord("NOT_RESPONDING", "*", False, "slurmctld does not hear its slurmd"),
    NodeWord("MAINTENANCE", "$", True, "in a maintenance reservation"),
    NodeWord("RESERVED", "", True, "in a reservation"),
    NodeWord("FAIL", "", True, "marked as failing by a person"),
    NodeWord("REBOOT_REQUESTED", "@", True, "will reboot when free"),
    NodeWord("REBOOT_ISSUED", "^", True, "reboots"),
    NodeWord("REBOOT_CANCEL", "", True, "a reboot is being called off"),
    NodeWord("PLANNED", "-", True, "kept for a job that the backfill scheduler will start"),
    NodeWord("BLOCKED", "", True, "kept free by an exclusive topology job"),
    NodeWord("INVALID_REG", "", True, "registered with less than configured"),
    NodeWord("POWER_DOWN", "!", True, "will be powered down"),
    NodeWord("POWER_DOWN_ASAP", "", True, "will be powered down when its jobs end"),
    NodeWord("POWER_DOWN_FORCE", "", True, "is powered down whatever runs on it"),
    NodeWord("POWER_DRAIN", "", True, "drains in order to be powered down"),
    NodeWord("POWER_UP", "#", True, "will be powered up"),
    NodeWord("POWERING_DOWN", "%", True, "is being powered down"),
    NodeWord("POWERING_UP", "#", True, "is being powered up"),
    NodeWord("POWERED_DOWN", "~", True, "is off"),
    NodeWord("CLOUD", "", False, "made on demand"),
    NodeWord("EXTERNAL", "", True, "managed outside Slurm"),
    NodeWord("DYNAMIC_FUTURE", "", False, "was defined for later use and came alive"),
    NodeWord("DYNAMIC_NORM", "", False, "came by itself"),
    NodeWord("UNDRAIN", "", True, "a drain is being lifted"),
    NodeWord("RESUME", "", True, "is being brought back"),
)

_NODE_FLAG_WORDS = frozenset(w.word for w in NODE_FLAGS)
_FOREIGN_FLAGS = frozenset(w.word for w in NODE_FLAGS if w.foreign)
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

    A word never heard of is kept as a flag; :func:`node_reserved` then leaves the node alone.
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


def node_reserved(status: NodeStatus) -> bool:
    """Whether a person, a maintenance, a reboot or the power saver owns this node: transom leaves it as it is.

    True as well for a drained node, whoever drained it (ask :func:`drain_is_own`), and for a flag that this version
    does not know. False for DOWN and NOT_RESPONDING: slurmctld says those, and a dead node is what a drain is for
    (:func:`drain_refusal` tells a node that a person set DOWN).
    """
    return bool(status.flags & _FOREIGN_FLAGS) or not status.flags <= _NODE_FLAG_WORDS or status.base == "FUTURE"


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
    if node_reserved(node.status):
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
