"""Decisions from the nodes to the first launch: they are checked, and the gate opens. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_sql.records import Event, Incident

from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tee import detect
from transomd.tol import endings, facts, incidents, launches
from transomd.tol.rollback import from_step
from transomd.tol.view import Decision, JobView, Want, World, stay, waits
from transomd.words import Action, Blame, Confidence, FailureClass, Outcome


def checking(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Decide for a job that has its nodes and a closed gate."""
    early = launches.moved_on(view, now) or endings.allocation_lost(view, world, settings, now)
    if early is not None:
        return early
    attempt, report = view.attempt, facts.fitting_report(view)
    if report is None:
        return stay(view, "waiting for the launcher's report", wake_at=facts.silent_at(view, world, settings))
    if "order" in attempt.data:
        return _ordered(view, settings, now)
    since = float(attempt.data.get("checking_since", now))
    found = facts.probed(world, attempt.nodes, since) if view.spec.health.probe else {}
    unfit = {node: why for node, why in facts.unfit(view, found).items() if node not in attempt.barred}
    if unfit:
        return _bar(view, found, unfit, now)
    missing = tuple(n for n in attempt.nodes if n not in found and n not in attempt.barred)
    patience = settings.health.gate_timeout_s
    if missing and view.spec.health.probe and waits(since, patience, now):
        want = Want(kind="probe", since=since, nodes=missing, job_id=view.job.id)
        return stay(view, f"checking {fold(attempt.nodes)}", wants=(want,), wake_at=since + patience)
    out = {*attempt.barred, *world.slurm.down(attempt.nodes)}
    usable = [n for n in facts.alive(view) if n not in out]
    if len(usable) < view.spec.nodes:
        return _too_few(view, usable, out, settings, now)
    return _collective(view, world, _best(usable, found), since, settings, now)


def _ordered(view: JobView, settings: Settings, now: float) -> Decision:
    """The order is out: the launcher starts the program, or is broken."""
    since, patience = float(view.attempt.data.get("ordered_at", now)), settings.watch.launcher_start_s
    if waits(since, patience, now):
        return stay(view, wake_at=since + patience)
    return incidents.opened(
        view,
        now,
        detected_by="launcher",
        reason=f"the launcher did not start epoch {view.job.epoch} within {settings.watch.launcher_start_s:.0f} s",
        plan={"action": Action.RESTART.value, "new_attempt": True},
    )


def _bar(view: JobView, found: Mapping[str, NodeReport], unfit: dict[str, str], now: float) -> Decision:
    names = tuple(sorted(unfit))
    attempt = replace(view.attempt, barred=tuple(sorted({*view.attempt.barred, *names})))
    why = "; ".join(f"{node}: {reason}" for node, reason in sorted(unfit.items()))
    evidence = tuple(e for node in names if node in found for e in detect.probe(found[node]))
    incident = Incident(
        job_id=view.job.id,
        attempt=attempt.number,
        epoch=view.job.epoch,
        detected_at=now,
        diagnosed_at=now,
        acted_at=now,
        closed_at=now,
        failure_class=(evidence[0].failure_class if evidence else FailureClass.HOST).value,
        blame=Blame.NODE.value,
        action=Action.EXCLUDE.value,
        nodes=names,
        confidence=Confidence.HIGH.value,
        summary=f"Found unfit before the start: {why}. The job goes on without {fold(names)}.",
        evidence=tuple(e.to_json() for e in evidence),
        data={"detected_by": "gate", "await_drain": _await_drain(names, found), "at_gate": True},
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


def _await_drain(names: tuple[str, ...], found: Mapping[str, NodeReport]) -> dict[str, list[str]]:
    """A check that fails on most of the nodes at once says more about itself than about them: no drain rests on it."""
    failed = Counter(r.check for report in found.values() for r in report.unfit)
    common = {check for check, count in failed.items() if count > 2 and count * 2 > len(found)}
    waits = facts.await_drain([n for n in names if n in found], found)
    kept = {node: [c for c in checks if c not in common] for node, checks in waits.items()}
    return {node: checks for node, checks in kept.items() if checks}


def _too_few(view: JobView, usable: list[str], out: set[str], settings: Settings, now: float) -> Decision:
    since, patience = float(view.attempt.data.get("checking_since", now)), settings.watch.launcher_start_s
    waiting_for = [n for n in view.attempt.nodes if n not in facts.alive(view) and n not in out]
    if waiting_for and waits(since, patience, now):
        return stay(view, f"waiting for the agents on {fold(waiting_for)}", wake_at=since + patience)
    # Where no agent has ever called, it was not the nodes: Slurm did not start them.
    bar = tuple(sorted({*out, *(waiting_for if facts.alive(view) else ())}))
    return incidents.opened(
        view,
        now,
        detected_by="gate",
        reason=f"only {len(usable)} of {view.spec.nodes} nodes are fit{f'; {fold(bar)} left out' if bar else ''}",
        attempt=replace(view.attempt, barred=bar),
        plan={"action": Action.EXCLUDE.value, "new_attempt": True},
    )


def _best(usable: list[str], found: Mapping[str, NodeReport]) -> list[str]:
    """Nodes found fit first, in the allocation's order; those that could not be looked at last."""
    return sorted(usable, key=lambda n: n not in found or found[n].outcome is not Outcome.FIT)


def _collective(
    view: JobView, world: World, nodes: list[str], since: float, settings: Settings, now: float
) -> Decision:
    chosen = nodes[: view.spec.nodes]
    if not view.spec.health.collective or len(chosen) < 2:
        return open_gate(view, chosen, now)
    key = f"{view.job.id}:{view.attempt.number}:{fold(chosen)}"
    done = world.collectives.get(key)
    if done is None or done.at < since:
        patience = settings.health.gate_timeout_s + settings.health.collective_timeout_s
        want = Want(kind="collective", since=since, nodes=tuple(chosen), key=key, job_id=view.job.id)
        if waits(since, patience, now):
            return stay(view, f"all-reduce over {fold(chosen)}", wants=(want,), wake_at=since + patience)
        said = f"the all-reduce over {fold(chosen)} gave no answer, which names no node"
    elif done.outcome is Outcome.FIT:
        speed = f", {done.bus_gbps:.2f} GB/s" if done.bus_gbps is not None else ""
        said = f"all-reduce over {fold(chosen)} passed in {done.seconds:.1f} s ({done.backend}{speed})"
    else:
        said = f"the all-reduce over {fold(chosen)} did not pass, which names no node: {done.error or 'no error given'}"
    return open_gate(view, chosen, now, extra=facts.event(view, now, "collective", said))


def open_gate(view: JobView, nodes: list[str], now: float, *, extra: Event | None = None) -> Decision:
    """Order the first launch of an attempt."""
    epoch = facts.next_epoch(view)
    where = f"{fold(nodes)}{from_step(view.job.data)}"
    opened = facts.event(view, now, "gate", f"gate open: epoch {epoch} starts on {where}")
    return stay(
        view,
        f"starting on {where}",
        job={"epoch": epoch},
        attempts=(facts.ordered(view, epoch, nodes, now),),
        events=tuple(e for e in (extra, opened) if e is not None),
    )
