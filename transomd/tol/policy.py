"""What to do about a verdict: a table, first match wins, with budgets kept apart by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_sql.records import Incident, Launch

from transomd.spec import PolicySpec
from transomd.tee.types import Verdict
from transomd.tol.rollback import NO_WAY, SUSPECTS, Way
from transomd.words import Action, Blame, FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: a verdict that fits ``failure_class``, ``blame`` and ``asked``, seen ``seen`` times before.

    None fits all. ``asked`` is the action that the evidence speaks for.
    """

    failure_class: FailureClass | None = None
    blame: Blame | None = None
    seen: int = 0
    asked: Action | None = None
    action: Action

    def fits(self, verdict: Verdict, seen: int) -> bool:
        """Whether this row answers the verdict."""
        return (
            self.failure_class in (None, verdict.failure_class)
            and self.asked in (None, verdict.action)
            and self.blame in (None, verdict.blame)
            and seen >= self.seen
        )


RULES: tuple[Rule, ...] = (
    Rule(failure_class=FailureClass.CANCELLED, action=Action.NONE),
    Rule(failure_class=FailureClass.CONFIG, blame=Blame.PROGRAM, action=Action.STOP),
    Rule(failure_class=FailureClass.PREEMPTION, action=Action.RESTART),
    Rule(failure_class=FailureClass.TIME_LIMIT, action=Action.RESTART),
    Rule(failure_class=FailureClass.STORAGE, asked=Action.ROLLBACK, action=Action.ROLLBACK),
    Rule(failure_class=FailureClass.STORAGE, action=Action.WAIT),
    Rule(blame=Blame.STORAGE, action=Action.WAIT),
    Rule(blame=Blame.NETWORK, action=Action.WAIT),
    Rule(failure_class=FailureClass.USER_CODE, blame=Blame.PROGRAM, action=Action.STOP),
    Rule(failure_class=FailureClass.NUMERIC, seen=2, action=Action.STOP),
    Rule(failure_class=FailureClass.NUMERIC, action=Action.ROLLBACK),
    Rule(blame=Blame.PROGRAM, seen=1, action=Action.STOP),
    Rule(blame=Blame.PROGRAM, action=Action.RESTART),
    Rule(blame=Blame.NODE, action=Action.EXCLUDE),
    Rule(action=Action.RESTART),
)
"""The site's default table. A rollback is passed over where there is no older checkpoint to go back to."""

