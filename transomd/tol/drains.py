"""Which nodes should be drained for which incident: proposals, derived anew every cycle until done or too old. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from transom_slurm.types import SlurmNode
from transom_sql.records import Incident, Intent

from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tol.findings import AT_ONCE
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
    health: Mapping[str, NodeReport] = MappingProxyType({}),
) -> tuple[Intent, ...]:
    """Return a drain for every blamed node that unforgeable evidence confirms, where the check's mode is drain.

    Nothing for a node that was put back into service (``cleared_at``) since: whoever did has seen to it. What may pass
    by itself must be found again by a later look (``health`` has the newest of each node).
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
            again = _found(health.get(name), incident.diagnosed_at)
            sure = [check for check in checks if check in AT_ONCE or check in again]
            check = _drain_for(node, sure, settings) if node is not None and not lifted else ""
            if check:
                found.append(drain_intent(incident, name, check, now))
    return tuple(found)


def _found(report: NodeReport | None, after: float) -> frozenset[str]:
    """Return the checks that a look begun later than that found unfit."""
    return frozenset(r.check for r in report.unfit) if report is not None and report.at > after else frozenset()


def to_confirm(incidents: Sequence[Incident], settings: Settings, now: float) -> frozenset[str]:
    """Return the nodes that a second look might call for a drain of."""
    late = [i for i in incidents if i.diagnosed_at is not None and abs(now - i.diagnosed_at) <= CONFIRM_WITHIN_S]
    waiting = [(name, set(checks)) for i in late for name, checks in i.data.get("await_drain", {}).items()]
    drains = {check for _, checks in waiting for check in checks if settings.health.mode(check) is CheckMode.DRAIN}
    return frozenset(name for name, checks in waiting if checks & (drains - AT_ONCE))


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
