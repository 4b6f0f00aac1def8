"""Decisions from a failure to the next launch: diagnose, plan, fence, restart in place or by a new attempt. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob
from transom_sql.records import Attempt, Incident, Intent

from transomd.settings import Settings
from transomd.tee import detect
from transomd.tee.types import Evidence, Verdict
from transomd.tee.verdict import fuse
from transomd.tee.wire import read_verdict
from transomd.tol import facts
from transomd.tol.policy import Plan, make_plan
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay, with_data
from transomd.words import Action, Blame, FailureClass, IntentKind, IntentState, JobState, LauncherPhase


PERSONAL = "This is a transomd of your own: nodes are left out of your job, and none is drained."
"""What is added to a verdict on nodes where nothing can be drained."""


def recovering(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job with a failure."""
    moved = facts.launch_moved_on(view, now)
    if moved is not None:
        return moved
    incident = view.incident
    if incident is None:
        return facts.open_incident(view, now, detected_by="unknown", reason=view.job.reason)
    if incident.diagnosed_at is None:
        return _diagnose(view, incident, world, settings, now)
    not_before = float(incident.data.get("not_before", 0.0))
    if now < not_before:
        return stay(view, wake_at=not_before)
    return _restart(view, incident, world, settings, now)


def _diagnose(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision:
    report, launch = facts.fitting_report(view), view.launch
    silent = incident.data.get("detected_by") == "launcher-silent"
    if silent and report and view.report_at > incident.detected_at and report.phase == LauncherPhase.RUNNING:
        return _false_alarm(view, incident, now)
    if not silent and report and report.phase == LauncherPhase.RUNNING and launch and launch.epoch == incident.epoch:
        return _fence_launch(view, incident, launch.epoch, world, settings, now)
    job, wants = world.slurm.job(view.attempt), _wanted(view, incident, world)
    if wants or job is Absence.UNKNOWN or (isinstance(job, SlurmJob) and "COMPLETING" in job.status.flags):
        return stay(view, "diagnosing", wants=wants or (Want(kind="slurm", since=now),))
    if isinstance(job, SlurmJob) and facts.ended(job) and job.status.base.value == "CANCELLED":
        ending = facts.allocation_ended(view, world, job, settings, now)
        if ending.state is JobState.CANCELLED or ending.wants:
            return ending
    if isinstance(job, SlurmJob) and facts.ended(job) and job.status.base.value == "COMPLETED":
        return facts.completed(view, now)
    verdict = _verdict(view, incident, world, job, now)
    if settings.personal and verdict.nodes:
        verdict = replace(verdict, drainable=(), summary=f"{verdict.summary} {PERSONAL}")
    return _conclude(view, incident, verdict, world, now)


def _false_alarm(view: JobView, incident: Incident, now: float) -> Decision:
    closed = replace(incident, closed_at=now, data={**incident.data, "false_alarm": True})
    return Decision(
        state=JobState.RUNNING,
        reason="the launcher answers again",
        incident=closed,
        events=(facts.event(view, now, "recovered", "the launcher answers again; nothing was done"),),
    )


def _fence_launch(
    view: JobView, incident: Incident, epoch: int, world: World, settings: Settings, now: float
) -> Decision:
    """The daemon saw the failure, not the launcher: have it end the launch before anything else."""
    if view.attempt.data.get("fence") is None:
        fence = {"epoch": epoch, "reason": incident.summary}
        return stay(view, f"ending epoch {epoch}", attempts=(with_data(view.attempt, fence=fence),))
    lost = facts.allocation_lost(view, world, settings, now)
    return lost if lost is not None else stay(view, f"ending epoch {epoch}")


def _wanted(view: JobView, incident: Incident, world: World) -> tuple[Want, ...]:
    since = incident.detected_at
    wants = []
    if world.slurm.jobs is None or world.slurm.nodes is None or min(world.slurm.jobs_at, world.slurm.nodes_at) < since:
        wants.append(Want(kind="slurm", since=since))
    missing = tuple(n for n in view.attempt.nodes if n not in world.health or world.health[n].at < since)
    if missing:
        wants.append(Want(kind="probe", since=since, nodes=missing, job_id=view.job.id))
    return tuple(wants)


def _verdict(view: JobView, incident: Incident, world: World, job: SlurmJob | Absence, now: float) -> Verdict:
    report = facts.fitting_report(view)
    evidence: list[Evidence] = []
    failure = report.failure if report and report.phase == LauncherPhase.FAILED else None
    if failure and failure.epoch == incident.epoch:
        evidence += [Evidence.from_json(item) for item in failure.evidence]
    host = str(view.attempt.data.get("host", ""))
    if incident.data.get("detected_by") == "launcher-silent" and host:
        evidence.append(detect.heartbeat_lost(host, view.report_at))
    known = world.slurm.nodes or {}
    records = [known[n] for n in view.attempt.nodes if n in known]
    if isinstance(job, SlurmJob) and facts.ended(job):
        evidence += detect.slurm_job(job, records, now, ours=view.intent(facts.cancel_key(view.attempt)) is not None)
    else:
        evidence += [found for node in records if (found := detect.slurm_node(node, now))]
    for node in view.attempt.nodes:
        if node in world.health:
            evidence += facts.probe_evidence(world.health[node])
    used = tuple(view.launch.nodes) if view.launch else view.attempt.nodes
    return fuse(evidence, nodes=used, ranks_by_node=_ranks_by_node(view, used), previous=_previous(view, incident))


def _ranks_by_node(view: JobView, nodes: tuple[str, ...]) -> dict[str, range]:
    """Say which ranks run where: block by block, in the launch's order of nodes."""
    a_node = view.spec.tasks_per_node
    return {node: range(i * a_node, (i + 1) * a_node) for i, node in enumerate(nodes)}


def _previous(view: JobView, incident: Incident) -> list[Verdict]:
    """Return the verdicts on the job's earlier failures, oldest first, from our own records."""
    earlier = [i for i in view.incidents if i.id != incident.id and i.diagnosed_at is not None and i.failure_class]
    return [read_verdict(_verdict_json(i), trusted=True) for i in earlier]


def _verdict_json(incident: Incident) -> dict[str, object]:
    return {
        "failure_class": incident.failure_class,
        "blame": incident.blame,
        "action": incident.action,
        "confidence": incident.confidence,
        "summary": incident.summary,
        "nodes": list(incident.nodes),
        "ranks": list(incident.ranks),
        "evidence": [dict(e) for e in incident.evidence],
    }


def _conclude(view: JobView, incident: Incident, verdict: Verdict, world: World, now: float) -> Decision:
    earlier = [i for i in view.incidents if i.id != incident.id]
    plan = make_plan(verdict, earlier, view.launches, view.spec.policy)
    told = replace(
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
        fenced_at=_fenced_at(view, incident),
        data={
            **incident.data,
            "plan": {"action": plan.action.value, "why": plan.why},
            "not_before": now + plan.delay_s,
            "await_drain": facts.await_drain(verdict.nodes, world.health) if verdict.blame is Blame.NODE else {},
        },
    )
    said = facts.event(view, now, "verdict", f"{verdict.failure_class}, blame {verdict.blame}: {verdict.summary}")
    if plan.action is Action.NONE and verdict.failure_class is FailureClass.CANCELLED:
        return replace(facts.cancelled(view, now, verdict.summary), incident=replace(told, closed_at=now))
    if plan.action in (Action.STOP, Action.NONE):
        return _stop(view, told, plan, now)
    attempt = replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *plan.bar})))
    return stay(view, verdict.summary, incident=told, attempts=(attempt,), events=(said,))


