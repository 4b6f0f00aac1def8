"""The decisions that several states can come to: a failure is noticed, the job is done, or cancelled. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob
from transom_sql.records import Attempt, Event, Incident, Intent

from transomd.api.wire import LaunchReport
from transomd.settings import Settings
from transomd.tol import facts
from transomd.tol.prologs import prolog_failed
from transomd.tol.rollback import from_step
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay, with_data
from transomd.words import (
    Action,
    Blame,
    Confidence,
    FailureClass,
    IntentKind,
    IntentState,
    JobState,
    LauncherPhase,
)

PROLOG_SETTLE_S = 4.0
"""How long after a job's end a node may still be drained for its prolog, and one more, as Slurm tells whole seconds."""
LEAVE_S = 10.0
"""How long a launcher that is no batch script gets to leave before its allocation is ended by scancel."""


def open_incident(
    view: JobView,
    now: float,
    *,
    detected_by: str,
    reason: str,
    detected_at: float | None = None,
    epoch: int | None = None,
    attempt: Attempt | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Decision:
    """Open an incident and go to recovering. An older one that is still open is closed first, in a cycle of its own.

    With ``plan`` the incident needs no diagnosis. A launcher's clock may be wrong: nothing is detected after now.
    """
    if view.incident is not None:
        closed = replace(view.incident, closed_at=now, data={**view.incident.data, "superseded": True})
        return stay(view, incident=closed)
    at = min(detected_at, now) if detected_at is not None else now
    launch = view.launch
    if epoch is None:
        epoch = launch.epoch if launch and facts.fitting_report(view) else view.job.epoch
    incident = Incident(
        job_id=view.job.id,
        attempt=view.attempt.number,
        epoch=epoch,
        detected_at=at,
        last_step=facts.past_step(view),
        summary=reason,
        diagnosed_at=now if plan else None,
        data={"detected_by": detected_by, "opened_at": now, **({"plan": dict(plan)} if plan else {})},
    )
    return Decision(
        state=JobState.RECOVERING,
        reason=reason,
        incident=incident,
        attempts=(with_data(attempt or view.attempt, order=None, ordered_at=None, fence=None),),
        events=(Event(at=at, kind="failure", message=reason, job_id=view.job.id, data={"by": detected_by}),),
    )


def covered(view: JobView, epoch: int) -> bool:
    """Whether a failure of this launch has its incident already."""
    return any(i.epoch == epoch and not i.data.get("false_alarm") and not i.data.get("at_gate") for i in view.incidents)


def launch_moved_on(view: JobView, now: float) -> Decision | None:
    """Decide on what the launcher says of its launch: running, failed or done; None when there is nothing new."""
    report, launch = facts.fitting_report(view), view.launch
    if report is None:
        return None
    missed = _missed_failure(view, now)
    if missed is not None:
        return missed
    if report.phase == LauncherPhase.DONE:
        return recovered(view) or completed(view, now)
    failure = report.failure
    if report.phase == LauncherPhase.FAILED:
        epoch = failure.epoch if failure else launch.epoch if launch else 0
        if not covered(view, epoch):
            by, at = (failure.detected_by, failure.detected_at) if failure else ("launcher", now)
            words = f"epoch {epoch} failed: {report.message or by}"
            return open_incident(view, now, detected_by=by, detected_at=at, reason=words, epoch=epoch)
    if report.phase == LauncherPhase.RUNNING and launch is not None and _is_new(view, launch):
        return _now_running(view, launch, now)
    return None


def _is_new(view: JobView, launch: LaunchReport) -> bool:
    """Whether this launch is not the one that failed: it was ordered, or made on a grant, or the gate opened alone."""
    if view.state is JobState.RECOVERING:
        return view.incident is None or launch.epoch > view.incident.epoch
    return view.state is not JobState.RUNNING


def _now_running(view: JobView, launch: LaunchReport, now: float) -> Decision:
    incident = _known_incident(view, now)
    if incident is not None:
        incident = replace(incident, acted_at=launch.started_at)
    order = view.attempt.data.get("order") or {}
    alone = "" if order.get("epoch") == launch.epoch else ", started by the launcher alone"
    message = f"epoch {launch.epoch} runs on {fold(launch.nodes)}{from_step(view.job.data)}"
    return Decision(
        state=JobState.RUNNING,
        reason=message,
        incident=incident,
        attempts=(_barring(with_data(view.attempt, fence=None, order=None, ordered_at=None), incident),),
        events=(Event(at=launch.started_at, kind="launch", message=message + alone, job_id=view.job.id),),
    )


def recovered(view: JobView) -> Decision | None:
    """Close the incident once a later launch has got further than any before; None until then."""
    incident, launch = view.incident, view.launch
    if incident is None or launch is None or launch.epoch <= incident.epoch or launch.new_step_at is None:
        return None
    at = launch.new_step_at
    took = at - incident.detected_at
    message = f"recovered: first new step {took:.1f} s after the failure was detected"
    return stay(
        view,
        incident=replace(incident, recovered_at=at, closed_at=at),
        events=(facts.event(view, at, "recovered", message, seconds=round(took, 3)),),
    )


def _known_incident(view: JobView, now: float) -> Incident | None:
    """Return the open incident, with what the launcher can say of it where nobody else has diagnosed it."""
    incident = view.incident
    if incident is None or incident.diagnosed_at is not None:
        return incident
    return _told_by_launcher(view, incident, now)


def _missed_failure(view: JobView, now: float) -> Decision | None:
    """Record a failure after which the launcher restarted on its grant before this daemon knew of it."""
    report, launch = facts.fitting_report(view), view.launch
    if report is None or launch is None:
        return None
    missed = [x for x in report.launches if x.ended_at is not None and x.epoch < launch.epoch]
    missed = [x for x in missed if not covered(view, x.epoch)]
    if not missed:
        return None
    older = _known_incident(view, now)
    if older is not None:
        return stay(view, incident=replace(older, closed_at=now, data={**older.data, "superseded": True}))
    first = missed[0]
    incident = Incident(
        job_id=view.job.id,
        attempt=view.attempt.number,
        epoch=first.epoch,
        detected_at=min(first.ended_at or now, now),
        acted_at=launch.started_at,
        last_step=first.last_step,
        summary=first.end_reason,
        data={"detected_by": "launcher", "opened_at": now},
    )
    told = _told_by_launcher(view, incident, now)
    said = Event(at=told.detected_at, kind="failure", message=told.summary, job_id=view.job.id, data={"by": "launcher"})
    return stay(view, incident=told, attempts=(_barring(view.attempt, told),), events=(said,))


def _told_by_launcher(view: JobView, incident: Incident, now: float) -> Incident:
    """Return the incident with what the launcher can still say of it; nobody looked at the nodes at the time."""
    report = facts.fitting_report(view)
    failure = next((f for f in (report.past_failures if report else ()) if f.epoch == incident.epoch), None)
    failed = next((x for x in (report.launches if report else ()) if x.epoch == incident.epoch), None)
    used = set(failed.nodes) & set(view.attempt.nodes) if failed else set()
    gone = failure.lost_nodes if failure else report.lost if report else ()
    lost = tuple(sorted(used & set(gone)))
    why = f": {failed.end_reason}" if failed and failed.end_reason else ""
    return replace(
        incident,
        failure_class=(FailureClass.HOST if lost else FailureClass.UNKNOWN).value,
        blame=(Blame.NODE if lost else Blame.UNKNOWN).value,
        action=(Action.EXCLUDE if lost else Action.RESTART).value,
        nodes=lost,
        confidence=(Confidence.MEDIUM if lost else Confidence.LOW).value,
        summary=f"Epoch {incident.epoch} failed while transomd was away{why}. The launcher restarted it by itself.",
        evidence=tuple(e.to_json() for e in facts.readable(failure.evidence)) if failure else (),
        diagnosed_at=now,
        fenced_at=failure.fenced_at if failure else None,
        data={**incident.data, "await_drain": facts.await_drain(lost, {})},
    )


def _barring(attempt: Attempt, incident: Incident | None) -> Attempt:
    nodes = incident.nodes if incident is not None and incident.attempt == attempt.number else ()
    return replace(attempt, barred=tuple(sorted({*attempt.barred, *nodes})))


def completed(view: JobView, now: float) -> Decision:
    """Close a job whose program ended with exit code 0."""
    incident = _known_incident(view, now)
    closed = replace(incident, closed_at=now) if incident else None
    step = view.job.data.get("step")
    # The end of a launcher that took over ends no Slurm job: its allocation would stay until the time limit.
    left = (cancel_intent(view, now, not_before=now + LEAVE_S),) if view.attempt.generation > 1 else ()
    return Decision(
        state=JobState.COMPLETED,
        reason=f"the program ended with exit code 0{f' at step {step}' if step is not None else ''}",
        job={"finished_at": now},
        attempts=(replace(view.attempt, ended_at=now, end_reason="completed"),),
        launches=facts.closed_launches(view, view.job.epoch, now, "completed"),
        incident=closed,
        intents=left,
        events=(facts.event(view, now, "completed", "the program ended with exit code 0"),),
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
        launches=facts.closed_launches(view, view.job.epoch, now, reason),
        incident=closed,
        events=(facts.event(view, now, "cancelled", reason),),
    )


def cancel_intent(view: JobView, now: float, *, not_before: float = 0.0) -> Intent:
    """Return the intent that ends the current attempt's Slurm job."""
    attempt = view.attempt
    return Intent(
        key=facts.cancel_key(attempt),
        kind=IntentKind.CANCEL.value,
        state=IntentState.PENDING.value,
        created_at=now,
        not_before=not_before,
        job_id=view.job.id,
        args={"slurm_job_id": attempt.slurm_job_id, "tag": attempt.tag},
    )


def final_end(view: JobView, world: World, job: SlurmJob, now: float) -> Decision | None:
    """Decide on an end that needs no diagnosis: exit code 0, or a person's scancel. None for every other.

    Only the nodes tell a person's scancel from a failed prolog, and they are always asked after the jobs.
    """
    base = job.status.base.value
    if base == "COMPLETED":
        return completed(view, now)
    if base != "CANCELLED" or facts.ended_by_us(view, world):
        return None
    if world.slurm.nodes is not None and prolog_failed(view, world, job):
        return None
    settled = _prolog_settled(view, job)
    if world.slurm.nodes is None or world.slurm.nodes_at < settled:
        said = f"Slurm job {job.job_id} is cancelled; looking whether a prolog failed"
        return stay(view, said, wants=(Want(kind="slurm", since=max(now, settled)),), wake_at=settled or None)
    return cancelled(view, now, f"Slurm job {job.job_id} was cancelled by a person")


def _prolog_settled(view: JobView, job: SlurmJob) -> float:
    """When the nodes of a cancelled job say whether its prolog failed: slurmctld ends the job first, then drains."""
    began = job.start_time is not None and facts.fitting_report(view) is None
    return (job.end_time or 0.0) + PROLOG_SETTLE_S if began else 0.0


def allocation_ended(view: JobView, world: World, job: SlurmJob | Absence, now: float) -> Decision | None:
    """Decide on a Slurm job that is over, gone or back in the queue; None when it is neither, or unknown."""
    if job is Absence.ABSENT:
        words = f"Slurm has not known job {view.attempt.slurm_job_id} for a while, and its launcher is silent"
        return open_incident(view, now, detected_by="slurm", reason=words)
    if not isinstance(job, SlurmJob) or not (facts.ended(job) or facts.requeued(job)):
        return None
    # An attempt whose launcher was not heard of has no nodes yet: a diagnosis looks at them, and a person wants them.
    was = view.attempt
    attempt = replace(was, nodes=was.nodes or job.nodes, started_at=was.started_at or job.start_time)
    view = replace(view, attempts=(*view.attempts[:-1], attempt))
    ending = final_end(view, world, job, now) if facts.ended(job) else None
    if ending is not None:
        return ending
    words = f"Slurm job {job.job_id} {'ended' if facts.ended(job) else 'was requeued'}: {job.state_text} {job.reason}"
    return open_incident(view, now, detected_by="slurm", reason=words.rstrip(), attempt=attempt)


def allocation_lost(view: JobView, world: World, settings: Settings, now: float) -> Decision | None:
    """Decide on a Slurm job that is over, or a launcher that is silent; None when all is well, or unknown."""
    over = allocation_ended(view, world, facts.slurm_job(view, world, now), now)
    if over is not None or not facts.launcher_silent(view, world, settings, now):
        return over
    host = facts.host_of(view) or "its node"
    return open_incident(
        view,
        now,
        detected_by="launcher-silent",
        reason=f"the launcher on {host} has been silent for {now - view.report_at:.0f} s",
    )
