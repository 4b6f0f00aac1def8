"""One incident whole: its verdict, its evidence, what was done, and why a node was drained or not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transom_sql.records import Event, Incident, Intent, Launch

from transomd.api.views import event_json, incident_json, launch_json
from transomd.settings import Settings
from transomd.words import Blame, CheckMode, IntentKind, IntentState

MAX_EVENTS = 200
BEFORE_S = 5.0
"""How long before its detection an incident's events begin."""


def incident_detail(
    incident: Incident,
    launches: Sequence[Launch],
    intents: Sequence[Intent],
    events: Iterable[Event],
    settings: Settings,
) -> dict[str, Any]:
    """Return everything about an incident; the records are its job's."""
    until = incident.closed_at if incident.closed_at is not None else float("inf")
    during = [e for e in events if incident.detected_at - BEFORE_S <= e.at <= until]
    drains = [i for i in intents if i.kind == IntentKind.DRAIN and i.incident_id == incident.id]
    refused = {str(e.node): e.message for e in events_of(during, "drain-refused")}
    return {
        "incident": {**incident_json(incident), "plan": dict(incident.data.get("plan") or {})},
        "launches": [launch_json(x) for x in launches if x.epoch in (incident.epoch, _next(incident, launches))],
        "nodes": [_node(node, incident, drains, refused, settings) for node in incident.nodes],
        "events": [event_json(e) for e in during[:MAX_EVENTS]],
    }


def events_of(events: Iterable[Event], kind: str) -> list[Event]:
    """Return the events of one kind."""
    return [event for event in events if event.kind == kind]


def _next(incident: Incident, launches: Sequence[Launch]) -> int | None:
    return min((x.epoch for x in launches if x.epoch > incident.epoch), default=None)


def _node(
    node: str, incident: Incident, drains: Sequence[Intent], refused: Mapping[str, str], settings: Settings
) -> dict[str, Any]:
    intent = next((i for i in drains if i.args.get("node") == node), None)
    done = intent is not None and intent.state == IntentState.DONE
    return {"node": node, "drained": done, "why": _why(node, incident, intent, refused, settings)}


def _why(node: str, incident: Incident, intent: Intent | None, refused: Mapping[str, str], settings: Settings) -> str:
    """Say in a sentence why a node that an incident names is drained, or is not."""
    if intent is not None:
        said = {
            IntentState.DONE.value: f"drained: {intent.args.get('reason')}",
            IntentState.PENDING.value: f"being drained; tried {intent.tries} times",
        }
        return said.get(intent.state, f"not drained: {intent.outcome.get('error') or intent.state}")
    if node in refused:
        return refused[node].removeprefix(f"{node} is ")
    if incident.blame != Blame.NODE:
        return f"not drained: blame is {incident.blame or 'not known yet'}, not a node"
    return f"not drained: {_unconfirmed(incident.data.get('await_drain', {}).get(node, []), settings)}"


def _unconfirmed(checks: Sequence[str], settings: Settings) -> str:
    modes = [f"{check} is in mode {settings.health.mode(check).value}" for check in checks]
    told = f"{', '.join(modes)} (health.modes in transomd.toml)" if modes else "the probe found nothing unfit"
    loss = settings.drain.node_loss
    if loss is not CheckMode.DRAIN:
        return f"{told}; for a lost node drain.node_loss is {loss.value}"
    return f"{told}, and Slurm did not call it lost"
