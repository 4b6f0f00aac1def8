"""What decisions share: reading a view, and the few decisions that every state can come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob
from transom_sql.records import Attempt, Event, Incident, Job, Launch

from transomd.api.wire import LauncherReport, LaunchReport
from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tee import detect
from transomd.tee.types import Evidence
from transomd.tol.prologs import prolog_failed
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay, with_data
from transomd.words import JobState, LauncherPhase

ABSENT_GRACE_S = 60.0
"""How long Slurm must keep saying that it does not know a job before that is believed (a controller that restarts)."""


def first_tag(job: Job) -> str:
    """Return the name of a job's first Slurm job. The id keeps tags apart that users could make alike."""
    return f"{job.name}.tr-{job.id}-{job.token_sha256[:8]}-1"


def submit_key(attempt: Attempt) -> str:
    """Return the key of an attempt's submission."""
    return f"submit:{attempt.job_id}:{attempt.number}"


def cancel_key(attempt: Attempt) -> str:
    """Return the key of an attempt's cancellation by transom."""
    return f"cancel:{attempt.job_id}:{attempt.number}"


def event(view: JobView, now: float, kind: str, message: str, **data: Any) -> Event:
    """Return one line of a job's history."""
    return Event(at=now, kind=kind, message=message, job_id=view.job.id, data=data)


def fitting_report(view: JobView) -> LauncherReport | None:
    """Return the newest report if it comes from the recorded launcher of the recorded attempt."""
    report, attempt = view.report, view.attempt
    if report is None or report.attempt != attempt.number or report.generation < attempt.generation:
        return None
    return report if report.slurm_job_id == attempt.slurm_job_id else None


def allocated(view: JobView, world: World) -> tuple[str, ...]:
    """Return the nodes that the attempt got, by Slurm's word alone: a launcher's could name anybody's."""
    job = world.slurm.job(view.attempt)
    return job.nodes if isinstance(job, SlurmJob) and job.nodes else view.attempt.nodes


def ended(job: SlurmJob) -> bool:
    """Whether Slurm says that the job is over for good."""
    return job.status.terminal


def next_epoch(view: JobView) -> int:
    """Return the number of the next launch: above all that are recorded or reported."""
    report = fitting_report(view)
    seen = [launch.epoch for launch in view.launches] + [x.epoch for x in (report.launches if report else ())]
    return max([view.job.epoch, *seen]) + 1


def past_step(view: JobView) -> int | None:
    """Return the furthest step that any launch has reached."""
    steps = [launch.last_step for launch in view.launches if launch.last_step is not None]
    return max(steps, default=None)


def order(view: JobView, epoch: int, nodes: list[str]) -> dict[str, Any]:
    """Return a launch order as it is kept in the attempt's data."""
    return {"epoch": epoch, "nodes": sorted(nodes), "resume_step": None, "past_step": past_step(view)}


def absorb(view: JobView) -> tuple[dict[str, Any], tuple[Launch, ...]]:
    """Return what a report adds to the records: changed job fields, and launches that are new or moved on."""
    report = fitting_report(view)
    if report is None:
        return {}, ()
    known = {launch.epoch: launch for launch in view.launches}
    told = tuple(_launch(view, x, known.get(x.epoch)) for x in report.launches)
    moved = tuple(launch for launch in told if known.get(launch.epoch) != launch)
    data = dict(view.job.data)
    if report.checkpoint_step is not None:
        data["checkpoint"] = {
            "step": report.checkpoint_step,
            "epoch": report.checkpoint_epoch,
            "at": report.checkpoint_at,
        }
    if report.launches and report.launches[-1].last_step is not None:
        data["step"], data["step_at"] = report.launches[-1].last_step, report.launches[-1].last_step_at
    changes: dict[str, Any] = {} if data == dict(view.job.data) else {"data": data}
    epoch = max([view.job.epoch, *(x.epoch for x in report.launches)])
    if epoch != view.job.epoch:
        changes["epoch"] = epoch
    return changes, moved


