"""Decisions from a verdict to the next launch: fence, restart in place, or a new attempt. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob
from transom_sql.records import Incident, Intent

from transomd.settings import Settings
from transomd.tol import endings, facts, incidents, launches
from transomd.tol.attempts import next_attempt, submit_intent
from transomd.tol.diagnose import diagnose, stop
from transomd.tol.lingering import stuck_nodes
from transomd.tol.policy import BACKOFF_S
from transomd.tol.relaunch import give_up, new_launcher
from transomd.tol.rollback import from_step
from transomd.tol.view import Absence, Decision, JobView, Want, World, stay, waits, with_data
from transomd.words import FailureClass, IntentKind, IntentState, JobState, LauncherPhase

PATIENCE = 3
"""So many times the launcher's permitted silence is waited once more, while Slurm and SSH both reach its node."""
FENCED = "fenced"
"""The word of :class:`transomd.tol.act.Reach` for a node on which nothing of the job runs any more."""


def recovering(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job with a failure."""
    moved = launches.moved_on(view, now)
    if moved is not None and not (_ending(view) and moved.state is JobState.RUNNING):
        return moved
    incident = view.incident
    if incident is None:
        return incidents.opened(view, now, detected_by="unknown", reason=view.job.reason)
    job = facts.slurm_job(view, world, now)
    over = job is Absence.ABSENT or (isinstance(job, SlurmJob) and facts.ended(job))
    end = endings.final_end(view, world, job, now) if isinstance(job, SlurmJob) and over else None
    if end is not None:
        return end
    if not over:
        first = _launcher_first(view, incident, world, settings, now)
        if first is not None:
            return first
    if incident.diagnosed_at is None and not over:
        patient = _patient(view, incident, world, settings, now)
        if patient is not None:
            return patient
    if incident.diagnosed_at is None:
        return diagnose(view, incident, job, world, settings, now)
    not_before = float(incident.data.get("not_before", 0.0))
    delay_s = not_before - incident.diagnosed_at
    if waits(incident.diagnosed_at, delay_s, now):
        return stay(view, wake_at=not_before)
    return _restart(view, incident, job, world, settings, now)


def _launcher_first(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision | None:
    """Settle what the launcher is doing before anything is concluded; None when that is clear."""
    report, launch = facts.fitting_report(view), view.launch
    silent = facts.launcher_silent(view, world, settings, now)
    if report is None and not silent:
        # This daemon has just come back: what the launcher knows of the failure is worth waiting for.
        return stay(view, "waiting for the launcher's report", wake_at=facts.silent_at(view, world, settings))
    if report is None or launch is None or report.phase != LauncherPhase.RUNNING or launch.epoch > incident.epoch:
        return None
    if incident.data.get("detected_by") == "launcher-silent":
        alive = view.report_at > _opened(incident) and not _ending(view)
        return _false_alarm(view, incident, now) if alive else None
    return None if silent else _end_launch(view, incident, launch.epoch, settings, now)


def _patient(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision | None:
    """A silent launcher whose node answers may be alive, its program healthy, and only its way to transomd cut.

    slurmd would have told of the end of a batch script; it does not tell of that of a launcher that took over.
    """
    host, patience = facts.host_of(view), PATIENCE * settings.watch.launcher_silence_s
    patient = waits(_opened(incident), patience, now)
    silent = incident.data.get("detected_by") == "launcher-silent" and view.report_at <= _opened(incident)
    if not silent or view.attempt.generation > 1 or world.slurm.silent(host) or (not patient and not world.deaf):
        return None
    found = facts.probed(world, [host], _opened(incident)).get(host)
    if found is None or not found.reached:
        return None
    words = f"the launcher on {host} is silent, but its node answers; waiting for it"
    return stay(view, words, wake_at=max(_opened(incident) + patience, now + settings.watch.report_s))


def _opened(incident: Incident) -> float:
    return float(incident.data.get("opened_at", incident.detected_at))


def _false_alarm(view: JobView, incident: Incident, now: float) -> Decision:
    data = {**incident.data, "false_alarm": True, "await_drain": {}}
    barred = tuple(n for n in view.attempt.barred if n not in incident.nodes)
    return Decision(
        state=JobState.RUNNING,
        reason="the launcher answers again",
        incident=replace(incident, closed_at=now, data=data),
        attempts=(replace(view.attempt, barred=barred),),
        events=(facts.event(view, now, "recovered", "the launcher answers again; nothing was done"),),
    )


def _end_launch(view: JobView, incident: Incident, epoch: int, settings: Settings, now: float) -> Decision | None:
    """The daemon saw the failure, not the launcher: have it end the launch before anything else. None: it does not."""
    fence = view.attempt.data.get("fence")
    if fence is None or fence["epoch"] != epoch:
        fence = {"epoch": epoch, "reason": incident.summary, "at": now}
        return stay(view, f"ending epoch {epoch}", attempts=(with_data(view.attempt, fence=fence),))
    since, patience = float(fence["at"]), settings.watch.launcher_start_s
    return stay(view, f"ending epoch {epoch}", wake_at=since + patience) if waits(since, patience, now) else None


def _restart(
    view: JobView, incident: Incident, job: SlurmJob | Absence, world: World, settings: Settings, now: float
) -> Decision:
    over = job is Absence.ABSENT or (isinstance(job, SlurmJob) and facts.ended(job))
    if over:
        return _new_attempt(view, incident, world, now)
    requeued = isinstance(job, SlurmJob) and facts.requeued(job)
    if incident.data.get("plan", {}).get("new_attempt") or requeued or _ending(view):
        return _end_allocation(view, now)
    if job is Absence.UNKNOWN:
        return stay(view, facts.why_unknown(view, world), wants=(Want(kind="slurm", since=now),))
    report = facts.fitting_report(view)
    if report is None or facts.launcher_silent(view, world, settings, now) or _launcher_gone(view, incident):
        return new_launcher(view, incident, world, settings, now)
    if "order" in view.attempt.data:
        since, patience = float(view.attempt.data.get("ordered_at", now)), settings.watch.launcher_start_s
        late = f"the launcher did not start epoch {view.job.epoch} in time"
        return (
            stay(view, wake_at=since + patience) if waits(since, patience, now) else give_up(view, incident, late, now)
        )
    if report.phase in (LauncherPhase.GATE, LauncherPhase.FAILED):
        return _in_place(view, incident, world, settings, now)
    if report.phase == LauncherPhase.RUNNING:
        return give_up(view, incident, f"the launcher did not end epoch {incident.epoch} in time", now)
    return stay(view, "waiting for Slurm to end the job", wants=(Want(kind="slurm", since=now),))


def _launcher_gone(view: JobView, incident: Incident) -> bool:
    silent = incident.data.get("detected_by") == "launcher-silent"
    return silent and view.report_at <= _opened(incident)


# --- in place ---------------------------------------------------------------------------------------------------------


def _in_place(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision:
    if facts.host_of(view) in world.slurm.down(view.attempt.nodes):
        # Its node may live, cut off from Slurm alone: srun hangs there, and slurmd will end it when it comes back.
        return new_launcher(view, incident, world, settings, now)
    late = _left_out_late(view, incident, world, now)
    if late is not None:
        return late
    fence = _fence(view, incident, world, now)
    if fence is not None:
        return fence
    out = {*view.attempt.barred, *world.slurm.down(view.attempt.nodes)}
    usable = [n for n in facts.alive(view) if n not in out]
    if len(usable) < view.spec.nodes:
        return give_up(view, incident, f"only {len(usable)} of {view.spec.nodes} nodes are left", now)
    return _order(view, incident, _choose(view, usable), now)


def _left_out_late(view: JobView, incident: Incident, world: World, now: float) -> Decision | None:
    """Leave out nodes that were lost after the verdict, and any that was found unfit since; None when there is none."""
    report = facts.fitting_report(view)
    lost = set(report.lost if report else ()) & set(facts.last_nodes(view))
    lost -= {*incident.nodes, *incident.data.get("lost", [])}
    found = facts.probed(world, view.attempt.nodes, _opened(incident))
    unfit = {n: why for n, why in facts.unfit(view, found).items() if n not in view.attempt.barred}
    words = {**dict.fromkeys(lost, "stopped answering as well"), **unfit}
    if not words:
        return None
    late = sorted(words)
    awaiting = {**incident.data.get("await_drain", {}), **facts.await_drain(late, found)}
    awaiting = facts.without_many_silent(awaiting)
    more = tuple(sorted({*incident.nodes, *late}))
    return stay(
        view,
        attempts=(replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *late}))),),
        incident=replace(incident, nodes=more, data={**incident.data, "await_drain": awaiting}),
        events=tuple(replace(facts.event(view, now, "lost", f"{n}: {words[n]}"), node=n) for n in late),
    )


def _fence(view: JobView, incident: Incident, world: World, now: float) -> Decision | None:
    """End what may still run on nodes that the launcher could not clear. None when that is settled.

    A node that cannot be fenced is barred, and the epoch keeps its late writes out.
    """
    report = facts.fitting_report(view)
    unfenced = set(report.failure.unfenced if report and report.failure else ()) & set(view.attempt.nodes)
    reachable = {n for n in unfenced if n in world.health and world.health[n].reached}
    decision, fenced = _fenced(view, incident, reachable, now)
    stuck = sorted(unfenced - fenced - set(view.attempt.barred))
    if decision is not None or not stuck:
        return decision
    barred = tuple(sorted({*view.attempt.barred, *stuck}))
    said = facts.event(view, now, "fence", f"{fold(stuck)} could not be fenced; left out of this attempt")
    return stay(view, attempts=(replace(view.attempt, barred=barred),), events=(said,))


def _fenced(
    view: JobView, incident: Incident, nodes: Iterable[str], now: float
) -> tuple[Decision | None, frozenset[str]]:
    """Have nodes fenced; return what to do meanwhile, and those that are fenced."""
    names = sorted(nodes)
    if not names:
        return None, frozenset()
    key = f"fence:{view.job.id}:{incident.id}:{fold(names)}"
    intent = view.intent(key)
    if intent is not None and intent.state != IntentState.PENDING:
        words = intent.outcome.get("nodes", {})
        return None, frozenset(n for n, word in words.items() if word == FENCED)
    wanted = Intent(
        key=key,
        kind=IntentKind.FENCE.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=view.job.id,
        incident_id=incident.id,
        args={"nodes": names, "epoch": max(incident.epoch, view.job.epoch), "job_id": view.job.id},
    )
    return stay(view, f"fencing {fold(names)}", intents=() if intent is not None else (wanted,)), frozenset()


def _choose(view: JobView, usable: list[str]) -> list[str]:
    """Keep the nodes of the last launch (their memory holds the newest state), then fill up with spares."""
    before = set(facts.last_nodes(view))
    return sorted(usable, key=lambda n: n not in before)[: view.spec.nodes]


def _order(view: JobView, incident: Incident, nodes: list[str], now: float) -> Decision:
    epoch = facts.next_epoch(view)
    before = facts.last_nodes(view)
    new = set(nodes) - set(before)
    how = f", with {fold(new)} from the spares" if new and before else ""
    how += from_step(view.job.data)
    return stay(
        view,
        f"restarting in place on {fold(nodes)}{from_step(view.job.data)}",
        job={"epoch": epoch},
        attempts=(facts.ordered(view, epoch, nodes, now),),
        incident=replace(incident, fenced_at=incident.fenced_at or now),
        events=(facts.event(view, now, "restart", f"epoch {epoch} restarts in place on {fold(nodes)}{how}"),),
    )


# --- a new attempt ----------------------------------------------------------------------------------------------------


def _ending(view: JobView) -> bool:
    """Whether the allocation is being ended. What is recorded will be done, if Slurm answers only tomorrow: a launcher
    that is heard of again meanwhile, and its program, are past saving."""
    return view.intent(facts.cancel_key(view.attempt)) is not None


def _end_allocation(view: JobView, now: float) -> Decision:
    return stay(
        view,
        f"ending Slurm job {view.attempt.slurm_job_id} before a new attempt",
        intents=() if _ending(view) else (endings.cancel_intent(view, now),),
        wants=(Want(kind="slurm", since=now),),
    )


def _without_launch(view: JobView) -> int:
    """Count the newest attempts in a row that came to no launch: a job that gets no fit nodes must not spin."""
    launched = {launch.attempt for launch in view.launches}
    numbers = [attempt.number for attempt in reversed(view.attempts)]
    return next((i for i, number in enumerate(numbers) if number in launched), len(numbers))


def _attempts_spent(view: JobView) -> int:
    """Count the attempts that ended by a failure: a time limit or a preemption ends one, but spends none."""
    free = (FailureClass.TIME_LIMIT, FailureClass.PREEMPTION)
    return view.attempt.number - len({i.attempt for i in view.incidents if i.failure_class in free})


def _new_attempt(view: JobView, incident: Incident, world: World, now: float) -> Decision:
    limit = view.spec.policy.max_attempts
    if _attempts_spent(view) >= limit:
        return stop(view, incident, f"attempt budget used up: {limit} of {limit}", now)
    # slurmd ended what ran where it answers; where Slurm hears none, or waits for it in vain, ranks may live on.
    # Slurm gives no node away that is COMPLETING: it needs not be left out.
    doubted = {*stuck_nodes(view, world, now), *(n for n in view.attempt.nodes if world.slurm.silent(n))}
    apart = {n for n in doubted if n in world.health and world.health[n].reached}
    fencing, _ = _fenced(view, incident, apart, now)
    if fencing is not None:
        return fencing
    pause = BACKOFF_S[min(_without_launch(view), len(BACKOFF_S) - 1)]
    if waits(_opened(incident), pause, now):
        return stay(view, "waiting before a new attempt", wake_at=_opened(incident) + pause)
    new = next_attempt(view, world, now)
    without = f" without {fold(new.excluded)}" if new.excluded else ""
    return Decision(
        state=JobState.QUEUED,
        reason=f"attempt {new.number} is being submitted",
        job={"attempt": new.number},
        attempts=(replace(view.attempt, ended_at=now, end_reason=incident.summary), new),
        launches=facts.closed_launches(view, view.job.epoch, incident.detected_at, incident.summary, over=True),
        incident=replace(incident, fenced_at=incident.fenced_at or now),
        intents=(submit_intent(new, now),),
        events=(facts.event(view, now, "attempt", f"attempt {new.number}{without}"),),
    )
