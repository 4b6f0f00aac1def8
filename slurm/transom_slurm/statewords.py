"""The one table of Slurm's job and node states: words, codes, flags, what counts as ended, whom a node belongs to.

Source: ``slurm.h`` and ``slurm_protocol_defs.c`` of 22.05 to 26.05. A word that is in neither table is never read as an
end, a drain or a fitness.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


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

_ENDED = frozenset(w.word for w in JOB_BASES if not w.live)
_QUIET = frozenset(w.word for w in JOB_FLAGS if not w.live)
_FOREIGN = frozenset(w.word for w in NODE_FLAGS if w.foreign)
_KNOWN = frozenset(w.word for w in NODE_FLAGS)


def job_ended(base: str, flags: Collection[str], *, may_requeue: bool = True) -> bool:
    """Whether a job in this state has ended for good.

    PREEMPTED is an end only for a job that cannot be requeued (``may_requeue=False``, as for every job that transom
    submits). An administrator may still requeue a finished job, so the answer holds for now, not for ever.
    """
    ended = base in _ENDED or (base == "PREEMPTED" and not may_requeue)
    return ended and _QUIET.issuperset(flags)


def node_reserved(base: str, flags: Collection[str]) -> bool:
    """Whether a person, a maintenance, a reboot or the power saver owns this node: transom leaves it as it is.

    True as well for a drained node, whoever drained it (ask :func:`.states.drain_is_own`), and for a flag that this
    version does not know. False for DOWN and NOT_RESPONDING: slurmctld says those, and a dead node is what a drain is
    for (:func:`.states.drain_refusal` tells a node that a person set DOWN).
    """
    return not _FOREIGN.isdisjoint(flags) or not _KNOWN.issuperset(flags) or base == "FUTURE"
