"""What is stored, as immutable records. States and kinds are plain strings here: their words belong to the daemon.

All times are Unix seconds (float). ``None`` means "not yet" or "does not apply", never "unknown".
What is typed ``Any`` holds JSON values: string keys, lists (a tuple within comes back as a list), finite numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user submitted. ``version`` guards every change; ``id`` is 0 before it is stored."""

    id: int = 0
    version: int = 0
    name: str
    user: str
    uid: int
    spec: Mapping[str, Any]
    run_dir: str
    cwd: str
    token_sha256: str
    state: str
    reason: str
    created_at: float
    changed_at: float
    attempt: int = 0
    epoch: int = 0
    cancel_requested_by: str = ""
    finished_at: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One Slurm job of a job. ``slurm_job_id`` with ``slurm_submit_time`` identify it (ids are reused)."""

    job_id: int
    number: int
    tag: str
    created_at: float
    slurm_job_id: int | None = None
    slurm_submit_time: float | None = None
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    generation: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    end_reason: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of the user's program; its ``epoch`` fences late writers."""

    job_id: int
    epoch: int
    attempt: int
    nodes: tuple[str, ...]
    started_at: float
    ended_at: float | None = None
    resume_step: int | None = None
    first_step_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    end_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure, with its verdict and the time of each stage."""

    id: int = 0
    job_id: int
    attempt: int
    epoch: int
    detected_at: float
    failure_class: str = ""
    blame: str = ""
    action: str = ""
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    confidence: str = ""
    summary: str = ""
    evidence: tuple[Mapping[str, Any], ...] = ()
    diagnosed_at: float | None = None
    fenced_at: float | None = None
    drained_at: float | None = None
    acted_at: float | None = None
    recovered_at: float | None = None
    closed_at: float | None = None
    last_step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """An act on the cluster, recorded before it is done. ``key`` is unique and can be found again in Slurm."""

    id: int = 0
    key: str
    kind: str
    state: str
    created_at: float
    job_id: int | None = None
    incident_id: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    tries: int = 0
    not_before: float = 0.0
    finished_at: float | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of history; never changed, never deleted."""

    id: int = 0
    at: float
    kind: str
    message: str
    job_id: int | None = None
    node: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What transom knows about a node beyond Slurm: its own drain as it was written, and the last check.

    A drain is transom's own only while Slurm shows exactly ``drain_reason``, set by ``drain_user`` at ``drain_time``.
    """

    name: str
    changed_at: float
    drain_reason: str = ""
    drain_user: str = ""
    drain_time: float | None = None
    incident_id: int | None = None
    checked_at: float | None = None
    checks: tuple[Mapping[str, Any], ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Something that is stopped until a person starts it again. It is set while ``since`` is not None.

    ``who`` and ``reason`` say who changed it last, and why: for one that is not set, who cleared it.
    """

    name: str
    changed_at: float
    since: float | None = None
    who: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint that a launcher reported. The store of files is the truth; this is what was told."""

    job_id: int
    step: int
    epoch: int
    stage: str
    at: float
    path: str = ""
