"""Decisions from a failure to its verdict: wait for what is worth waiting for, fuse the evidence, make a plan. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transom_slurm.types import NOTICE_SLACK_S, JobBase, SlurmJob
from transom_sql.records import Incident

from transomd.settings import Settings
from transomd.tee import detect
from transomd.tee.case import by_address
from transomd.tee.types import Evidence, Verdict
from transomd.tee.verdict import fuse
from transomd.tee.wire import read_verdict
from transomd.tol import endings, facts, rollback
from transomd.tol.policy import Plan, has_worked, make_plan
from transomd.tol.submission import WARN_BEFORE_LIMIT_S
from transomd.tol.view import Absence, Decision, JobView, Want, World, merged, stay, waits, with_data
from transomd.words import Action, Blame, FailureClass, JobState, LauncherPhase, Role

LIMIT_SLACK_S = 90.0
"""Slurm looks at time limits every half minute, and sends the warning up to a minute early (sbatch(1), --signal)."""

PERSONAL = "This is a transomd of your own: nodes are left out of your job, and none is drained."
"""What is added to a verdict on nodes where nothing can be drained."""
LOST_PATIENCE_S = 3.0
"""How long a node that others do not hear may take to answer the probe: it most likely never will."""


def diagnose(
    view: JobView, incident: Incident, job: SlurmJob | Absence, world: World, settings: Settings, now: float
) -> Decision:
    """Decide for an incident without a verdict: what is to be found out first, or the verdict and the plan."""
    if job is Absence.UNKNOWN:
        return stay(view, f"diagnosing; {facts.why_unknown(view, world)}", wants=(Want(kind="slurm", since=now),))
    if isinstance(job, SlurmJob) and "COMPLETING" in job.status.flags:
        return stay(view, "diagnosing; Slurm is ending the job", wants=(Want(kind="slurm", since=now),))
    opened = float(incident.data.get("opened_at", incident.detected_at))
    if opened - now > _patience(settings):
        # The clock was set back meanwhile: what was seen lately counts, and nothing more is waited for.
        opened = now - _patience(settings)
    wants = tuple(_wanted(view, world, settings, opened, now))
    if wants:
        soon = opened + LOST_PATIENCE_S
        return stay(view, "diagnosing", wants=wants, wake_at=soon if now < soon else opened + _patience(settings))
    if isinstance(job, SlurmJob) and job.is_given_notice and now < (job.ends_by or 0.0) + NOTICE_SLACK_S:
        # What it ended of is that notice, and a launch that is begun now is lost.
        words = f"diagnosing; Slurm takes the nodes of job {job.job_id} for another; waiting for its end"
        return stay(view, words, wants=(Want(kind="slurm", since=now),), wake_at=job.ends_by)
    verdict = _verdict(view, incident, world, job, now)
    if settings.personal and verdict.nodes:
        verdict = replace(verdict, drainable=(), summary=f"{verdict.summary} {PERSONAL}")
    return _conclude(view, incident, verdict, world, job, now)


def _patience(settings: Settings) -> float:
    return settings.health.gate_timeout_s


def _wanted(view: JobView, world: World, settings: Settings, since: float, now: float) -> Iterator[Want]:
    slurm = world.slurm
    if slurm.jobs is None or slurm.nodes is None or min(slurm.jobs_at, slurm.nodes_at) < since:
        yield Want(kind="slurm", since=since)
    missing = [n for n in view.attempt.nodes if n not in facts.probed(world, [n], since)]
    gone = _not_heard(view, world)
    due = [n for n in missing if waits(since, LOST_PATIENCE_S if n in gone else _patience(settings), now)]
    if due:
        yield Want(kind="probe", since=since, nodes=tuple(missing), job_id=view.job.id)


def _not_heard(view: JobView, world: World) -> set[str]:
    report = facts.fitting_report(view)
    return {n for n in view.attempt.nodes if world.slurm.silent(n)} | set(report.lost if report else ())


def _verdict(view: JobView, incident: Incident, world: World, job: SlurmJob | Absence, now: float) -> Verdict:
    nodes = view.attempt.nodes
    used = facts.last_nodes(view) or nodes
    a_node = view.spec.tasks_per_node
    ranks = {node: range(i * a_node, (i + 1) * a_node) for i, node in enumerate(used)}
    evidence = [*_from_launcher(view, incident), *_from_slurm(view, world, job, now)]
    for node in facts.probed(world, nodes, float(incident.data.get("opened_at", 0.0))).values():
        evidence += detect.probe(node)
    known = world.slurm.nodes or {}
    addresses = by_address({node: known[node].address for node in used if node in known})
    earlier = list(_previous(view, incident))
    ran = any(has_worked(launch) for launch in view.launches)
    return fuse(evidence, nodes=used, ranks_by_node=ranks, previous=earlier, addresses=addresses, has_run=ran)


def _from_launcher(view: JobView, incident: Incident) -> Iterator[Evidence]:
    report = facts.fitting_report(view)
    failure = report.failure if report and report.phase == LauncherPhase.FAILED else None
    told = list(facts.readable(failure.evidence)) if failure is not None and failure.epoch == incident.epoch else []
    yield from (e for e in told if e.source != "heartbeat")
    if report is not None:
        # The launcher ends a launch for the first node that it misses; others may follow while it does so.
        lost = dict.fromkeys(set(report.lost) & set(facts.last_nodes(view)), report.at)
        since = {e.node: e.at for e in told if e.source == "heartbeat" and e.node and e.at is not None}
        yield from detect.silent({**lost, **since}, report.host)
    host = facts.host_of(view)
    if incident.data.get("detected_by") == "launcher-silent" and host:
        yield detect.heartbeat_lost(host, view.report_at)


def _from_slurm(view: JobView, world: World, job: SlurmJob | Absence, now: float) -> Iterator[Evidence]:
    known = world.slurm.nodes or {}
    records = [known[n] for n in view.attempt.nodes if n in known]
    if isinstance(job, SlurmJob) and facts.ended(job):
        yield from detect.slurm_job(job, records, now, ours=facts.ended_by_us(view, world))
        if _warned_of_limit(view, job):
            yield _time_limit(job, now)
    else:
        yield from (found for node in records if (found := detect.slurm_node(node, now)))


def _warned_of_limit(view: JobView, job: SlurmJob) -> bool:
    """Whether the launcher ended on the warning before the time limit: Slurm then calls the job FAILED, not TIMEOUT."""
    if job.status.base is not JobBase.FAILED or None in (job.time_limit_s, job.start_time, job.end_time):
        return False
    assert job.time_limit_s is not None
    assert job.start_time is not None
    assert job.end_time is not None
    warn = min(WARN_BEFORE_LIMIT_S, job.time_limit_s // 4)
    return job.end_time - job.start_time >= job.time_limit_s - warn - LIMIT_SLACK_S and _told_to_stop(job)


def _told_to_stop(job: SlurmJob) -> bool:
    return job.exit is not None and (job.exit.code == 143 or job.exit.signal == 15)


def _time_limit(job: SlurmJob, now: float) -> Evidence:
    return Evidence(
        source="slurm",
        signature="SLURM-TIMEOUT",
        text=f"Slurm job {job.job_id} was warned of its time limit and ended ({job.state_text})",
        role=Role.ROOT,
        failure_class=FailureClass.TIME_LIMIT,
        blame=Blame.EXTERNAL,
        action=Action.RESTART,
        at=job.end_time or now,
        forgeable=False,
    )


def _previous(view: JobView, incident: Incident) -> Iterator[Verdict]:
    """Return the verdicts on the job's earlier failures, oldest first, from our own records."""
    for earlier in view.incidents:
        if earlier.id != incident.id and earlier.failure_class and earlier.action and earlier.confidence:
            yield read_verdict(
                {
                    "failure_class": earlier.failure_class,
                    "blame": earlier.blame,
                    "action": earlier.action,
                    "confidence": earlier.confidence,
                    "summary": earlier.summary,
                    "nodes": list(earlier.nodes),
                    "ranks": list(earlier.ranks),
                    "evidence": [dict(e) for e in earlier.evidence],
                },
                trusted=True,
            )


