"""Every enumeration of transom, in one place; the tables in ``docs/`` are generated from this module.

A member's docstring-like second value is the sentence shown to people: ``JobState.HELD.meaning``.
"""

from __future__ import annotations

from enum import Enum, IntEnum


class Word(str, Enum):
    """A word that is stored, sent and shown as its value, with its meaning beside it."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Word:
        """Make a member whose string value is ``value``."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    def __str__(self) -> str:
        return str(self.value)


class JobState(Word):
    """Where a job stands. The lawful moves are in :mod:`transomd.tol.transitions`."""

    SUBMITTED = "submitted", "recorded by transomd, not yet accepted by Slurm"
    QUEUED = "queued", "accepted by Slurm, waiting for an allocation or for its launcher to report"
    CHECKING = "checking", "has its nodes; the gate is closed until they are found fit"
    RUNNING = "running", "the program runs"
    RECOVERING = "recovering", "a failure was seen; diagnosing it, or ending what is left before a restart"
    HELD = "held", "transom waits for a person, and the reason says for what"
    COMPLETED = "completed", "the program ended with exit code 0 on every rank"
    FAILED = "failed", "transom gave up, and the reason says why"
    CANCELLED = "cancelled", "a person cancelled it"

    @property
    def final(self) -> bool:
        """Whether no move leads out of this state."""
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class FailureClass(Word):
    """What kind of thing failed."""

    GPU_HARDWARE = "gpu-hardware", "a GPU is gone, dead or must be reset"
    GPU_MEMORY = "gpu-memory", "uncorrectable GPU memory errors or failed row remapping"
    NVLINK = "nvlink", "an NVLink or NVSwitch error"
    NETWORK = "network", "a NIC, link, switch or name service"
    STORAGE = "storage", "a file system is stale, slow, full or gone"
    HOST_MEMORY = "host-memory", "a process was killed for memory, or RAM is faulty"
    HOST = "host", "a node died, hung, rebooted or lost its slurmd"
    NCCL_HANG = "nccl-hang", "ranks wait for one another, or have given up waiting for one that stands still"
    STRAGGLER = "straggler", "one node is slower than its peers"
    NUMERIC = "numeric", "NaN, infinity or a loss spike"
    USER_CODE = "user-code", "an exception in the program"
    CONFIG = "config", "the job or its environment is set up wrongly"
    PREEMPTION = "preemption", "Slurm took the nodes for another job"
    TIME_LIMIT = "time-limit", "the time limit was reached"
    CANCELLED = "cancelled", "a person cancelled it"
    LAUNCHER = "launcher", "transom's own launcher or agent failed"
    UNKNOWN = "unknown", "the evidence does not say"


class Blame(Word):
    """Whose fault a failure is."""

    NODE = "node", "the nodes named"
    PROGRAM = "program", "the user's program or its settings"
    STORAGE = "storage", "a shared file system"
    NETWORK = "network", "a switch or link that is no single node's"
    EXTERNAL = "external", "preemption, a time limit or a person"
    NONE = "none", "nobody: it was not a failure"
    UNKNOWN = "unknown", "the evidence does not say"


class Action(Word):
    """What is done about a failure."""

    RESTART = "restart", "start again on the same nodes"
    EXCLUDE = "exclude", "start again without the nodes named"
    DRAIN = "drain", "start again without the nodes named, and drain them"
    ROLLBACK = "rollback", "start again from an earlier checkpoint"
    WAIT = "wait", "wait for a store or controller to come back"
    STOP = "stop", "hand the job back to its user"
    NONE = "none", "nothing"


class Role(Word):
    """What a piece of evidence is in a failure."""

    ROOT = "root", "names the cause"
    VICTIM = "victim", "printed by a rank that suffers from another's failure; never blamed"
    CONTEXT = "context", "helps to understand, decides nothing"


