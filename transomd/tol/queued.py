"""Decisions from submission to the nodes: offered to Slurm, queued, held, given nodes. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.pending import Pending, told, waits_for_person
from transom_slurm.types import JobBase, SlurmJob
from transom_sql.records import Intent

from transomd.api.wire import LauncherReport
from transomd.settings import Settings
from transomd.tol import endings, facts, incidents
from transomd.tol.attempts import submit_intent
from transomd.tol.prologs import culprits, held_for_launch
from transomd.tol.view import Decision, JobView, Want, World, stay, waits, with_data
from transomd.words import Action, Blame, FailureClass, IntentState, JobState, LauncherPhase


def waiting_for_slurm_job(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job whose attempt has no launcher yet."""
    if view.attempt.slurm_job_id is None:
        return submission(view, now)
    job = facts.slurm_job(view, world, now)
    report = facts.fitting_report(view)
    here = isinstance(job, SlurmJob) and bool(job.nodes) and not facts.ended(job)
    if report is not None and report.phase == LauncherPhase.DONE and not here:
        return endings.completed(view, now)
    if isinstance(job, SlurmJob) and held_for_launch(job):
        return _held_for_launch(view, world, job, now)
    over = endings.allocation_ended(view, world, job, now)
    if over is not None:
        return over
    if not isinstance(job, SlurmJob):
        return stay(view, facts.why_unknown(view, world), wants=(Want(kind="slurm", since=view.report_at),))
    if report is not None:
        return _launcher_reported(view, report, job, now)
    return _waiting(view, job, settings, now)


def _held_for_launch(view: JobView, world: World, job: SlurmJob, now: float) -> Decision:
    """Replace an attempt that Slurm holds for a failed prolog: released, it would wait two minutes, and come back."""
    bad = culprits(view, world, job)
    where = f" after the prolog of {fold(bad)} failed" if bad else ""
    opened = incidents.opened(
        view,
        now,
        detected_by="slurm",
        reason=f"Slurm holds job {job.job_id}{where} ({job.reason})",
        attempt=replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *bad}))),
        plan={"action": Action.EXCLUDE.value, "new_attempt": True},
    )
    if opened.incident is None or opened.incident.closed_at is not None:
        return opened
    blame = (Blame.NODE if bad else Blame.UNKNOWN).value
    told = replace(opened.incident, failure_class=FailureClass.HOST.value, blame=blame, action="exclude", nodes=bad)
    return replace(opened, incident=told)


def submission(view: JobView, now: float) -> Decision:
    """Decide for an attempt that has no Slurm job yet."""
    intent = view.intent(facts.submit_key(view.attempt))
    if intent is None:
        return stay(view, "submitting to Slurm", intents=(submit_intent(view.attempt, now),))
    if intent.state == IntentState.PENDING:
        if "refused" in intent.outcome:
            return _refused(view, intent, now)
        why = str(intent.outcome.get("error", ""))
        return stay(view, f"submitting to Slurm{': ' + why if why else ''}")
    if intent.state != IntentState.DONE:
        why = f"Slurm refused the job: {intent.outcome.get('error', 'no reason recorded')}"
        return Decision(
            state=JobState.FAILED,
            reason=why,
            job={"finished_at": now},
            attempts=(replace(view.attempt, ended_at=now, end_reason=why),),
            incident=replace(view.incident, closed_at=now) if view.incident else None,
            events=(facts.event(view, now, "failed", why),),
        )
    job_id = int(intent.outcome["slurm_job_id"])
    attempt = replace(
        view.attempt, slurm_job_id=job_id, slurm_submit_time=intent.outcome.get("submit_time"), generation=1
    )
    return Decision(
        state=JobState.QUEUED,
        reason=f"Slurm job {job_id} is queued",
        attempts=(with_data(attempt, known_at=now),),
        events=(facts.event(view, now, "queued", f"attempt {attempt.number} is Slurm job {job_id}"),),
    )


def _refused(view: JobView, offer: Intent, now: float) -> Decision:
    """Slurm took the job before: what stands in its way now may pass, or a person puts it right."""
    attempt, why, without = view.attempt, str(offer.outcome["error"]), offer.outcome.get("without")
    if without and "node" in why.lower():
        said = f"Slurm refuses attempt {attempt.number} without {fold(without)} ({why}); the next offer leaves none out"
        allowed = (replace(attempt, excluded=()),) if attempt.excluded else ()
        return stay(view, said, attempts=allowed, events=(facts.event(view, now, "attempt", said),) if allowed else ())
    reason = (
        f"Slurm refuses attempt {attempt.number} ({why}); it is offered again every minute, for a day. "
        f"Put that right, or give the job up: transom cancel {view.job.id}"
    )
    return _hold(view, reason, now)


def _waiting(view: JobView, job: SlurmJob, settings: Settings, now: float) -> Decision:
    never = waits_for_person(job)
    if never is not None:
        return _held(view, job, never, now)
    started = job.start_time
    if job.status.base is not JobBase.RUNNING or started is None:
        said = f"Slurm job {job.job_id} is {job.state_text.lower()}: {told(job)}"
        return Decision(state=JobState.QUEUED, reason=said)
    # A daemon that has just come back gives the launcher its time to report again.
    since, patience = max(started, view.report_at), settings.watch.launcher_start_s
    if waits(since, patience, now):
        said = f"Slurm job {job.job_id} has started; waiting for its launcher"
        return Decision(state=JobState.QUEUED, reason=said, wake_at=since + patience)
    return incidents.opened(
        view,
        now,
        detected_by="launcher",
        reason=f"no launcher reported within {settings.watch.launcher_start_s:.0f} s of the start of its allocation",
        attempt=with_data(replace(view.attempt, nodes=job.nodes), host=job.batch_host or None),
    )


def _held(view: JobView, job: SlurmJob, why: Pending, now: float) -> Decision:
    """Say what a person has to do; the job is queued again as soon as Slurm gives another reason."""
    if why.hold:
        reason = f"Slurm holds job {job.job_id} ({job.reason}) until a person lets it go: {why.command}"
    else:
        reason = (
            f"Slurm cannot start job {job.job_id} ({job.reason}): {why.meaning}; waiting does not help. "
            f"See: {why.command}; then: transom cancel {view.job.id}, and submit again with what fits"
        )
    return _hold(view, reason, now)


def _hold(view: JobView, reason: str, now: float) -> Decision:
    """Hold the job, with an event when that begins."""
    events = () if view.state is JobState.HELD else (facts.event(view, now, "held", reason),)
    return Decision(state=JobState.HELD, reason=reason, events=events)


def _launcher_reported(view: JobView, report: LauncherReport, job: SlurmJob, now: float) -> Decision:
    nodes = job.nodes
    if not nodes:
        return stay(view, "waiting for Slurm to say which nodes the job got", wants=(Want(kind="slurm", since=now),))
    attempt = replace(view.attempt, nodes=nodes, started_at=job.start_time or now)
    attempt = with_data(attempt, host=report.host)
    if report.phase == LauncherPhase.STOPPED:
        return stay(view, f"the launcher was stopped: {report.message}", wants=(Want(kind="slurm", since=now),))
    if report.phase != LauncherPhase.GATE:
        why = "the launcher opened its gate while transomd was away"
        return Decision(state=JobState.RUNNING, reason=why, attempts=(attempt,))
    return Decision(
        state=JobState.CHECKING,
        reason=f"checking {fold(nodes)}",
        attempts=(with_data(attempt, checking_since=now),),
        events=(facts.event(view, now, "allocated", f"attempt {attempt.number} got {fold(nodes)}"),),
    )
