"""What is recorded of a failure: opened when noticed, told by the launcher, closed once it is made up for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transom_sql.records import Attempt, Event, Incident

from transomd.tol import facts
from transomd.tol.view import Decision, JobView, stay, with_data
from transomd.words import Action, Blame, Confidence, FailureClass, JobState


def opened(
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


def known(view: JobView, now: float) -> Incident | None:
    """Return the open incident, with what the launcher can say of it where nobody else has diagnosed it."""
    incident = view.incident
    if incident is None or incident.diagnosed_at is not None:
        return incident
    return told_by_launcher(view, incident, now)


def told_by_launcher(view: JobView, incident: Incident, now: float) -> Incident:
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


def barring(attempt: Attempt, incident: Incident | None) -> Attempt:
    """Return the attempt without the nodes that the incident blames."""
    nodes = incident.nodes if incident is not None and incident.attempt == attempt.number else ()
    return replace(attempt, barred=tuple(sorted({*attempt.barred, *nodes})))
