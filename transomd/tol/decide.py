"""What should happen to a job next: a pure function of its records, a snapshot of the world, the settings and the time.

The same code runs in the daemon, in unit tests and in simulations with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_sql.records import Attempt, Launch

from transomd.settings import Settings
from transomd.tol import facts, gate, recover
from transomd.tol.transitions import check_move
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay
from transomd.words import IntentState, JobState, LauncherPhase

FATAL_WHILE_RUNNING = frozenset({"gpu-count", "xid"})
"""Checks whose failure ends a running launch. Others (space, clock, throttling) wait for the next restart."""


def decide(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Return what to record and do. Raises UnlawfulMove when a rule below asks for a move outside the table."""
    if view.state.final:
        return stay(view)
    if not view.attempts:
        return _never_submitted(view, now) if view.job.cancel_requested_by else _first_attempt(view, now)
    changes, launches = facts.absorb(view)
    absorbed = (
        replace(view, job=replace(view.job, **changes), launches=_merged(view, launches))
        if changes or launches
        else view
    )
    decision = _decide(absorbed, world, settings, now)
    check_move(view.state, decision.state)
    return replace(decision, job={**changes, **decision.job}, launches=(*launches, *decision.launches))


def _merged(view: JobView, changed: tuple[Launch, ...]) -> tuple[Launch, ...]:
    by_epoch = {launch.epoch: launch for launch in (*view.launches, *changed)}
    return tuple(by_epoch[epoch] for epoch in sorted(by_epoch))


def _decide(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    if view.job.cancel_requested_by:
        return _cancel(view, world, settings, now)
    return _BY_STATE[view.state](view, world, settings, now)


def _never_submitted(view: JobView, now: float) -> Decision:
    """Close a job that was cancelled before Slurm heard of it."""
    said = f"cancelled by {view.job.cancel_requested_by}; it was never submitted to Slurm"
    return Decision(
        state=JobState.CANCELLED,
        reason=said,
        job={"finished_at": now},
        events=(facts.event(view, now, "cancelled", said),),
    )


def _first_attempt(view: JobView, now: float) -> Decision:
    attempt = Attempt(job_id=view.job.id, number=1, tag=facts.first_tag(view.job), created_at=now)
    return stay(
        view,
        "submitting to Slurm",
        job={"attempt": 1},
        attempts=(attempt,),
        intents=(recover.submit_intent(attempt, now),),
    )


def _cancel(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    who, attempt = view.job.cancel_requested_by, view.attempt
    if attempt.slurm_job_id is None:
        submitted = view.intent(facts.submit_key(attempt))
        if submitted is not None and submitted.state == IntentState.PENDING:
            return stay(view, f"cancelled by {who}; first settling whether Slurm took the job")
        settled = gate.waiting_for_slurm_job(view, world, settings, now)
        return settled if settled.attempts else facts.cancelled(view, now, f"cancelled by {who}")
    job = world.slurm.job(attempt)
    if job is Absence.ABSENT or (not isinstance(job, Absence) and facts.ended(job)):
        return facts.cancelled(view, now, f"cancelled by {who}")
    if view.intent(facts.cancel_key(attempt)) is None:
        intent = recover.cancel_intent(view, now)
        said = facts.event(view, now, "cancel", f"{who} asked to cancel")
        return stay(view, f"being cancelled by {who}", intents=(intent,), events=(said,))
    return stay(view, f"being cancelled by {who}", wants=(Want(kind="slurm", since=now - 1),))


def _running(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    moved = facts.launch_moved_on(view, now)
    if moved is not None:
        return moved
    report = facts.fitting_report(view)
    if report is not None and report.phase == LauncherPhase.GATE:
        return _gate_again(view, now)
    lost = facts.allocation_lost(view, world, settings, now)
    if lost is not None:
        return lost
    recovered = _recovered(view)
    if recovered is not None:
        return recovered
    return _watch_nodes(view, world, settings, now)


def _gate_again(view: JobView, now: float) -> Decision:
    """The launcher stands at its gate though a launch was recorded: it was replaced, and knows of no launch."""
    return facts.open_incident(view, now, detected_by="takeover", reason="the launcher started anew")


def _recovered(view: JobView) -> Decision | None:
    incident, launch = view.incident, view.launch
    if incident is None or launch is None or launch.epoch <= incident.epoch:
        return None
    at = launch.new_step_at
    if at is None:
        return None
    took = at - incident.detected_at
    message = f"recovered: first new step {took:.1f} s after the failure was detected"
    return stay(
        view,
        incident=replace(incident, recovered_at=at, closed_at=at),
        events=(facts.event(view, at, "recovered", message, seconds=round(took, 3)),),
    )


def _watch_nodes(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    launch, interval = view.launch, settings.health.interval_s
    if launch is None or not interval or not view.spec.health.probe:
        return stay(view)
    for node in launch.nodes:
        found = world.health.get(node)
        if found is None or found.at < launch.started_at:
            continue
        fatal = [r for r in found.unfit if r.check in FATAL_WHILE_RUNNING]
        if fatal:
            why = f"{node}: {fatal[0].check}: {fatal[0].evidence or fatal[0].value}"
            return facts.open_incident(view, now, detected_by="probe", detected_at=found.at, reason=why)
    due = Want(kind="probe", since=now - interval, nodes=tuple(launch.nodes), job_id=view.job.id)
    return stay(view, f"epoch {launch.epoch} runs on {fold(launch.nodes)}", wants=(due,))


def _held(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    return stay(view)


_BY_STATE: dict[JobState, Callable[[JobView, World, Settings, float], Decision]] = {
    JobState.SUBMITTED: gate.waiting_for_slurm_job,
    JobState.QUEUED: gate.waiting_for_slurm_job,
    JobState.CHECKING: gate.checking,
    JobState.RUNNING: _running,
    JobState.RECOVERING: recover.recovering,
    JobState.HELD: _held,
}
