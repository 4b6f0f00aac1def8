"""What Slurm says, as immutable values. Nothing here talks to Slurm.

Three answers are kept apart everywhere: a value, *absent* (Slurm answered and does not know it), and *unknown* (Slurm
did not answer: :class:`transom_slurm.errors.SlurmUnavailable` is raised, and no value exists).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from transom_slurm.statewords import job_ended, node_reserved


class JobBase(str, Enum):
    """A job's base state (slurm.h ``enum job_states``), plus ``UNKNOWN`` for a word this version has never heard of."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's base state and flags. ``base`` is UNKNOWN where a text form shows only a flag (``COMPLETING``)."""

    base: JobBase
    flags: frozenset[str] = frozenset()

    @property
    def terminal(self) -> bool:
        """Whether the job has ended for good, by the one table of states (:mod:`.statewords`)."""
        return job_ended(self.base.value, self.flags)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a batch script or step ended."""

    code: int
    signal: int = 0


UNLIMITED_S = 364 * 86400
"""Slurm ends a job without a time limit after a year, it says."""
NOTICE_SLACK_S = 60.0
"""By so much a job's end must come before its time limit to be no matter of rounding."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One Slurm job, as ``squeue``, ``scontrol`` or ``sacct`` tell it. Times are Unix seconds, None where not set."""

    job_id: int
    name: str
    user: str
    status: JobStatus
    state_text: str
    reason: str = ""
    comment: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    ends_by: float | None = None
    """When Slurm will end it at the latest, as long as it runs."""
    time_limit_s: int | None = None
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    exit: ExitStatus | None = None
    derived_exit: ExitStatus | None = None
    priority: int | None = None
    restarts: int = 0
    work_dir: str = ""
    may_requeue: bool = True

    @property
    def ended(self) -> bool:
        """Whether it has ended for good; unlike ``status.terminal`` it knows that a preempted job may not return."""
        return job_ended(self.status.base.value, self.status.flags, may_requeue=self.may_requeue)

    @property
    def is_given_notice(self) -> bool:
        """Whether Slurm will end it before its time limit: it is preempted, and has ``GraceTime`` left.

        slurmctld has set its end to now plus the grace then (``_job_check_grace_internal``), and told its steps.
        """
        if not self.ends_by or not self.start_time:
            return False
        return self.ends_by + NOTICE_SLACK_S < self.start_time + (self.time_limit_s or UNLIMITED_S)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's base state (IDLE, ALLOCATED, MIXED, DOWN, UNKNOWN, ERROR, FUTURE) and flags (DRAIN, ...)."""

    base: str
    flags: frozenset[str] = frozenset()

    @property
    def drain(self) -> bool:
        """Whether the DRAIN flag is set."""
        return "DRAIN" in self.flags

    @property
    def drained(self) -> bool:
        """Whether it is drained *and* free of jobs."""
        return self.drain and self.base in ("IDLE", "DOWN") and "COMPLETING" not in self.flags

    @property
    def responding(self) -> bool:
        """Whether slurmctld hears its slurmd."""
        return self.base != "DOWN" and "NOT_RESPONDING" not in self.flags

    @property
    def reserved_for_people(self) -> bool:
        """Whether a person or a maintenance owns it, so that transom leaves it alone (:mod:`.statewords`)."""
        return node_reserved(self.base, self.flags)


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node. ``reason_user`` and ``reason_time`` (Unix seconds) say who set the reason, and when."""

    name: str
    status: NodeStatus
    state_text: str
    reason: str = ""
    reason_user: str = ""
    reason_time: float | None = None
    address: str = ""
    partitions: tuple[str, ...] = ()
    gres: str = ""
    boot_time: float | None = None
    cpus: int = 0
    comment: str = ""


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """One running step of a job; ``step_id`` is ``<job>.<step>`` as ``scancel`` takes it."""

    step_id: str
    name: str
    state_text: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """Who a command is run as. ``groups`` are all group ids, the primary one included."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """One ``sbatch`` call: the script goes in on standard input, run as ``user`` in ``cwd``.

    ``name`` and ``comment`` carry the tag by which the job is found again (``transom:<job>:<attempt>``).
    """

    script: str
    options: tuple[str, ...]
    name: str
    comment: str
    cwd: str
    user: UserIdentity | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reservation:
    """One reservation."""

    name: str
    nodes: tuple[str, ...]
    flags: frozenset[str]
    start: float | None = None
    end: float | None = None