def _fenced_at(view: JobView, incident: Incident) -> float | None:
    report = facts.fitting_report(view)
    failure = report.failure if report else None
    return failure.fenced_at if failure and failure.epoch == incident.epoch else None


def _stop(view: JobView, incident: Incident, plan: Plan, now: float) -> Decision:
    """Hand the job back to its user, and end its allocation: by the launcher, or half a minute later by scancel."""
    why = plan.why or incident.summary
    attempt = replace(with_data(view.attempt, stop=why), ended_at=now, end_reason="failed")
    return Decision(
        state=JobState.FAILED,
        reason=why,
        job={"finished_at": now},
        attempts=(attempt,),
        incident=replace(incident, acted_at=now, closed_at=now, action=Action.STOP.value),
        intents=(cancel_intent(view, now, not_before=now + 30),) if view.attempt.slurm_job_id else (),
        events=(facts.event(view, now, "failed", why),),
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


def _restart(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision:
    job, report = world.slurm.job(view.attempt), facts.fitting_report(view)
    if job is Absence.UNKNOWN:
        return stay(view, f"waiting for Slurm to answer: {world.slurm.error}", wants=(Want(kind="slurm", since=now),))
    over = job is Absence.ABSENT or (isinstance(job, SlurmJob) and facts.ended(job))
    if over or incident.data.get("plan", {}).get("new_attempt"):
        return _new_attempt(view, incident, over, now)
    if facts.launcher_silent(view, world, settings, now) or _launcher_gone(view, incident):
        return _new_launcher(view, incident, world, settings, now)
    if report is None or "order" in view.attempt.data or report.phase != LauncherPhase.FAILED:
        return stay(view)
    return _in_place(view, incident, world, now)


def _launcher_gone(view: JobView, incident: Incident) -> bool:
    silent = incident.data.get("detected_by") == "launcher-silent"
    return silent and view.report_at <= incident.detected_at


def _usable(view: JobView, world: World) -> list[str]:
    report = facts.fitting_report(view)
    alive = report.nodes if report else list(view.attempt.nodes)
    out = {*view.attempt.barred, *world.slurm.down(view.attempt.nodes)}
    return [n for n in alive if n not in out]


def _in_place(view: JobView, incident: Incident, world: World, now: float) -> Decision:
    late = _late_losses(view, incident)
    if late:
        attempt = replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *late})))
        awaiting = {**incident.data.get("await_drain", {}), **{n: [] for n in late}}
        nodes = tuple(sorted({*incident.nodes, *late}))
        more = replace(incident, nodes=nodes, data={**incident.data, "await_drain": awaiting})
        said = facts.event(view, now, "lost", f"{fold(late)} stopped answering as well")
        return stay(view, attempts=(attempt,), incident=more, events=(said,))
    usable = _usable(view, world)
    if len(usable) < view.spec.nodes:
        return _needs_new_attempt(view, incident, usable, now)
    fence = _fence(view, incident, world, now)
    if fence is not None:
        return fence
    return _order(view, incident, _choose(view, usable), now)


