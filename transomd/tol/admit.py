"""Which proposals may be carried out: budgets belong to the fleet, not to a job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_slurm.states import drain_refusal
from transom_sql.records import Intent

from transomd.settings import DrainSettings
from transomd.tol.view import SlurmView
from transomd.words import IntentKind, IntentState

FLEET_BUDGETS = ("per_hour", "max_fraction")
"""Budgets that stay tripped once they are: they say that something is wrong with the fleet, or with the checks."""
REMEMBERED_S = 7 * 86400.0
"""How long a drain of transom's counts as its own towards ``drain.max_fraction``, if it is still there."""
MANUAL = "manual"
"""The check of a drain that a person asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A proposal that was not granted, and why; it is proposed again while it is wanted. ``cause`` is its kind."""

    intent: Intent
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A budget of the fleet that was found used up: it stays so, whatever happens, until a person resets it."""

    budget: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What was granted, what was refused, and which budgets that tripped."""

    granted: tuple[Intent, ...] = ()
    refused: tuple[Refusal, ...] = ()
    trips: tuple[Trip, ...] = ()


def admit_drains(
    proposals: Sequence[Intent],
    history: Sequence[Intent],
    slurm: SlurmView,
    budget: DrainSettings,
    now: float,
    *,
    stopped: str = "",
    since: float = 0.0,
) -> Admission:
    """Grant drains within the budgets.

    ``history`` are all drain intents ever recorded; ``stopped`` says why nothing may be drained at all (a kill switch,
    a pause, a budget that is tripped). Drains before ``since``, when a person reset the budgets, do not count for the
    hour.
    """
    granted: list[Intent] = []
    refused: list[Refusal] = []
    trips: list[Trip] = []
    known = {intent.key for intent in history}
    for proposal in proposals:
        if proposal.key in known:
            continue
        if found := _refusal(proposal, slurm, budget) or (("stopped", stopped) if stopped else None):
            refused.append(Refusal(intent=proposal, cause=found[0], reason=found[1]))
        elif trip := _budget(proposal, [*history, *granted], slurm, budget, now, since):
            refused.append(Refusal(intent=proposal, cause=trip.budget, reason=trip.reason))
            trips += [trip] if trip.budget in FLEET_BUDGETS else []
        else:
            granted.append(proposal)
    return Admission(granted=tuple(granted), refused=tuple(refused), trips=tuple({t.budget: t for t in trips}.values()))


def _refusal(proposal: Intent, slurm: SlurmView, budget: DrainSettings) -> tuple[str, str] | None:
    if not budget.enabled:
        return "disabled", "draining is switched off (drain.enabled = false)"
    nodes = slurm.nodes
    if nodes is None:
        return "no-answer", "Slurm does not answer"
    node = nodes.get(str(proposal.args["node"]))
    if node is None:
        return "unknown-node", "Slurm does not know the node"
    return ("held-by-others", f"{drain_refusal(node)}; left as it is") if drain_refusal(node) else None


def _budget(
    proposal: Intent, history: Sequence[Intent], slurm: SlurmView, budget: DrainSettings, now: float, since: float
) -> Trip | None:
    drains = [i for i in history if i.kind == IntentKind.DRAIN and i.state in (IntentState.PENDING, IntentState.DONE)]
    # What a person drained by hand speaks of no storm.
    # A reset of the future is from before the clock was set back, and would let every drain of the hour go uncounted.
    counted = max(since if since <= now else 0.0, now - 3600)
    recent = sum(1 for i in drains if i.created_at > counted and i.args.get("check") != MANUAL)
    if recent >= budget.per_hour:
        return Trip(
            budget="per_hour",
            reason=f"{recent} nodes were drained within the hour (drain.per_hour = {budget.per_hour})",
        )
    same = sum(1 for i in drains if i.incident_id == proposal.incident_id)
    if proposal.incident_id is not None and same >= budget.per_incident:
        return Trip(
            budget="per_incident",
            reason=f"{same} nodes were drained for this incident (drain.per_incident = {budget.per_incident})",
        )
    fleet = list((slurm.nodes or {}).values())
    # What is granted and not yet carried out counts as well.
    ours = {str(i.args["node"]): i for i in drains if now - i.created_at < REMEMBERED_S}
    still = sum(1 for n in fleet if n.name in ours and (n.status.drain or ours[n.name].state == IntentState.PENDING))
    ceiling = max(1, int(budget.max_fraction * len(fleet)))
    if still >= ceiling:
        limit = f"drain.max_fraction = {budget.max_fraction} of {len(fleet)} nodes"
        return Trip(budget="max_fraction", reason=f"{still} nodes are drained by transom ({limit})")
    return None
