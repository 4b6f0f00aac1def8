"""What a launcher is told: a pure function of the records, so that it is the same after a restart of the daemon."""

from __future__ import annotations

from transomd.api.wire import Directive, Grant, LauncherReport, LaunchOrder
from transomd.settings import Settings
from transomd.tol.policy import restarts_spent
from transomd.tol.view import JobView
from transomd.words import JobState, LauncherPhase

FAST_POLL_S = 0.5
"""How soon a launcher that waits for a word asks again."""


def directive(view: JobView, report: LauncherReport, settings: Settings) -> Directive:
    """Answer one report. Only the recorded attempt, in its recorded Slurm job and generation, is let through."""
    if ahead(view, report) and not view.job.cancel_requested_by:
        said = f"attempt {report.attempt} is not recorded yet; what runs goes on, and nothing is started"
        return Directive(gate="hold", poll_s=settings.watch.report_s, message=said)
    refusal = _refusal(view, report)
    if refusal:
        return Directive(gate="refuse", message=refusal)
    data = view.attempt.data
    if view.state.final:
        return Directive(gate="hold", stop=str(data.get("stop") or f"the job is {view.state}"), message=view.job.reason)
    fence = data.get("fence") or {}
    order = data.get("order")
    running = report.phase == LauncherPhase.RUNNING and view.state is JobState.RUNNING
    return Directive(
        gate="open" if order else "hold",
        launch=LaunchOrder(**order) if order else None,
        fence_epoch=fence.get("epoch"),
        fence_reason=str(fence.get("reason", "")),
        barred=list(view.attempt.barred),
        grant=_grant(view, settings) if running else None,
        poll_s=settings.watch.report_s if running and not fence else FAST_POLL_S,
        message=view.job.reason,
    )


def ahead(view: JobView, report: LauncherReport) -> bool:
    """Whether a launcher is of a later attempt than any that is recorded: the database was restored from a backup.

    That must end no program: the attempt is recorded again once Slurm has shown its job (:func:`facts.overtaken`).
    """
    return not view.attempts or report.attempt > view.attempt.number


def _grant(view: JobView, settings: Settings) -> Grant:
    """Never more than the job's own budget has left."""
    left = max(0, view.spec.policy.max_restarts - restarts_spent(view.incidents))
    return Grant(restarts=min(settings.policy.grant_restarts, left), for_s=settings.policy.grant_s)


def _refusal(view: JobView, report: LauncherReport) -> str:
    if not view.attempts or report.attempt != view.attempt.number:
        return f"attempt {report.attempt} is not the current one"
    known = view.attempt.slurm_job_id
    if known is not None and report.slurm_job_id != known:
        return f"Slurm job {report.slurm_job_id} is not the recorded one ({known})"
    if report.generation < view.attempt.generation:
        return f"launcher {report.generation} was replaced by launcher {view.attempt.generation}"
    return ""
