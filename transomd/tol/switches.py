"""What is stopped until a person starts it again: every act by ``transom pause``, drains by a tripped budget. Pure.

A person's own acts go on while transom is paused: ``transom drain`` and ``undrain``, and the cancelling of a job that
its user asked for. Looking, diagnosing and recording go on too; only what transom would do about it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_sql.records import Attempt, Intent, Switch

from transomd.api.wire import Directive, Grant, LauncherReport
from transomd.tol.view import Decision, JobView
from transomd.words import IntentKind, LauncherPhase

PAUSE = "pause"
BUDGET = "drain-budget:"
"""Before the name of a budget in the name of its switch."""
RESUME = "transom resume-actions"


def tripped(budget: str, reason: str, now: float) -> Switch:
    """Return the switch of a drain budget that was used up."""
    return Switch(name=BUDGET + budget, changed_at=now, since=now, who="transom", reason=reason)


def pause_sentence(switch: Switch | None) -> str:
    """Say that transom is paused, by whom and why; empty when it is not."""
    if switch is None or switch.since is None:
        return ""
    why = f": {switch.reason}" if switch.reason else ""
    return f"transom is paused by {switch.who}{why}"


def trip_sentence(switches: Mapping[str, Switch]) -> str:
    """Say which drain budgets are tripped; empty when none is."""
    told = [f"drain.{s.name.removeprefix(BUDGET)} is tripped: {s.reason}" for s in _set_budgets(switches)]
    return f"{'; '.join(told)} ({RESUME} resets it)" if told else ""


def counted_since(switches: Mapping[str, Switch]) -> float:
    """Return from when on drains count for the hour's budget: its last reset by a person."""
    switch = switches.get(BUDGET + "per_hour")
    return switch.changed_at if switch is not None and switch.since is None else 0.0


def _set_budgets(switches: Mapping[str, Switch]) -> list[Switch]:
    return [s for name, s in sorted(switches.items()) if name.startswith(BUDGET) and s.since is not None]


def goes_on_while_paused(intent: Intent, view: JobView | None) -> bool:
    """Whether a recorded act is a person's own: an administrator's by hand, or the cancelling that a user asked for."""
    if intent.key.startswith("manual-"):
        return True
    return intent.kind == IntentKind.CANCEL and view is not None and bool(view.job.cancel_requested_by)


def withheld(view: JobView, decision: Decision) -> str:
    """Say what a decision would do to the cluster, so that it is not recorded while transom is paused; else empty."""
    known = view.attempts[-1].data if view.attempts else {}
    told = [_act(intent) for intent in decision.intents if not goes_on_while_paused(intent, view)]
    if view.job.cancel_requested_by:
        return ", ".join(told)
    told += [said for attempt in decision.attempts for said in _orders(known, attempt)]
    return ", ".join(told)


def _act(intent: Intent) -> str:
    args = intent.args
    sentences = {
        IntentKind.SUBMIT.value: f"submit attempt {args.get('attempt')}",
        IntentKind.CANCEL.value: f"cancel Slurm job {args.get('slurm_job_id')}",
        IntentKind.FENCE.value: f"fence {fold(args.get('nodes', ()))}",
        IntentKind.LAUNCHER.value: f"start a launcher on {args.get('host')}",
    }
    return sentences.get(intent.kind, intent.key)


def _orders(known: Mapping[str, object], attempt: Attempt) -> Iterable[str]:
    order, fence = attempt.data.get("order"), attempt.data.get("fence")
    if order and order != known.get("order"):
        yield f"start epoch {order['epoch']} on {fold(order['nodes'])}"
    if fence and fence != known.get("fence"):
        yield f"end epoch {fence['epoch']}"


def held_directive(answer: Directive, report: LauncherReport, view: JobView, why: str) -> Directive:
    """Say what a launcher is told while transom is paused: what runs goes on; nothing is started, ended or granted."""
    if view.job.cancel_requested_by or answer.gate == "refuse" or report.phase == LauncherPhase.DONE:
        return answer
    started = {launch.epoch for launch in report.launches}
    waits = answer.launch is not None and answer.launch.epoch not in started
    return replace(
        answer,
        gate="hold" if waits else answer.gate,
        launch=None if waits else answer.launch,
        fence_epoch=None,
        stop="",
        grant=Grant(restarts=0, for_s=0.0),
        message=why,
    )
