"""Which proposals may be carried out: budgets belong to the fleet, not to a job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_slurm.states import drain_refusal
from transom_slurm.types import SlurmNode
from transom_sql.records import Intent

from transomd.settings import DrainSettings
from transomd.tol.view import SlurmView
from transomd.words import IntentKind, IntentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A proposal that was not granted, and why; it is proposed again while it is wanted."""

    intent: Intent
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What was granted and what was refused."""

    granted: tuple[Intent, ...] = ()
    refused: tuple[Refusal, ...] = ()


def admit_drains(
    proposals: Sequence[Intent],
    history: Sequence[Intent],
    slurm: SlurmView,
    budget: DrainSettings,
    now: float,
    *,
    stopped: str = "",
) -> Admission:
    """Grant drains within the budgets.

    ``history`` are all drain intents ever recorded; ``stopped`` says why nothing may be drained at all (a kill switch).
    """
    granted: list[Intent] = []
    refused: list[Refusal] = []
    known = {intent.key for intent in history}
    for proposal in proposals:
        if proposal.key in known:
            continue
        reason = stopped or _refusal(proposal, [*history, *granted], slurm, budget, now)
        if reason:
            refused.append(Refusal(intent=proposal, reason=reason))
        else:
            granted.append(proposal)
    return Admission(granted=tuple(granted), refused=tuple(refused))


def _refusal(proposal: Intent, history: Sequence[Intent], slurm: SlurmView, budget: DrainSettings, now: float) -> str:
    if not budget.enabled:
        return "draining is switched off (drain.enabled = false)"
    nodes = slurm.nodes
    if nodes is None:
        return "Slurm does not answer"
    node = nodes.get(str(proposal.args["node"]))
    if node is None:
        return "Slurm does not know the node"
    if drain_refusal(node):
        return f"{drain_refusal(node)}; left as it is"
    return _budget(proposal, history, nodes.values(), budget, now)


def _budget(proposal: Intent, history: Sequence[Intent], nodes: object, budget: DrainSettings, now: float) -> str:
    drains = [i for i in history if i.kind == IntentKind.DRAIN and i.state in (IntentState.PENDING, IntentState.DONE)]
    recent = sum(1 for i in drains if now - i.created_at < 3600)
    if recent >= budget.per_hour:
        return f"{recent} nodes were drained within the hour (drain.per_hour = {budget.per_hour})"
    same = sum(1 for i in drains if i.incident_id == proposal.incident_id)
    if proposal.incident_id is not None and same >= budget.per_incident:
        return f"{same} nodes were drained for this incident (drain.per_incident = {budget.per_incident})"
    fleet: list[SlurmNode] = list(nodes)  # type: ignore[call-overload]
    ours = {str(i.args["node"]) for i in drains if now - i.created_at < 7 * 86400}
    still = sum(1 for n in fleet if n.name in ours and n.status.drain)
    ceiling = max(1, int(budget.max_fraction * len(fleet)))
    if still >= ceiling:
        return (
            f"{still} nodes are drained by transom (drain.max_fraction = {budget.max_fraction} of {len(fleet)} nodes)"
        )
    return ""
