"""What should happen to a job next: a pure function of its records, a snapshot of the world, the settings and the time.

The same code runs in the daemon, in unit tests and in simulations with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.types import SlurmJob

from transomd.health.gpu import MISMATCH
from transomd.health.types import CheckResult, NodeReport
from transomd.settings import Settings
from transomd.tol import endings, facts, gate, incidents, launches, lingering, queued, recover
from transomd.tol.attempts import first_attempt, submit_intent
from transomd.tol.drains import to_confirm
from transomd.tol.rollback import from_step
from transomd.tol.transitions import check_move
from transomd.tol.view import Absence, Decision, JobView, Want, World, merged, stay, waits
from transomd.words import CheckMode, IntentState, JobState, LauncherPhase

FATAL_WHILE_RUNNING = frozenset({"gpu-count", "xid"})
"""Checks whose failure ends a running launch, in mode drain. Others (space, clock) wait for the next restart."""
HAS_NODES = frozenset({JobState.CHECKING, JobState.RUNNING, JobState.RECOVERING})
"""States in which a launcher that cannot speak would be taken for lost."""
LETS_RUN = frozenset({MISMATCH})
"""Signatures of what keeps only a new program from starting: an update of the driver, on every node within minutes."""


def decide(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    """Return what to record and do. Raises UnlawfulMove when a rule below asks for a move outside the table."""
    if view.state.final:
        return stay(view)
    if not view.attempts:
        return _never_submitted(view, now) if view.job.cancel_requested_by else _first_attempt(view, now)
    changes, launches = facts.absorb(view)
    seen = facts.noted(view, world, now)
    absorbed = merged(view, replace(view.job, **changes), () if seen is None else (seen,), launches)
    decision = _lingering(absorbed, _decide(absorbed, world, settings, now), world, now)
    check_move(view.state, decision.state)
    return replace(
        decision,
        job={**changes, **decision.job},
        launches=tuple({launch.epoch: launch for launch in (*launches, *decision.launches)}.values()),
        attempts=decision.attempts or (() if seen is None else (seen,)),
    )


def _decide(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    if view.job.cancel_requested_by:
        return _cancel(view, world, now)
    if view.state in HAS_NODES and facts.suspended(view, world.slurm):
        said = f"Slurm job {view.attempt.slurm_job_id} is suspended; nothing is done until it goes on"
        return stay(view, said, wants=(Want(kind="slurm", since=now),))
    return _BY_STATE[view.state](view, world, settings, now)


def _lingering(view: JobView, decision: Decision, world: World, now: float) -> Decision:
    """Say of a job that waits for a Slurm job which does not come to its end what is in the way."""
    said = lingering.sentence(view, world, now) if decision.state is view.state and not decision.attempts else ""
    if not said:
        return decision
    told = () if view.job.reason == said else (facts.event(view, now, "stuck", said),)
    return replace(decision, reason=said, events=(*decision.events, *told))


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
    attempt = first_attempt(view, now)
    return stay(
        view,
        "submitting to Slurm",
        job={"attempt": 1},
        attempts=(attempt,),
        intents=(submit_intent(attempt, now),),
    )


def _cancel(view: JobView, world: World, now: float) -> Decision:
    who = view.job.cancel_requested_by
    if view.attempt.slurm_job_id is None:
        submitted = view.intent(facts.submit_key(view.attempt))
        if submitted is not None and submitted.state == IntentState.PENDING:
            return stay(view, f"cancelled by {who}; first settling whether Slurm took the job")
        if submitted is not None and submitted.state == IntentState.DONE:
            return replace(queued.submission(view, now), state=view.state)
        return endings.cancelled(view, now, f"cancelled by {who}")
    job = facts.slurm_job(view, world, now)
    if job is Absence.ABSENT or (isinstance(job, SlurmJob) and facts.ended(job)):
        return endings.cancelled(view, now, f"cancelled by {who}")
    intent = view.intent(facts.cancel_key(view.attempt))
    if intent is None:
        said = facts.event(view, now, "cancel", f"{who} asked to cancel")
        wanted = endings.cancel_intent(view, now)
        return stay(view, f"being cancelled by {who}", intents=(wanted,), events=(said,))
    why = str(intent.outcome.get("error", ""))
    return stay(view, f"being cancelled by {who}{': ' if why else ''}{why}", wants=(Want(kind="slurm", since=now),))


def _running(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    moved = launches.moved_on(view, now)
    if moved is not None:
        return moved
    report = facts.fitting_report(view)
    if report is not None and report.phase == LauncherPhase.GATE:
        # A launcher that took over and knows of no launch.
        return incidents.opened(view, now, detected_by="takeover", reason="the launcher started anew")
    lost = endings.allocation_lost(view, world, settings, now)
    if lost is not None:
        return lost
    return incidents.recovered(view) or _watch_nodes(view, world, settings, now)


def _watch_nodes(view: JobView, world: World, settings: Settings, now: float) -> Decision:
    launch, interval, report = view.launch, settings.health.interval_s, facts.fitting_report(view)
    if launch is None or report is None:
        return stay(view)
    nodes = facts.last_nodes(view)
    trouble = f"; {report.message}" if report.message and report.phase == LauncherPhase.RUNNING else ""
    reason = f"epoch {launch.epoch} runs on {fold(nodes)}{from_step(view.job.data)}{trouble}"
    if not interval or not view.spec.health.probe:
        return stay(view, reason)
    again = to_confirm(view.incidents, settings, now).intersection(view.attempt.nodes).difference(nodes)
    look = Want(kind="probe", since=now - interval, nodes=(*nodes, *sorted(again)), job_id=view.job.id)
    seen = [(x, r) for x in facts.probed(world, nodes, launch.started_at).values() for r in _fatal(x)]
    bad = [(x, r) for x, r in seen if settings.health.mode(r.check) is CheckMode.DRAIN]
    if not bad:
        return stay(view, f"{reason}{_only_told(seen)}", wants=(look,))
    (found, result), patience, count = bad[0], settings.health.probe_timeout_s, len({x.node for x, _ in bad})
    if set(nodes) - facts.probed(world, nodes, found.at).keys() and waits(found.at, patience, now):
        return stay(view, reason, wants=(look,), wake_at=found.at + patience)
    if count > 2 and count * 2 > len(nodes):
        # What breaks most nodes at once would end the program by itself: it is the look at them that is wrong.
        reason += f"; {result.check} fails on most of its nodes at once, which speaks against the check"
        return stay(view, reason, wants=(look,))
    why = f"{found.node}: {result.check}: {result.evidence or result.value}"
    return incidents.opened(view, now, detected_by="probe", detected_at=found.at, reason=why)


def _fatal(found: NodeReport) -> list[CheckResult]:
    """Return the results that no running program is to be left to, where the site lets their checks act."""
    return [r for r in found.unfit if r.check in FATAL_WHILE_RUNNING and r.signature not in LETS_RUN]


def _only_told(seen: Sequence[tuple[NodeReport, CheckResult]]) -> str:
    """Say what was found by checks that may only tell: nothing is ended for it."""
    told = [f"; {x.node}: {r.check}: {r.evidence or r.value} (told only: this check does not drain)" for x, r in seen]
    return "".join(told[:3])


_BY_STATE: dict[JobState, Callable[[JobView, World, Settings, float], Decision]] = {
    JobState.SUBMITTED: queued.waiting_for_slurm_job,
    JobState.QUEUED: queued.waiting_for_slurm_job,
    JobState.CHECKING: gate.checking,
    JobState.RUNNING: _running,
    JobState.RECOVERING: recover.recovering,
    JobState.HELD: queued.waiting_for_slurm_job,
}