class Confidence(Word):
    """How sure a verdict is."""

    HIGH = "high", "kernel, Slurm or probe evidence, or agreement of independent sources"
    MEDIUM = "medium", "one clear root line"
    LOW = "low", "a guess that only a restart in place may rest on"


class Outcome(Word):
    """What a health check found. *Unknown* is neither of the others, and nothing is drained for it."""

    FIT = "fit", "within its limit"
    UNFIT = "unfit", "outside its limit, with evidence"
    UNKNOWN = "unknown", "could not be found out"


class Level(Word):
    """What ``transom doctor`` and ``transomd --check`` say of one thing they looked at."""

    OK = "ok", "as it should be"
    NOTE = "note", "worth knowing; nothing need be done"
    PROBLEM = "problem", "something does not work, or will not when it is needed"
    UNKNOWN = "unknown", "could not be found out, which is neither good nor bad"


class CheckMode(Word):
    """What a site lets an unfit result of one check do. Whatever it says, no job is started on an unfit node."""

    OFF = "off", "the check is not run"
    OBSERVE = "observe", "recorded and shown (the default)"
    COMMENT = "comment", "also written to the node's Slurm comment"
    DRAIN = "drain", "the node is drained"


class IntentKind(Word):
    """An act on the cluster, recorded before it is done."""

    SUBMIT = "submit", "run sbatch for one attempt"
    CANCEL = "cancel", "scancel one attempt"
    DRAIN = "drain", "drain one node"
    UNDRAIN = "undrain", "resume one node that transom drained"
    COMMENT = "comment", "write what is wrong with a node into its Slurm comment, or take it out again"
    LAUNCHER = "launcher", "start a launcher in an allocation that lost its own"
    FENCE = "fence", "end what is left of a job's processes on nodes that may still run them"


class IntentState(Word):
    """How far an intent has come."""

    PENDING = "pending", "recorded, perhaps begun"
    DONE = "done", "carried out; the outcome is recorded"
    FAILED = "failed", "could not be carried out; the outcome says why"
    DROPPED = "dropped", "no longer wanted"


class LauncherPhase(Word):
    """What a launcher says it is doing."""

    GATE = "gate", "has the allocation and its agents, waits to be told to start"
    RUNNING = "running", "a launch is under way"
    FAILED = "failed", "the last launch ended badly and is fenced; waits to be told what to do"
    DONE = "done", "the program ended with exit code 0"
    STOPPED = "stopped", "ended on request or by a signal"


class Stage(Word):
    """How far a checkpoint has come. The meaning is what ``transom status`` shows."""

    MEMORY = "memory", "in memory"
    REPLICA = "replica", "on another node"
    STORAGE = "storage", "on storage"


class ExitCode(IntEnum):
    """Exit codes of ``transom``, ``transomd`` and the launcher. The table in docs/operate.md is generated from this."""

    OK = 0
    ERROR = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    NOT_FOUND = 5
    UNHEALTHY = 6
    UNKNOWN = 7
    JOB_FAILED = 8
    GATE_REFUSED = 93
    LAUNCH_FAILED = 94
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """The sentence for people."""
        return _EXIT_MEANINGS[self]


_EXIT_MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.ERROR: "an operation failed; the message names it and the next step",
    ExitCode.USAGE: "bad arguments, or a bad job or settings file; nothing was done",
    ExitCode.UNREACHABLE: "transomd or Slurm cannot be reached",
    ExitCode.REFUSED: "not allowed",
    ExitCode.NOT_FOUND: "no such job, node or file",
    ExitCode.UNHEALTHY: "a check found something unfit, or a checkpoint is damaged",
    ExitCode.UNKNOWN: "could not be found out",
    ExitCode.JOB_FAILED: "the job that was waited for ended failed or cancelled",
    ExitCode.GATE_REFUSED: "launcher only: this Slurm job is not the recorded attempt, so it did not start",
    ExitCode.LAUNCH_FAILED: "launcher only: the program failed and transom ended the allocation",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}