def _late_losses(view: JobView, incident: Incident) -> list[str]:
    report = facts.fitting_report(view)
    used = set(view.launch.nodes) if view.launch else set()
    lost = set(report.lost) & used if report else set()
    return sorted(lost - set(incident.nodes) - set(view.attempt.barred))


def _needs_new_attempt(view: JobView, incident: Incident, usable: list[str], now: float) -> Decision:
    why = f"only {len(usable)} of {view.spec.nodes} nodes are left in the allocation: a new attempt"
    plan = {**incident.data.get("plan", {}), "new_attempt": True}
    return stay(
        view,
        why,
        incident=replace(incident, data={**incident.data, "plan": plan}),
        events=(facts.event(view, now, "allocation", why),),
    )


def _fence(view: JobView, incident: Incident, world: World, now: float) -> Decision | None:
    """End what may still run on nodes that the launcher cannot reach but the probe can. None when that is settled."""
    report = facts.fitting_report(view)
    unfenced = report.failure.unfenced if report and report.failure else []
    reachable = sorted(n for n in unfenced if n in world.health and world.health[n].reached)
    if not reachable:
        return None
    key = f"fence:{view.job.id}:{incident.id}"
    intent = view.intent(key)
    if intent is not None:
        return stay(view, f"fencing {fold(reachable)}") if intent.state == IntentState.PENDING else None
    wanted = Intent(
        key=key,
        kind=IntentKind.FENCE.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=view.job.id,
        incident_id=incident.id,
        args={"nodes": reachable, "epoch": incident.epoch, "job_id": view.job.id},
    )
    return stay(view, f"fencing {fold(reachable)}", intents=(wanted,))


def _choose(view: JobView, usable: list[str]) -> list[str]:
    """Keep the nodes of the last launch (their memory holds the newest state), then fill up with spares."""
    before = set(view.launch.nodes) if view.launch else set()
    return sorted(sorted(usable, key=lambda n: n not in before)[: view.spec.nodes])


def _order(view: JobView, incident: Incident, nodes: list[str], now: float) -> Decision:
    epoch = facts.next_epoch(view)
    new = sorted(set(nodes) - set(view.launch.nodes if view.launch else ()))
    with_spares = f", with {fold(new)} from the spares" if new and view.launch else ""
    attempt = with_data(view.attempt, order=facts.order(view, epoch, nodes), fence=None)
    return stay(
        view,
        f"restarting in place on {fold(nodes)}",
        job={"epoch": epoch},
        attempts=(attempt,),
        incident=replace(incident, fenced_at=incident.fenced_at or now),
        events=(facts.event(view, now, "restart", f"epoch {epoch} restarts in place on {fold(nodes)}{with_spares}"),),
    )


