"""Which nodes should be drained for which incident: proposals, derived anew every cycle until done or too old. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from transom_slurm.types import SlurmNode
from transom_sql.records import Incident, Intent

from transomd.settings import Settings
from transomd.tol.view import SlurmView
from transomd.words import CheckMode, IntentKind, IntentState

CONFIRM_WITHIN_S = 900.0
"""How long after its diagnosis an incident may still be confirmed by slurmctld (SlurmdTimeout is 300 s by default)."""
SKEW_S = 5.0
"""So far a recorded time may lie ahead, by a clock that is kept right step by step."""
NODE_LOSS = "node-loss"
"""The name under which the loss of a node stands in drain reasons and modes."""


def propose_drains(
    incidents: Sequence[Incident],
    slurm: SlurmView,
    settings: Settings,
    now: float,
    cleared_at: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Intent, ...]:
    """Return a drain for every blamed node that unforgeable evidence confirms, where the check's mode is drain.

    Nothing for a node that was put back into service (``cleared_at``) since: whoever did has seen to it.
    """
    if slurm.nodes is None:
        return ()
    found = []
    for incident in incidents:
        # One of the future is from before the clock was set back: how old it is nobody knows.
        if incident.diagnosed_at is None or not -SKEW_S <= now - incident.diagnosed_at <= CONFIRM_WITHIN_S:
            continue
        for name, checks in incident.data.get("await_drain", {}).items():
            node, lifted = slurm.nodes.get(name), cleared_at.get(name, 0.0) > incident.diagnosed_at
            check = _drain_for(node, checks, settings) if node is not None and not lifted else ""
            if check:
                found.append(drain_intent(incident, name, check, now))
    return tuple(found)


def _drain_for(node: SlurmNode, checks: Sequence[str], settings: Settings) -> str:
    for check in checks:
        if settings.health.mode(check) is CheckMode.DRAIN:
            return check
    if node.status.base == "DOWN" and settings.drain.node_loss is CheckMode.DRAIN:
        return NODE_LOSS
    return ""


def drain_key(node: str, incident: Incident) -> str:
    """Return the key of the drain of a node for an incident."""
    return f"drain:{node}:{incident.id}"


def drain_intent(incident: Incident, node: str, check: str, now: float) -> Intent:
    """Return the intent that drains a node for an incident."""
    # The first sentence says what happened; the others say what is done about it, and this is being done.
    summary = " ".join(incident.summary.split()).partition(". ")[0][:120]
    return Intent(
        key=drain_key(node, incident),
        kind=IntentKind.DRAIN.value,
        state=IntentState.PENDING.value,
        created_at=now,
        job_id=incident.job_id,
        incident_id=incident.id,
        args={
            "node": node,
            "check": check,
            "reason": f"transom[{check}] job={incident.job_id} ev={incident.id} {summary}",
        },
    )