def _launch(view: JobView, told: LaunchReport, known: Launch | None) -> Launch:
    return Launch(
        job_id=view.job.id,
        epoch=told.epoch,
        attempt=known.attempt if known else view.attempt.number,
        nodes=tuple(told.nodes),
        started_at=told.started_at,
        ended_at=told.ended_at,
        resume_step=told.resume_step,
        first_step=told.first_step,
        first_step_at=told.first_step_at,
        last_step=told.last_step,
        last_step_at=told.last_step_at,
        end_reason=told.end_reason,
    )


def covered(view: JobView, epoch: int) -> bool:
    """Whether a failure of this launch has its incident already."""
    return any(i.epoch == epoch and not i.data.get("false_alarm") and not i.data.get("at_gate") for i in view.incidents)


def open_incident(
    view: JobView,
    now: float,
    *,
    detected_by: str,
    reason: str,
    detected_at: float | None = None,
    attempt: Attempt | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Decision:
    """Open an incident and go to recovering. An older one that is still open is closed first, in a cycle of its own.

    With ``plan`` the incident needs no diagnosis.
    """
    if view.incident is not None:
        closed = replace(view.incident, closed_at=now, data={**view.incident.data, "superseded": True})
        return stay(view, incident=closed)
    at = detected_at if detected_at is not None else now
    launch = view.launch
    incident = Incident(
        job_id=view.job.id,
        attempt=view.attempt.number,
        epoch=launch.epoch if launch and fitting_report(view) else view.job.epoch,
        detected_at=at,
        last_step=past_step(view),
        summary=reason,
        diagnosed_at=now if plan else None,
        data={"detected_by": detected_by, **({"plan": dict(plan)} if plan else {})},
    )
    return Decision(
        state=JobState.RECOVERING,
        reason=reason,
        incident=incident,
        attempts=(with_data(attempt or view.attempt, order=None),),
        events=(Event(at=at, kind="failure", message=reason, job_id=view.job.id, data={"by": detected_by}),),
    )


def launch_moved_on(view: JobView, now: float) -> Decision | None:
    """Decide on what the launcher says of its launch: running, failed or done; None when there is nothing new."""
    report, launch = fitting_report(view), view.launch
    if report is None:
        return None
    if report.phase == LauncherPhase.DONE:
        return completed(view, now)
    failure = report.failure
    if report.phase == LauncherPhase.FAILED and failure and not covered(view, failure.epoch):
        return open_incident(
            view,
            now,
            detected_by=failure.detected_by,
            detected_at=failure.detected_at,
            reason=f"epoch {failure.epoch} failed: {report.message or failure.detected_by}",
        )
    ordered = view.attempt.data.get("order")
    if report.phase != LauncherPhase.RUNNING or launch is None or view.state is JobState.RUNNING:
        return None
    if (ordered is None and view.state is JobState.RECOVERING) or (ordered and launch.epoch < ordered["epoch"]):
        return None
    return _now_running(view, launch)


def _now_running(view: JobView, launch: LaunchReport) -> Decision:
    incident = view.incident
    if incident is not None:
        incident = replace(incident, acted_at=launch.started_at)
    message = f"epoch {launch.epoch} runs on {fold(launch.nodes)}"
    return Decision(
        state=JobState.RUNNING,
        reason=message,
        incident=incident,
        attempts=(with_data(view.attempt, fence=None),),
        events=(Event(at=launch.started_at, kind="launch", message=message, job_id=view.job.id),),
    )


def completed(view: JobView, now: float) -> Decision:
    """Close a job whose program ended with exit code 0."""
    closed = replace(view.incident, closed_at=now) if view.incident else None
    step = view.job.data.get("step")
    return Decision(
        state=JobState.COMPLETED,
        reason=f"the program ended with exit code 0{f' at step {step}' if step is not None else ''}",
        job={"finished_at": now},
        attempts=(replace(view.attempt, ended_at=now, end_reason="completed"),),
        incident=closed,
        events=(event(view, now, "completed", "the program ended with exit code 0"),),
    )


def cancelled(view: JobView, now: float, reason: str) -> Decision:
    """Close a job that a person cancelled: not a failure."""
    closed = None
    if view.incident is not None:
        closed = replace(view.incident, closed_at=now, failure_class="cancelled", blame="external", action="none")
    return Decision(
        state=JobState.CANCELLED,
        reason=reason,
        job={"finished_at": now},
        attempts=(replace(view.attempt, ended_at=now, end_reason="cancelled"),),
        incident=closed,
        events=(event(view, now, "cancelled", reason),),
    )


def launcher_silent(view: JobView, world: World, settings: Settings, now: float) -> bool:
    """Whether the launcher has been silent for too long; sooner where Slurm does not hear its node either."""
    watch = settings.watch
    limit = watch.launcher_silence_s
    host = str(view.attempt.data.get("host", ""))
    if host and world.slurm.silent(host):
        limit = min(limit, 2 * watch.report_s + 2)
    return now - view.report_at > limit


def allocation_lost(view: JobView, world: World, settings: Settings, now: float) -> Decision | None:
    """Decide on a Slurm job that is over or unknown to Slurm, or a launcher that is silent; None when all is well."""
    job = world.slurm.job(view.attempt)
    if job is Absence.ABSENT or (isinstance(job, SlurmJob) and ended(job)):
        return allocation_ended(view, world, job, settings, now)
    if launcher_silent(view, world, settings, now):
        host = view.attempt.data.get("host", "its node")
        return open_incident(
            view,
            now,
            detected_by="launcher-silent",
            detected_at=now,
            reason=f"the launcher on {host} has been silent for {now - view.report_at:.0f} s",
        )
    return None


def allocation_ended(view: JobView, world: World, job: SlurmJob | Absence, settings: Settings, now: float) -> Decision:
    """Decide what an ended or vanished Slurm job means."""
    report = fitting_report(view)
    if report is not None and report.phase == LauncherPhase.DONE:
        return completed(view, now)
    if not isinstance(job, SlurmJob):
        return _absent(view, now)
    base = job.status.base.value
    if base == "COMPLETED":
        return completed(view, now)
    if base == "CANCELLED" and view.intent(cancel_key(view.attempt)) is None:
        by_somebody = _cancelled(view, world, job, now)
        if by_somebody is not None:
            return by_somebody
    # An attempt whose launcher never reported has no nodes yet, and the diagnosis must know whom to look at.
    attempt = replace(view.attempt, nodes=view.attempt.nodes or job.nodes)
    reason = f"Slurm job {job.job_id} ended: {job.state_text} {job.reason}".rstrip()
    return open_incident(view, now, detected_by="slurm", reason=reason, attempt=attempt)


def _cancelled(view: JobView, world: World, job: SlurmJob, now: float) -> Decision | None:
    """Decide on a job that Slurm calls cancelled; None when a failed prolog did it.

    Only the nodes tell the two apart, so they must have been asked since.
    """
    since = view.attempt.data.get("cancelled_since")
    if since is None:
        said = f"Slurm job {job.job_id} is cancelled; looking whether a prolog failed"
        return stay(
            view, said, attempts=(with_data(view.attempt, cancelled_since=now),), wants=(Want(kind="slurm", since=now),)
        )
    if world.slurm.nodes is None or world.slurm.nodes_at < float(since):
        return stay(view, wants=(Want(kind="slurm", since=float(since)),))
    if prolog_failed(view, world, job):
        return None
    return cancelled(view, now, f"Slurm job {job.job_id} was cancelled by a person")


def _absent(view: JobView, now: float) -> Decision:
    since = view.attempt.data.get("absent_since")
    if since is None:
        attempt = with_data(view.attempt, absent_since=now)
        return stay(view, attempts=(attempt,), wake_at=now + ABSENT_GRACE_S)
    if now - max(float(since), view.report_at) < ABSENT_GRACE_S:
        return stay(view, "Slurm does not know the job; making sure", wake_at=now + 5)
    return open_incident(
        view,
        now,
        detected_by="slurm",
        reason=f"Slurm has not known job {view.attempt.slurm_job_id} for {ABSENT_GRACE_S:.0f} s, and it is silent",
    )


def probe_evidence(report: NodeReport) -> tuple[Evidence, ...]:
    """Return what a probe says as evidence."""
    return tuple(detect.probe(report))


def await_drain(nodes: tuple[str, ...], health: Mapping[str, NodeReport]) -> dict[str, list[str]]:
    """Return, for each blamed node, the checks that found it unfit; empty where only its silence speaks."""
    return {n: sorted(r.check for r in health[n].unfit) if n in health else [] for n in nodes}