def _conclude(
    view: JobView, incident: Incident, verdict: Verdict, world: World, job: SlurmJob | Absence, now: float
) -> Decision:
    earlier = [i for i in view.incidents if i.id != incident.id]
    closed = facts.closed_launches(view, incident.epoch, incident.detected_at, verdict.summary)
    launches = merged(view, view.job, (), closed).launches
    way = rollback.way_back(view, launches, earlier)
    plan = make_plan(verdict, earlier, launches, view.spec.policy, way)
    told = _told(view, incident, verdict, plan, world, now)
    said = [facts.event(view, now, "verdict", f"{verdict.failure_class}, blame {verdict.blame}: {verdict.summary}")]
    if plan.said:
        said.append(facts.event(view, now, "rollback", plan.said, source=way.source, step=plan.resume_step))
    if plan.action is Action.NONE:
        ended = endings.cancelled(view, now, verdict.summary)
        over = isinstance(job, SlurmJob) and facts.ended(job)
        end = () if over or job is Absence.ABSENT else (endings.cancel_intent(view, now),)
        return replace(ended, incident=replace(told, closed_at=now), intents=end)
    if plan.action is Action.STOP:
        return stop(view, told, plan.why, now)
    attempt = replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *plan.bar})))
    back = plan.resume_step
    changes = {} if back is None else {"data": rollback.turned_back(view, back, incident.epoch)}
    reason = f"{verdict.summary} {plan.said[0].upper()}{plan.said[1:]}." if plan.said else verdict.summary
    return stay(view, reason, job=changes, incident=told, attempts=(attempt,), launches=closed, events=tuple(said))


