"""What travels between the daemon, its launchers and its users, as JSON. Standard library only: the CLI and the
launcher import this.

User side (Unix socket, or TCP), all JSON, errors as ``{"error": {"message", "hint", "code", "faults"}}``:

=======  ==========================  ===========================================================================
method   path                        body → answer
=======  ==========================  ===========================================================================
GET      /v1/daemon                  → {version, started_at, mode, owner, database, paused, tripped, switches: [{name,
                                     since, who, reason}], withheld: [{job, would}], slurm: {ok, at, error}}
GET      /v1/jobs                    ?all=1&user=U → {jobs: [job]}
POST     /v1/jobs                    {spec, run_dir, cwd, token_sha256, dry_run} → {job} or {plan}
GET      /v1/jobs/ID                 → {job, attempts, launches, incidents, intents, checkpoints}
POST     /v1/jobs/ID/cancel          {} → {job}
GET      /v1/incidents/ID            → {job, incident, launches, nodes: [{node, drained, why}], events}
GET      /v1/history                 ?node=N → {incidents, drains, lemons} (this and the five below: administrators)
GET      /v1/doctor                  → {findings: [{section, level, text, next}]}
GET      /metrics                    → Prometheus' text format
POST     /v1/pause                   {reason} → {paused, ..., under_way: [key]}
POST     /v1/resume-actions          {} → {were: [switch], ...}
POST     /v1/nodes/check             {nodes, checks} → {results: [{node, at, reached, error, outcome, checks}]}
GET      /v1/events                  ?job=ID&node=N&after=K&limit=L&wait=S → {events, last}
GET      /v1/nodes                   → {nodes: [node], slurm: {ok, at, error}}; not ok: as it was at ``at``
POST     /v1/nodes/drain             {nodes, reason, dry_run} → {results: [{node, done, message, command, missing}]}
POST     /v1/nodes/undrain           {nodes, dry_run} → the same
POST     /v1/launcher                launcher report (Bearer token of the job) → directive
POST     /v1/hooks                   hook's report, sealed (:mod:`transomd.api.hooks`) → {said, refuse}, sealed
=======  ==========================  ===========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from transomd.api import checked
from transomd.tee.wire import read_evidence
from transomd.words import LauncherPhase, Stage

T = TypeVar("T")

MAX_LAUNCHES = 64
"""Launches in one report; a launcher sends its newest twenty."""
ERROR_KEYS = frozenset({"message", "hint", "code", "faults"})
"""What an error of transomd's holds; an ``error`` of anybody else's (a proxy, a cloud) does not hold just these."""
MAX_CHECKPOINTS = 64
"""Checkpoints in one report: the newest ones."""
MAX_EVIDENCE = 500
DETECTORS = frozenset({"exit", "heartbeat", "stall", "asked", "start", "takeover"})
"""What a launcher may notice a failure by."""
MEASURES = ("write_s", "step_s", "mttf_s")
"""What a chosen interval of a stage follows from: what a write and a step take, and the MTTF of the job."""
_PHASES = frozenset(phase.value for phase in LauncherPhase)
_STAGES = frozenset(stage.value for stage in Stage)


def _read(cls: type[T], data: Mapping[str, Any]) -> T:
    """Build ``cls`` from a JSON object; keys it does not know are dropped, so that either side may be newer."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in data.items() if key in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchReport:
    """One launch as its launcher saw it. Times are Unix seconds; steps are the program's own numbers.

    ``new_step_at`` is when the step first went past ``past_step``, the furthest that any earlier launch had come.
    """

    epoch: int
    nodes: list[str]
    started_at: float
    ended_at: float | None = None
    resume_step: int | None = None
    first_step: int | None = None
    first_step_at: float | None = None
    new_step_at: float | None = None
    last_step: int | None = None
    last_step_at: float | None = None
    end_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """How a launch failed: when it was noticed, by what, and the evidence (:class:`transomd.tee.types.Evidence`).

    ``detected_by`` is ``exit``, ``heartbeat``, ``stall``, ``asked`` (the daemon said so), ``start`` or ``takeover``.
    ``fenced_at`` is when no process of the launch was left on any node that answers; ``unfenced`` are the others.
    """

    epoch: int
    detected_at: float
    detected_by: str
    evidence: list[dict[str, Any]] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    fenced_at: float | None = None
    unfenced: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """What a launcher tells the daemon, on change and every ``report_s`` seconds.

    ``phase`` is a :class:`transomd.words.LauncherPhase`. ``nodes`` are the allocation's nodes with a living agent;
    ``unfit`` are those of them whose local check failed, with the reason. ``launches`` holds every launch that the
    launcher started, so that those made on a grant while the daemon was away become known; ``past_failures`` are
    those of launches that another one has followed. ``checkpoints`` are ``[step, epoch]`` of the whole ones, newest
    first; ``stages`` says for each stage of the checkpoint engine the newest step that every rank has there.
    """

    job_id: int
    attempt: int
    slurm_job_id: int
    generation: int
    host: str
    phase: str
    at: float
    nodes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    launches: list[LaunchReport] = field(default_factory=list)
    failure: FailureReport | None = None
    past_failures: list[FailureReport] = field(default_factory=list)
    checkpoint_step: int | None = None
    checkpoint_epoch: int | None = None
    checkpoint_at: float | None = None
    checkpoints: list[list[int]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    checkpoint_trouble: str = ""
    copies: dict[str, str] = field(default_factory=dict)
    copies_trouble: str = ""
    checkpoints_skipped: int = 0
    exit_code: int | None = None
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that is sent."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LauncherReport:
        """Read a report, which may come from anybody. Raises ValueError when it is none, or out of all proportion."""
        failure = data.get("failure")
        return cls(
            job_id=checked.integer(data, "job_id"),
            attempt=checked.integer(data, "attempt", checked.MAX_COUNT),
            slurm_job_id=checked.integer(data, "slurm_job_id"),
            generation=checked.integer(data, "generation", checked.MAX_COUNT),
            host=checked.name(data.get("host"), "host"),
            phase=checked.word(data, "phase", _PHASES),
            at=checked.seconds(data, "at"),
            nodes=checked.names(data, "nodes"),
            lost=checked.names(data, "lost"),
            unfit=checked.reasons(data, "unfit"),
            launches=[
                _read_launch(checked.mapping(x, "launches")) for x in checked.items(data, "launches", MAX_LAUNCHES)
            ],
            failure=None if failure is None else _read_failure(checked.mapping(failure, "failure")),
            past_failures=[
                _read_failure(checked.mapping(x, "past_failures"))
                for x in checked.items(data, "past_failures", MAX_LAUNCHES)
            ],
            checkpoint_step=checked.maybe_integer(data, "checkpoint_step"),
            checkpoint_epoch=checked.maybe_integer(data, "checkpoint_epoch", checked.MAX_COUNT),
            checkpoint_at=checked.maybe_seconds(data, "checkpoint_at"),
            checkpoints=[_read_checkpoint(x) for x in checked.items(data, "checkpoints", MAX_CHECKPOINTS)],
            stages=[_read_stage(checked.mapping(x, "stages")) for x in checked.items(data, "stages", len(Stage))],
            checkpoint_trouble=checked.line(data, "checkpoint_trouble"),
            copies={node: checked.name(held, "copies") for node, held in checked.reasons(data, "copies").items()},
            copies_trouble=checked.line(data, "copies_trouble"),
            checkpoints_skipped=checked.maybe_integer(data, "checkpoints_skipped") or 0,
            exit_code=checked.maybe_integer(data, "exit_code", checked.MAX_COUNT),
            message=checked.line(data, "message"),
        )


def _read_checkpoint(pair: object) -> list[int]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError("checkpoints: expected pairs of step and epoch")
    told = dict(zip(("step", "epoch"), pair, strict=True))
    return [checked.integer(told, "step"), checked.integer(told, "epoch", checked.MAX_COUNT)]


def _read_stage(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "stage": checked.word(data, "stage", _STAGES),
        "step": checked.integer(data, "step"),
        "epoch": checked.integer(data, "epoch", checked.MAX_COUNT),
        "at": checked.seconds(data, "at"),
        **({"every": checked.integer(data, "every")} if data.get("every") else {}),
        **{name: checked.seconds(data, name) for name in MEASURES if name in data},
    }


def _read_launch(data: Mapping[str, Any]) -> LaunchReport:
    return LaunchReport(
        epoch=checked.integer(data, "epoch", checked.MAX_COUNT),
        nodes=checked.names(data, "nodes"),
        started_at=checked.seconds(data, "started_at"),
        ended_at=checked.maybe_seconds(data, "ended_at"),
        resume_step=checked.maybe_integer(data, "resume_step"),
        first_step=checked.maybe_integer(data, "first_step"),
        first_step_at=checked.maybe_seconds(data, "first_step_at"),
        new_step_at=checked.maybe_seconds(data, "new_step_at"),
        last_step=checked.maybe_integer(data, "last_step"),
        last_step_at=checked.maybe_seconds(data, "last_step_at"),
        end_reason=checked.line(data, "end_reason"),
    )


def _read_failure(data: Mapping[str, Any]) -> FailureReport:
    evidence = checked.items(data, "evidence", MAX_EVIDENCE)
    return FailureReport(
        epoch=checked.integer(data, "epoch", checked.MAX_COUNT),
        detected_at=checked.seconds(data, "detected_at"),
        detected_by=checked.word(data, "detected_by", DETECTORS),
        evidence=[read_evidence(checked.mapping(item, "evidence")).to_json() for item in evidence],
        lost_nodes=checked.names(data, "lost_nodes"),
        fenced_at=checked.maybe_seconds(data, "fenced_at"),
        unfenced=checked.names(data, "unfenced"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Start the program: once per epoch, on exactly these nodes. ``past_step`` is the furthest step ever reached."""

    epoch: int
    nodes: list[str]
    resume_step: int | None = None
    past_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the launcher may do while the daemon does not answer: so many restarts in place, for so many seconds.

    Counted from when it was received, by a clock that nobody sets: the daemon's and the node's time of day may differ.
    """

    restarts: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The daemon's answer to a report: what is wanted now. Level, not edge: it is repeated until it is so.

    ``gate``: ``hold`` (wait), ``open`` (``launch`` says what to start), ``refuse`` (this is not the recorded attempt or
    generation: leave without starting anything). ``fence_epoch``: end that launch, whatever it does. ``stop``: end
    the program and the allocation, for this reason. ``poll_s``: when to report again at the latest.
    """

    gate: str
    launch: LaunchOrder | None = None
    fence_epoch: int | None = None
    fence_reason: str = ""
    stop: str = ""
    barred: list[str] = field(default_factory=list)
    grant: Grant | None = None
    poll_s: float = 1.0
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that is sent."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Directive:
        """Read a directive."""
        directive = dict(data)
        launch, grant = directive.get("launch"), directive.get("grant")
        directive["launch"] = _read(LaunchOrder, launch) if launch else None
        directive["grant"] = _read(Grant, grant) if grant else None
        return _read(cls, directive)