_FREE = (FailureClass.USER_CODE, FailureClass.PREEMPTION, FailureClass.TIME_LIMIT, FailureClass.CANCELLED)
"""Classes that spend nothing of the budget for faults of the cluster."""
BACKOFF_S = (0.0, 0.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds to wait before restart number k without a new step in between; the last one is for all later ones."""
MAX_INCIDENTS = 1000
"""Failures of one job after which it ends, also where they spend no budget: a launcher may say anything."""
WAIT_S = (10.0, 30.0, 60.0, 120.0)
"""Seconds to wait before restart k after such a failure of a store or the network; the last one for all later ones."""
UNSEEN_PROGRESS_S = 1800.0
"""A launch that shows no step numbers counts as progress when it ran for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do: restart without the nodes in ``bar`` after ``delay_s``, or stop; ``why`` is a sentence for people.

    ``resume_step`` is the step that a rollback goes back to; ``said`` tells what came of the wish for one.
    """

    action: Action
    bar: tuple[str, ...] = ()
    delay_s: float = 0.0
    why: str = ""
    resume_step: int | None = None
    said: str = ""


def make_plan(
    verdict: Verdict,
    earlier: Sequence[Incident],
    launches: Sequence[Launch],
    policy: PolicySpec,
    way: Way = NO_WAY,
) -> Plan:
    """Answer a verdict. ``earlier`` are the job's incidents before this one, ``launches`` all that ran.

    ``way`` says which checkpoints there are to go back to.
    """
    if len(earlier) >= MAX_INCIDENTS:
        return Plan(action=Action.STOP, why=f"{len(earlier)} failures of this job are enough, whatever they were")
    seen = _times_seen(verdict, earlier)
    action, said = _action(verdict, seen, way)
    if action is Action.STOP and (_user_budget_left(verdict, earlier, policy) or _once_more(verdict, seen, launches)):
        action = Action.RESTART
    if action is Action.RESTART and _stuck(verdict, way, policy):
        action, said = Action.ROLLBACK, f"{_back(way)}: {way.tried} launches from there came to no newer checkpoint"
    if action in (Action.STOP, Action.NONE):
        return Plan(action=action, why=verdict.summary, said=said)
    idle = launches_without_progress([x for x in launches if x.epoch not in _not_started(verdict, earlier, launches)])
    if idle >= policy.no_progress_limit:
        return Plan(action=Action.STOP, why=f"{idle} launches in a row did not get past the last step")
    spent = restarts_spent(earlier)
    if spent >= policy.max_restarts and verdict.failure_class not in _FREE:
        return Plan(action=Action.STOP, why=f"the restart budget is used up: {spent} of {policy.max_restarts}")
    bar = verdict.nodes if verdict.blame is Blame.NODE else ()
    delay = BACKOFF_S[min(idle, len(BACKOFF_S) - 1)]
    if action is Action.WAIT:
        delay = WAIT_S[min(seen, len(WAIT_S) - 1)]
    back = way.older if action is Action.ROLLBACK else None
    return Plan(action=action, bar=bar, delay_s=delay, why=verdict.summary, resume_step=back, said=said)


def launches_without_progress(launches: Sequence[Launch]) -> int:
    """Count the newest launches in a row that did not get past what was reached before them."""
    best = -1
    idle = 0
    for launch in launches:
        reached = launch.last_step if launch.last_step is not None else -1
        advanced = reached > best or (best < 0 and _seconds(launch) >= UNSEEN_PROGRESS_S)
        idle = 0 if advanced else idle + 1
        best = max(best, reached)
    return idle


def has_worked(launch: Launch) -> bool:
    """Whether the program has done steps in a launch, or ran for long where it shows none."""
    return launch.last_step is not None or _seconds(launch) >= UNSEEN_PROGRESS_S


def _seconds(launch: Launch) -> float:
    return (launch.ended_at or launch.started_at) - launch.started_at


def _not_started(verdict: Verdict, earlier: Sequence[Incident], launches: Sequence[Launch]) -> frozenset[int]:
    """Return the epochs whose program Slurm never started: they say nothing of the job."""
    epochs = {i.epoch for i in earlier if i.failure_class == FailureClass.LAUNCHER}
    if verdict.failure_class is FailureClass.LAUNCHER and launches:
        epochs.add(launches[-1].epoch)
    return frozenset(x.epoch for x in launches if x.epoch in epochs and x.last_step is None)


def restarts_spent(incidents: Sequence[Incident]) -> int:
    """Count the failures that use up the budget for infrastructure."""
    return sum(1 for incident in incidents if _counts(incident))


def _action(verdict: Verdict, seen: int, way: Way) -> tuple[Action, str]:
    """Return the table's action, and what is to be said about going back to an older checkpoint."""
    actions = [rule.action for rule in RULES if rule.fits(verdict, seen)]
    action = next(a for a in actions if a is not Action.ROLLBACK or way.older is not None)
    if action is Action.ROLLBACK:
        return action, _back(way)
    if actions[0] is not Action.ROLLBACK:
        return action, ""
    there = "no checkpoint is known" if way.source is None else f"no checkpoint before step {way.source} is known"
    return action, f"{there} to go back to: {action} instead"


def _stuck(verdict: Verdict, way: Way, policy: PolicySpec) -> bool:
    """Whether the checkpoint itself may be what restarts fail of."""
    suspect = verdict.blame in SUSPECTS and verdict.failure_class is not FailureClass.LAUNCHER
    return suspect and way.older is not None and way.tried >= policy.rollback_after


def _back(way: Way) -> str:
    return f"going back to the checkpoint of step {way.older}, before that of step {way.source}"


def _times_seen(verdict: Verdict, earlier: Sequence[Incident]) -> int:
    kind = (verdict.failure_class.value, verdict.blame.value)
    return sum(1 for incident in earlier if (incident.failure_class, incident.blame) == kind and _counts(incident))


def _user_budget_left(verdict: Verdict, earlier: Sequence[Incident], policy: PolicySpec) -> bool:
    if verdict.failure_class is not FailureClass.USER_CODE:
        return False
    return sum(1 for i in earlier if i.failure_class == FailureClass.USER_CODE) < policy.max_user_restarts


def _once_more(verdict: Verdict, seen: int, launches: Sequence[Launch]) -> bool:
    """Whether a set-up is called wrong for the first time with which the program has done steps: tried once more."""
    config = verdict.failure_class is FailureClass.CONFIG
    return config and not seen and any(has_worked(launch) for launch in launches)


def _counts(incident: Incident) -> bool:
    no_restart = incident.data.get("at_gate") or incident.data.get("false_alarm")
    return incident.failure_class not in _FREE and not no_restart