def _told(view: JobView, incident: Incident, verdict: Verdict, plan: Plan, world: World, now: float) -> Incident:
    """Return the incident with its verdict and plan."""
    report = facts.fitting_report(view)
    failure = report.failure if report else None
    blamed = verdict.blame is Blame.NODE
    # A probe from before the failure says how a node was: it may have been seen to since, and gone silent now.
    seen = facts.probed(world, verdict.nodes, float(incident.data.get("opened_at", 0.0)))
    return replace(
        incident,
        failure_class=verdict.failure_class.value,
        blame=verdict.blame.value,
        action=(Action.DRAIN if verdict.drainable and plan.action is Action.EXCLUDE else plan.action).value,
        nodes=verdict.nodes,
        ranks=verdict.ranks,
        confidence=verdict.confidence.value,
        summary=verdict.summary,
        evidence=tuple(e.to_json() for e in verdict.evidence),
        diagnosed_at=now,
        fenced_at=failure.fenced_at if failure and failure.epoch == incident.epoch else None,
        data={
            **incident.data,
            "plan": {"action": plan.action.value, "why": plan.why, "resume_step": plan.resume_step},
            "not_before": now + plan.delay_s,
            "lost": sorted(set(report.lost)) if report else [],
            "await_drain": facts.await_drain(verdict.nodes, seen) if blamed else {},
        },
    )


def stop(view: JobView, incident: Incident, why: str, now: float) -> Decision:
    """Hand the job back to its user, and end its allocation: by the launcher, or half a minute later by scancel."""
    attempt = replace(with_data(view.attempt, stop=why), ended_at=now, end_reason="failed")
    return Decision(
        state=JobState.FAILED,
        reason=why,
        job={"finished_at": now},
        attempts=(attempt,),
        launches=facts.closed_launches(view, view.job.epoch, incident.detected_at, incident.summary, over=True),
        incident=replace(incident, acted_at=now, closed_at=now, action=Action.STOP.value),
        intents=(endings.cancel_intent(view, now, not_before=now + endings.LEAVE_BATCH_S),)
        if view.attempt.slurm_job_id
        else (),
        events=(facts.event(view, now, "failed", why),),
    )
