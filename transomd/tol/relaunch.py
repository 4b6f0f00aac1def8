"""Decisions when the launcher is lost and its allocation is not: another launcher, or none any more. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_sql.records import Attempt, Incident, Intent

from transomd.settings import Settings
from transomd.tol import facts
from transomd.tol.view import Decision, JobView, World, stay, waits, with_data
from transomd.words import IntentKind, IntentState


def new_launcher(view: JobView, incident: Incident, world: World, settings: Settings, now: float) -> Decision:
    """Start another launcher on a node that is left: its node is gone, or it is."""
    attempt = view.attempt
    intent = view.intent(_launcher_key(attempt))
    if intent is not None:
        if intent.state == IntentState.PENDING:
            return stay(view, "starting another launcher")
        since, patience = intent.finished_at or now, settings.watch.launcher_silence_s
        if intent.state == IntentState.DONE and waits(since, patience, now):
            return stay(view, "waiting for the new launcher", wake_at=since + patience)
    tried = {facts.host_of(view), *attempt.data.get("hosts_tried", [])}
    hosts = [n for n in _reachable(view, world) if n not in tried]
    if not hosts or len(_reachable(view, world)) < view.spec.nodes:
        return give_up(view, incident, "no launcher can be started where enough nodes are left", now)
    return _order_launcher(view, incident, hosts[0], sorted(tried - {""}), now)


def _launcher_key(attempt: Attempt) -> str:
    return f"launcher:{attempt.job_id}:{attempt.number}:{attempt.generation}"


def _reachable(view: JobView, world: World) -> list[str]:
    """Nodes of the allocation that no one doubts: those the probe reached first."""
    out = {*view.attempt.barred, *world.slurm.down(view.attempt.nodes)}
    left = [n for n in view.attempt.nodes if n not in out and not world.slurm.silent(n)]
    return sorted(left, key=lambda n: not (n in world.health and world.health[n].reached))


def _order_launcher(view: JobView, incident: Incident, host: str, tried: list[str], now: float) -> Decision:
    attempt: Attempt = replace(view.attempt, generation=view.attempt.generation + 1)
    intent = Intent(
        key=_launcher_key(attempt),
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
        attempts=(with_data(attempt, host=host, hosts_tried=tried, order=None, ordered_at=None),),
        intents=(intent,),
        events=(facts.event(view, now, "launcher", f"launcher {attempt.generation} starts on {host}"),),
    )


def give_up(view: JobView, incident: Incident, why: str, now: float) -> Decision:
    """Note that this allocation cannot be used any more."""
    plan = {**incident.data.get("plan", {}), "new_attempt": True}
    why = f"{why}: a new attempt"
    return stay(
        view,
        why,
        incident=replace(incident, data={**incident.data, "plan": plan}),
        attempts=(with_data(view.attempt, order=None, ordered_at=None),),
        events=(facts.event(view, now, "allocation", why),),
    )
