"""What has happened to nodes: incidents, drains, and which nodes are blamed again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from transom_sql.records import Incident, Intent

from transomd.api.views import incident_json
from transomd.tol.books import Books
from transomd.words import Blame, IntentKind

LEMON = 2
"""Incidents on different launches from which a node is worth a look."""
KEPT = 1000
"""Incidents, newest first, that the history of all jobs looks at."""


async def history(books: Books, node: str | None, incident: int | None) -> dict[str, Any]:
    """Return what happened to all nodes, to one, or in one incident, in JSON. Raises StoreError."""
    db, store = books.db, books.store
    incidents = await db(store.incidents, limit=KEPT if not (node or incident) else None)
    intents = await db(store.intents, kinds=[IntentKind.DRAIN.value, IntentKind.UNDRAIN.value])
    if incident is not None:
        incidents = [i for i in incidents if i.id == incident]
        intents = [i for i in intents if i.incident_id == incident]
    if node is not None:
        incidents = [i for i in incidents if node in i.nodes]
        intents = [i for i in intents if i.args.get("node") == node]
    return {
        "incidents": [{**incident_json(i), "evidence": []} for i in incidents],
        "drains": [_drain_json(i) for i in intents],
        "lemons": lemons(incidents),
    }


def lemons(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Return the nodes blamed more than once, worst first: how often, in how many jobs, and when last. Pure."""
    blamed: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        if incident.blame == Blame.NODE:
            for node in incident.nodes:
                blamed[node].append(incident)
    rows = [
        {
            "node": node,
            "incidents": len(found),
            "jobs": len({incident.job_id for incident in found}),
            "classes": sorted({incident.failure_class for incident in found}),
            "last": max(incident.detected_at for incident in found),
        }
        for node, found in blamed.items()
        if len(found) >= LEMON
    ]
    return sorted(rows, key=lambda row: (-int(str(row["incidents"])), str(row["node"])))


def _drain_json(intent: Intent) -> dict[str, Any]:
    return {
        "kind": intent.kind,
        "node": intent.args.get("node"),
        "check": intent.args.get("check"),
        "reason": intent.args.get("reason"),
        "state": intent.state,
        "error": intent.outcome.get("error", ""),
        "at": intent.finished_at or intent.created_at,
        "job_id": intent.job_id,
        "incident_id": intent.incident_id,
    }
