"""The ends that several states can come to: the job is done or cancelled, or its allocation is over or lost. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.types import SlurmJob
from transom_sql.records import Intent

from transomd.settings import Settings
from transomd.tol import facts, incidents
from transomd.tol.prologs import prolog_failed
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay
from transomd.words import IntentKind, IntentState, JobState, LauncherPhase

PROLOG_SETTLE_S = 4.0
"""How long after a job's end a node may still be drained for its prolog, and one more, as Slurm tells whole seconds."""
LEAVE_S = 10.0
"""How long a launcher that is no batch script gets to leave before its allocation is ended by scancel."""
LEAVE_BATCH_S = 30.0
"""The same for one that is: its own end should end the Slurm job, but does not where its slurmstepd was killed."""


def completed(view: JobView, now: float) -> Decision:
    """Close a job whose program ended with exit code 0."""
    incident = incidents.known(view, now)
    closed = replace(incident, closed_at=now) if incident else None
    report = facts.fitting_report(view)
    done = report is not None and report.phase == LauncherPhase.DONE
    besides = f"; {report.message}" if report is not None and done and report.message else ""
    # The end of a launcher that took over ends no Slurm job: its allocation would stay until the time limit.
    leave_s = LEAVE_S if view.attempt.generation > 1 else LEAVE_BATCH_S
    left = (cancel_intent(view, now, not_before=now + leave_s),) if view.attempt.slurm_job_id else ()
    return Decision(
        state=JobState.COMPLETED,
        reason=f"the program ended with exit code 0{_last_step(view)}{besides}",
        job={"finished_at": now},
        attempts=(replace(view.attempt, ended_at=now, end_reason="completed"),),
        launches=facts.closed_launches(view, view.job.epoch, now, "completed", over=True),
        incident=closed,
        intents=left,
        events=(facts.event(view, now, "completed", f"the program ended with exit code 0{besides}"),),
    )


def _last_step(view: JobView) -> str:
    """Say at which step the program ended, or how far it was heard of where nobody could tell of its end."""
    step, report = view.job.data.get("step"), facts.fitting_report(view)
    if step is None:
        return ""
    told = report is not None and report.phase == LauncherPhase.DONE and bool(report.launches)
    return f" at step {step}" if told else f"; the last step that was heard of is {step}"


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
        launches=facts.closed_launches(view, view.job.epoch, now, reason, over=True),
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
        return incidents.opened(view, now, detected_by="slurm", reason=words)
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
    return incidents.opened(view, now, detected_by="slurm", reason=words.rstrip(), attempt=attempt)


def allocation_lost(view: JobView, world: World, settings: Settings, now: float) -> Decision | None:
    """Decide on a Slurm job that is over, or a launcher that is silent; None when all is well, or unknown."""
    over = allocation_ended(view, world, facts.slurm_job(view, world, now), now)
    if over is not None or not facts.launcher_silent(view, world, settings, now):
        return over
    host = facts.host_of(view) or "its node"
    return incidents.opened(
        view,
        now,
        detected_by="launcher-silent",
        reason=f"the launcher on {host} has been silent for {now - view.report_at:.0f} s",
    )