def _new_launcher(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision:
    """The launcher's node is gone (or the launcher is): start another one on a node that is left."""
    attempt = view.attempt
    host = str(attempt.data.get("host", ""))
    key = f"launcher:{view.job.id}:{attempt.number}:{attempt.generation}"
    intent = view.intent(key)
    if attempt.generation > 1 and intent is not None:
        if intent.state == IntentState.PENDING:
            return stay(view, "starting another launcher")
        started = intent.finished_at or now
        if intent.state == IntentState.DONE and now < started + settings.watch.launcher_silence_s:
            return stay(view, "waiting for the new launcher", wake_at=started + settings.watch.launcher_silence_s)
    tried = {host, *attempt.data.get("hosts_tried", [])}
    hosts = [n for n in _reachable(view, world) if n not in tried]
    if not hosts:
        return _needs_new_attempt(view, incident, [], now)
    return _order_launcher(view, incident, hosts[0], sorted(tried - {""}), now)


def _reachable(view: JobView, world: World) -> list[str]:
    """Nodes of the allocation that no one doubts: those the probe reached first."""
    out = {*view.attempt.barred, *world.slurm.down(view.attempt.nodes)}
    left = [n for n in view.attempt.nodes if n not in out and not world.slurm.silent(n)]
    return sorted(left, key=lambda n: not (n in world.health and world.health[n].reached))


def _order_launcher(view: JobView, incident: Incident, host: str, tried: list[str], now: float) -> Decision:
    attempt: Attempt = replace(view.attempt, generation=view.attempt.generation + 1)
    intent = Intent(
        key=f"launcher:{view.job.id}:{attempt.number}:{attempt.generation}",
        kind=IntentKind.LAUNCHER.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=view.job.id,
        incident_id=incident.id,
        args={"host": host, "generation": attempt.generation, "slurm_job_id": attempt.slurm_job_id},
    )
    return stay(
        view,
        f"starting another launcher on {host}",
        attempts=(with_data(attempt, host=host, hosts_tried=tried, order=None),),
        intents=(intent,),
        events=(facts.event(view, now, "launcher", f"launcher {attempt.generation} starts on {host}"),),
    )


def _new_attempt(view: JobView, incident: Incident, over: bool, now: float) -> Decision:
    if not over:
        cancel = view.intent(facts.cancel_key(view.attempt))
        intents = () if cancel is not None else (cancel_intent(view, now),)
        return stay(
            view,
            f"ending Slurm job {view.attempt.slurm_job_id} before a new attempt",
            intents=intents,
            wants=(Want(kind="slurm", since=now),),
        )
    limit = view.spec.policy.max_attempts
    if view.attempt.number >= limit:
        plan = Plan(action=Action.STOP, why=f"attempt budget used up: {limit} of {limit}")
        return _stop(view, incident, plan, now)
    old = replace(view.attempt, ended_at=now, end_reason=incident.summary)
    new = next_attempt(view, now)
    return Decision(
        state=JobState.QUEUED,
        reason=f"attempt {new.number} is being submitted",
        job={"attempt": new.number},
        attempts=(old, new),
        incident=replace(incident, fenced_at=incident.fenced_at or now),
        intents=(submit_intent(new, now),),
        events=(
            facts.event(
                view,
                now,
                "attempt",
                f"attempt {new.number}" + (f" without {fold(new.excluded)}" if new.excluded else ""),
            ),
        ),
    )


def next_attempt(view: JobView, now: float) -> Attempt:
    """Return the record of the attempt after the current one, without the nodes that were barred."""
    number = view.attempt.number + 1
    excluded = tuple(sorted({*view.attempt.excluded, *view.attempt.barred}))
    tag = f"{view.attempt.tag.rsplit('-', 1)[0]}-{number}"
    return Attempt(job_id=view.job.id, number=number, tag=tag, created_at=now, excluded=excluded)


def submit_intent(attempt: Attempt, now: float) -> Intent:
    """Return the intent that submits an attempt."""
    return Intent(
        key=facts.submit_key(attempt),
        kind=IntentKind.SUBMIT.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=attempt.job_id or None,
        args={"attempt": attempt.number, "tag": attempt.tag, "excluded": list(attempt.excluded)},
    )
