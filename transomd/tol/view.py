"""What decisions are made from, and what they are: immutable values without effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from transom_slurm.types import SlurmJob, SlurmNode
from transom_sql.records import Attempt, Event, Incident, Intent, Job, Launch

from transomd.api.wire import LauncherReport, LaunchReport
from transomd.health.types import CollectiveReport, NodeReport
from transomd.spec import JobSpec
from transomd.words import JobState


class Absence(Enum):
    """Why there is no Slurm job to look at. The two are never the same thing."""

    ABSENT = "Slurm answered and does not know it"
    UNKNOWN = "Slurm did not answer"


SLOW_ANSWER_S = 600.0
"""No answer of Slurm's is older than this: one that seems to be was given after the clock was set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmView:
    """The newest answers of Slurm. ``None`` is *unknown*; the times are when each successful query was begun.

    ``last_nodes`` are those of ``nodes_at``, also while ``nodes`` is unknown: for people to see, never to decide on.
    ``unsure`` are ids that slurmctld does not hold and accounting, which might know how they ended, did not answer for.
    """

    jobs: Mapping[int, SlurmJob] | None = None
    jobs_at: float = 0.0
    nodes: Mapping[str, SlurmNode] | None = None
    nodes_at: float = 0.0
    last_nodes: Mapping[str, SlurmNode] | None = None
    unsure: frozenset[int] = frozenset()
    error: str = ""

    def job(self, attempt: Attempt) -> SlurmJob | Absence:
        """Return the attempt's Slurm job: its id and its tag must both fit, since ids are reused.

        An answer to a question from before the submission was recorded says nothing about it.
        """
        if self.jobs is None or 0.0 < float(attempt.data.get("known_at", 0.0)) - self.jobs_at < SLOW_ANSWER_S:
            return Absence.UNKNOWN
        found = self.jobs.get(attempt.slurm_job_id or 0)
        if found is None or found.name != attempt.tag:
            return Absence.ABSENT
        return found

    def down(self, nodes: tuple[str, ...]) -> frozenset[str]:
        """Those of ``nodes`` that Slurm says are DOWN. Empty when Slurm did not answer."""
        known = self.nodes or {}
        return frozenset(n for n in nodes if n in known and known[n].status.base == "DOWN")

    def silent(self, node: str) -> bool:
        """Whether Slurm itself does not hear this node (DOWN or NOT_RESPONDING)."""
        known = (self.nodes or {}).get(node)
        return known is not None and not known.status.responding


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One immutable snapshot of everything outside, for all jobs.

    ``deaf`` is set while most launchers of the site are silent at once: then it is the daemon that does not hear.
    """

    slurm: SlurmView = field(default_factory=SlurmView)
    deaf: bool = False
    health: Mapping[str, NodeReport] = field(default_factory=dict)
    collectives: Mapping[str, CollectiveReport] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """Everything known about one job."""

    job: Job
    spec: JobSpec
    attempts: tuple[Attempt, ...] = ()
    launches: tuple[Launch, ...] = ()
    incidents: tuple[Incident, ...] = ()
    intents: Mapping[str, Intent] = field(default_factory=dict)
    report: LauncherReport | None = None
    report_at: float = 0.0

    @property
    def state(self) -> JobState:
        """The job's state as a word."""
        return JobState(self.job.state)

    @property
    def attempt(self) -> Attempt:
        """The current attempt. Every job has one from its first record on."""
        return self.attempts[-1]

    @property
    def incident(self) -> Incident | None:
        """The newest open incident."""
        return next((i for i in reversed(self.incidents) if i.closed_at is None), None)

    @property
    def launch(self) -> LaunchReport | None:
        """The launcher's newest launch."""
        return self.report.launches[-1] if self.report and self.report.launches else None

    def intent(self, key: str) -> Intent | None:
        """One of this job's intents, by key."""
        return self.intents.get(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Something to be found out, harmless and repeatable: it is not recorded, its answer comes back in the World.

    ``kind`` is ``slurm``, ``probe`` or ``collective``; an answer older than ``since`` does not count.
    """

    kind: str
    since: float
    nodes: tuple[str, ...] = ()
    key: str = ""
    job_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to record and what to do about one job. ``reason`` is one sentence for people."""

    state: JobState
    reason: str
    job: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    launches: tuple[Launch, ...] = ()
    incident: Incident | None = None
    intents: tuple[Intent, ...] = ()
    events: tuple[Event, ...] = ()
    wants: tuple[Want, ...] = ()
    wake_at: float | None = None

    def writes(self, view: JobView) -> bool:
        """Whether there is anything to record."""
        return bool(
            self.state is not view.state
            or self.reason != view.job.reason
            or any(getattr(view.job, key) != value for key, value in self.job.items())
            or self.attempts
            or self.launches
            or self.incident
            or self.intents
            or self.events
        )


def merged(view: JobView, job: Job, attempts: Iterable[Attempt], launches: Iterable[Launch]) -> JobView:
    """Return the view with records put in, or in the place of those with the same number."""
    by_number = {attempt.number: attempt for attempt in (*view.attempts, *attempts)}
    by_epoch = {launch.epoch: launch for launch in (*view.launches, *launches)}
    return replace(
        view,
        job=job,
        attempts=tuple(by_number[number] for number in sorted(by_number)),
        launches=tuple(by_epoch[epoch] for epoch in sorted(by_epoch)),
    )


def stay(view: JobView, reason: str = "", **more: Any) -> Decision:
    """Return the decision that leaves the job's state as it is."""
    return Decision(state=view.state, reason=reason or view.job.reason, **more)


def waits(since: float, span_s: float, now: float) -> bool:
    """Whether fewer than ``span_s`` seconds have passed since a time that is recorded.

    A clock that was set back makes it wait for twice the span at most, and not until it has caught up.
    """
    return -span_s <= now - since < span_s


def with_data(record: Attempt, **changes: Any) -> Attempt:
    """Return the attempt with keys of its ``data`` replaced; None removes one."""
    data = {**record.data, **changes}
    return replace(record, data={key: value for key, value in data.items() if value is not None})
