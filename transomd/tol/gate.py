"""Decisions from submission to the first launch: queued, checked, gate open. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob
from transom_sql.records import Attempt, Event, Incident

from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tol import facts
from transomd.tol.prologs import culprits, held_for_launch
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay, with_data
from transomd.words import Action, Blame, FailureClass, IntentState, JobState, LauncherPhase, Outcome


def waiting_for_slurm_job(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job whose attempt has no launcher yet."""
    attempt = view.attempt
    if attempt.slurm_job_id is None:
        return _submission(view, now)
    report = facts.fitting_report(view)
    if report is not None:
        return _launcher_reported(view, world, now)
    job = world.slurm.job(attempt)
    if job is Absence.UNKNOWN:
        return stay(view, f"waiting for Slurm to answer: {world.slurm.error}")
    if isinstance(job, SlurmJob) and held_for_launch(job):
        return _held_for_launch(view, world, job, now)
    if isinstance(job, SlurmJob) and not facts.ended(job):
        return _waiting(view, job, settings, now)
    return facts.allocation_ended(view, world, job, settings, now)


def _held_for_launch(view: JobView, world: World, job: SlurmJob, now: float) -> Decision:
    """Replace an attempt that Slurm holds for a failed prolog: released, it would wait two minutes, and come back."""
    bad = culprits(view, world, job)
    where = f" after the prolog of {fold(bad)} failed" if bad else ""
    opened = facts.open_incident(
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


def _submission(view: JobView, now: float) -> Decision:
    intent = view.intent(facts.submit_key(view.attempt))
    if intent is None or intent.state == IntentState.PENDING:
        why = str(intent.outcome.get("error", "")) if intent else ""
        return stay(view, f"submitting to Slurm{': ' + why if why else ''}")
    if intent.state != IntentState.DONE:
        return Decision(
            state=JobState.FAILED,
            reason=f"Slurm refused the job: {intent.outcome.get('error', 'no reason recorded')}",
            job={"finished_at": now},
        )
    job_id = int(intent.outcome["slurm_job_id"])
    attempt = replace(
        view.attempt, slurm_job_id=job_id, slurm_submit_time=intent.outcome.get("submit_time"), generation=1
    )
    return Decision(
        state=JobState.QUEUED,
        reason=f"Slurm job {job_id} is queued",
        attempts=(attempt,),
        events=(facts.event(view, now, "queued", f"attempt {attempt.number} is Slurm job {job_id}"),),
    )


def _waiting(view: JobView, job: SlurmJob, settings: Settings, now: float) -> Decision:
    started = job.start_time
    if job.status.base.value != "RUNNING" or started is None:
        return stay(view, f"Slurm job {job.job_id} is {job.state_text.lower()}: {job.reason or 'no reason given'}")
    deadline = started + settings.watch.launcher_start_s
    if now < deadline:
        return stay(view, f"Slurm job {job.job_id} has started; waiting for its launcher", wake_at=deadline)
    return facts.open_incident(
        view,
        now,
        detected_by="launcher",
        reason=f"no launcher reported within {settings.watch.launcher_start_s:.0f} s of the start of its allocation",
        attempt=replace(view.attempt, nodes=job.nodes),
    )


def _launcher_reported(view: JobView, world: World, now: float) -> Decision:
    report = facts.fitting_report(view)
    assert report is not None
    nodes = facts.allocated(view, world)
    attempt = replace(view.attempt, nodes=nodes, started_at=view.attempt.started_at or now)
    attempt = with_data(attempt, host=report.host)
    if report.phase != LauncherPhase.GATE:
        return Decision(
            state=JobState.RUNNING, reason="the launcher opened its gate while transomd was away", attempts=(attempt,)
        )
    return Decision(
        state=JobState.CHECKING,
        reason=f"checking {fold(nodes)}",
        attempts=(with_data(attempt, checking_since=now),),
        events=(facts.event(view, now, "allocated", f"attempt {attempt.number} got {fold(nodes)}"),),
    )


def checking(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job that has its nodes and a closed gate."""
    early = facts.launch_moved_on(view, now) or facts.allocation_lost(view, world, settings, now)
    if early is not None:
        return early
    attempt, report = view.attempt, facts.fitting_report(view)
    if report is None or "order" in attempt.data:
        return stay(view)
    since = float(attempt.data.get("checking_since", now))
    found, want = _probed(view, world, since)
    if want is not None:
        return stay(view, f"checking {fold(attempt.nodes)}", wants=(want,))
    unfit = _unfit(view, found)
    fresh = {node: why for node, why in unfit.items() if node not in attempt.barred}
    if fresh:
        return _bar(view, found, fresh, now)
    usable = [n for n in report.nodes if n not in attempt.barred and n not in world.slurm.down(attempt.nodes)]
    if len(usable) < view.spec.nodes:
        return _too_few(view, report.lost, usable, settings, now)
    return _collective(view, world, _best(usable, found), since, now)


def _probed(view: JobView, world: World, since: float) -> tuple[dict[str, NodeReport], Want | None]:
    if not view.spec.health.probe:
        return {}, None
    nodes = view.attempt.nodes
    found = {n: world.health[n] for n in nodes if n in world.health and world.health[n].at >= since}
    missing = tuple(n for n in nodes if n not in found)
    return found, Want(kind="probe", since=since, nodes=missing, job_id=view.job.id) if missing else None


def _unfit(view: JobView, found: dict[str, NodeReport]) -> dict[str, str]:
    report = facts.fitting_report(view)
    local = dict(report.unfit) if report else {}
    probed = {
        node: "; ".join(f"{r.check}: {r.evidence or r.value}" for r in result.unfit)
        for node, result in found.items()
        if result.outcome is Outcome.UNFIT
    }
    return {**local, **probed}


def _bar(view: JobView, found: dict[str, NodeReport], unfit: dict[str, str], now: float) -> Decision:
    names = tuple(sorted(unfit))
    attempt = replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *names})))
    why = "; ".join(f"{node}: {reason}" for node, reason in sorted(unfit.items()))
    evidence = tuple(e.to_json() for node in names if node in found for e in facts.probe_evidence(found[node]))
    incident = Incident(
        job_id=view.job.id,
        attempt=attempt.number,
        epoch=view.job.epoch,
        detected_at=now,
        diagnosed_at=now,
        acted_at=now,
        closed_at=now,
        failure_class=(evidence[0].get("failure_class") if evidence else None) or FailureClass.HOST.value,
        blame=Blame.NODE.value,
        action=Action.EXCLUDE.value,
        nodes=names,
        confidence="high",
        summary=f"Found unfit before the start: {why}. The job goes on without {fold(names)}.",
        evidence=evidence,
        data={"restart": False, "await_drain": facts.await_drain(names, found), "at_gate": True},
    )
    return stay(
        view,
        f"leaving out {fold(names)}",
        attempts=(attempt,),
        incident=incident,
        events=tuple(
            Event(at=now, kind="unfit", job_id=view.job.id, node=n, message=f"{n} is unfit: {unfit[n]}") for n in names
        ),
    )


def _too_few(view: JobView, lost: list[str], usable: list[str], settings: Settings, now: float) -> Decision:
    patience = float(view.attempt.data.get("checking_since", now)) + settings.watch.launcher_start_s
    waiting_for = [n for n in view.attempt.nodes if n in lost and n not in view.attempt.barred]
    if waiting_for and now < patience:
        return stay(view, f"waiting for the agents on {fold(waiting_for)}", wake_at=patience)
    bar = tuple(sorted({*view.attempt.barred, *waiting_for}))
    return facts.open_incident(
        view,
        now,
        detected_by="gate",
        reason=f"only {len(usable)} of {view.spec.nodes} nodes are fit; {fold(bar)} left out",
        attempt=replace(view.attempt, barred=bar),
        plan={"action": Action.EXCLUDE.value, "new_attempt": True},
    )


def _best(usable: list[str], found: dict[str, NodeReport]) -> list[str]:
    """Nodes found fit first, in the allocation's order; those that could not be looked at last."""
    return sorted(usable, key=lambda n: n in found and found[n].outcome is not Outcome.FIT)


def _collective(view: JobView, world: World, nodes: list[str], since: float, now: float) -> Decision:
    chosen = sorted(nodes[: view.spec.nodes])
    if not view.spec.health.collective or len(chosen) < 2:
        return open_gate(view, chosen, now)
    key = f"{view.job.id}:{view.attempt.number}:{fold(chosen)}"
    done = world.collectives.get(key)
    if done is None or done.at < since:
        want = Want(kind="collective", since=since, nodes=tuple(chosen), key=key, job_id=view.job.id)
        return stay(view, f"all-reduce over {fold(chosen)}", wants=(want,))
    if done.outcome is Outcome.FIT:
        speed = f", {done.bus_gbps:.2f} GB/s" if done.bus_gbps is not None else ""
        said = f"all-reduce over {fold(chosen)} passed in {done.seconds:.1f} s ({done.backend}{speed})"
    else:
        said = f"the all-reduce over {fold(chosen)} did not pass, which names no node: {done.error or 'no error given'}"
    return open_gate(view, chosen, now, extra=facts.event(view, now, "collective", said))


def open_gate(view: JobView, nodes: list[str], now: float, *, extra: Event | None = None) -> Decision:
    """Order the first launch of an attempt."""
    epoch = facts.next_epoch(view)
    attempt: Attempt = with_data(view.attempt, order=facts.order(view, epoch, nodes))
    opened = facts.event(view, now, "gate", f"gate open: epoch {epoch} starts on {fold(nodes)}")
    return stay(
        view,
        f"starting on {fold(nodes)}",
        job={"epoch": epoch},
        attempts=(attempt,),
        events=tuple(e for e in (extra, opened) if e is not None),
    )
