"""What has become of a job's launches, by what its launcher says: running, failed, done, or failed unheard. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_sql.records import Event, Incident

from transomd.api.wire import LaunchReport
from transomd.tol import endings, facts, incidents
from transomd.tol.rollback import from_step
from transomd.tol.view import Decision, JobView, stay, with_data
from transomd.words import JobState, LauncherPhase


def moved_on(view: JobView, now: float) -> Decision | None:
    """Decide on what the launcher says of its launch: running, failed or done; None when there is nothing new."""
    report, launch = facts.fitting_report(view), view.launch
    if report is None:
        return None
    missed = _missed_failure(view, now)
    if missed is not None:
        return missed
    if report.phase == LauncherPhase.DONE:
        return incidents.recovered(view) or endings.completed(view, now)
    failure = report.failure
    if report.phase == LauncherPhase.FAILED:
        epoch = failure.epoch if failure else launch.epoch if launch else 0
        if not incidents.covered(view, epoch):
            by, at = (failure.detected_by, failure.detected_at) if failure else ("launcher", now)
            words = f"epoch {epoch} failed: {report.message or by}"
            return incidents.opened(view, now, detected_by=by, detected_at=at, reason=words, epoch=epoch)
    if report.phase == LauncherPhase.RUNNING and launch is not None and _is_new(view, launch):
        return _now_running(view, launch, now)
    return None


def _is_new(view: JobView, launch: LaunchReport) -> bool:
    """Whether this launch is not the one that failed: it was ordered, or made on a grant, or the gate opened alone."""
    if view.state is JobState.RECOVERING:
        return view.incident is None or launch.epoch > view.incident.epoch
    return view.state is not JobState.RUNNING


def _now_running(view: JobView, launch: LaunchReport, now: float) -> Decision:
    incident = incidents.known(view, now)
    if incident is not None:
        incident = replace(incident, acted_at=launch.started_at)
    order = view.attempt.data.get("order") or {}
    alone = "" if order.get("epoch") == launch.epoch else ", started by the launcher alone"
    message = f"epoch {launch.epoch} runs on {fold(launch.nodes)}{from_step(view.job.data)}"
    return Decision(
        state=JobState.RUNNING,
        reason=message,
        incident=incident,
        attempts=(incidents.barring(with_data(view.attempt, fence=None, order=None, ordered_at=None), incident),),
        events=(Event(at=launch.started_at, kind="launch", message=message + alone, job_id=view.job.id),),
    )


def _missed_failure(view: JobView, now: float) -> Decision | None:
    """Record a failure after which the launcher restarted on its grant before this daemon knew of it."""
    report, launch = facts.fitting_report(view), view.launch
    if report is None or launch is None:
        return None
    missed = [x for x in report.launches if x.ended_at is not None and x.epoch < launch.epoch]
    missed = [x for x in missed if not incidents.covered(view, x.epoch)]
    if not missed:
        return None
    older = incidents.known(view, now)
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
    told = incidents.told_by_launcher(view, incident, now)
    said = Event(at=told.detected_at, kind="failure", message=told.summary, job_id=view.job.id, data={"by": "launcher"})
    return stay(view, incident=told, attempts=(incidents.barring(view.attempt, told),), events=(said,))
