"""Records as the JSON that users see. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from transom_slurm.states import DrainRecord, reason_is_own, reason_source
from transom_slurm.types import SlurmNode
from transom_sql.records import Attempt, Event, Incident, Intent, Job, Launch, NodeRecord
from transom_sql.store import Latest

from transomd.api.wire import LauncherReport
from transomd.health.types import NodeReport
from transomd.tol.rollback import bound
from transomd.tol.view import JobView
from transomd.words import LauncherPhase


def job_json(view: JobView, withheld: str = "") -> dict[str, Any]:
    """One job. ``withheld`` is what would be done about it if transom were not paused."""
    latest = Latest(
        attempt=view.attempts[-1] if view.attempts else None,
        launch=view.launches[-1] if view.launches else None,
        incident=view.incidents[-1] if view.incidents else None,
        launches=len(view.launches),
    )
    return {
        **job_line(view.job, latest, withheld),
        "incident": incident_json(latest.incident) if latest.incident else None,
    }


def job_line(job: Job, latest: Latest, withheld: str = "") -> dict[str, Any]:
    """One job, as in lists: its incident without the evidence, of which there may be much."""
    attempt, current, checkpoint = latest.attempt, latest.launch, job.spec.get("checkpoint") or {}
    over = attempt is not None and attempt.ended_at is not None
    held = list(attempt.nodes) if attempt and not over else []
    nodes = list(current.nodes) if current and attempt and current.attempt == attempt.number else []
    # Before a launch which of them will be spare is not known; where one was that nobody heard of, only Slurm knows.
    nodes = list(attempt.nodes) if attempt and not nodes else nodes
    return {
        "id": job.id,
        "name": job.name,
        "user": job.user,
        "state": job.state,
        "reason": job.reason,
        "attempt": job.attempt,
        "epoch": job.epoch,
        "slurm_job_id": attempt.slurm_job_id if attempt else None,
        "nodes": nodes,
        "spares": sorted(set(held) - set(nodes) - set(attempt.barred if attempt else ())),
        "step": job.data.get("step"),
        "step_at": job.data.get("step_at"),
        "checkpoint": job.data.get("checkpoint"),
        "stages": job.data.get("stages") or [],
        "checkpoint_trouble": job.data.get("checkpoint_trouble") or "",
        "copies": job.data.get("copies") or {},
        "copies_trouble": job.data.get("copies_trouble") or "",
        "checkpoints_skipped": job.data.get("checkpoint_skipped") or 0,
        "rollback_step": bound(job.data),
        "restarts": max(0, latest.launches - 1),
        "withheld": withheld,
        "created_at": job.created_at,
        "changed_at": job.changed_at,
        "finished_at": job.finished_at,
        "run_dir": job.run_dir,
        "workdir": job.spec.get("workdir", ""),
        "checkpoint_dir": checkpoint.get("dir", ""),
        "incident": {**incident_json(latest.incident), "evidence": []} if latest.incident else None,
    }


def job_detail_json(view: JobView, checkpoints: Iterable[Any], withheld: str = "") -> dict[str, Any]:
    """One job with everything about it."""
    return {
        "job": {**job_json(view, withheld), "spec": dict(view.job.spec)},
        "attempts": [_attempt_json(a) for a in view.attempts],
        "launches": [launch_json(x) for x in view.launches],
        "incidents": [incident_json(i) for i in view.incidents],
        "intents": [_intent_json(i) for i in view.intents.values()],
        "checkpoints": [asdict(c) for c in checkpoints],
        "launcher": _launcher_json(view.report, view.report_at),
    }


def _launcher_json(report: LauncherReport | None, at: float) -> dict[str, Any] | None:
    if report is None:
        return None
    return {"host": report.host, "phase": LauncherPhase(report.phase).value, "at": at, "lost": report.lost}


def incident_json(incident: Incident) -> dict[str, Any]:
    """One incident; ``class`` is the failure class."""
    data = asdict(incident)
    data["class"] = data.pop("failure_class")
    data["detected_by"] = incident.data.get("detected_by", "")
    data.pop("data")
    return {**data, "nodes": list(incident.nodes), "ranks": list(incident.ranks), "evidence": list(incident.evidence)}


def launch_json(launch: Launch) -> dict[str, Any]:
    """One launch."""
    return {**asdict(launch), "nodes": list(launch.nodes)}


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    data = asdict(attempt)
    data.pop("data")
    return {**data, "nodes": list(attempt.nodes), "excluded": list(attempt.excluded), "barred": list(attempt.barred)}


def _intent_json(intent: Intent) -> dict[str, Any]:
    keys = ("key", "kind", "state", "args", "tries", "outcome", "created_at", "finished_at")
    return {key: value for key, value in asdict(intent).items() if key in keys}


def event_json(event: Event) -> dict[str, Any]:
    """One event."""
    return asdict(event)


def node_json(
    node: SlurmNode, record: NodeRecord | None, health: NodeReport | None, jobs: Iterable[int]
) -> dict[str, Any]:
    """One node: Slurm's words, whose drain it is, and what the last probe found."""
    return {
        "name": node.name,
        "state": node.state_text,
        "reason": node.reason,
        "reason_user": node.reason_user,
        "reason_time": node.reason_time,
        "owner": owner_of(node, record),
        "jobs": sorted(jobs),
        **_health_json(record, health),
    }


def _health_json(record: NodeRecord | None, health: NodeReport | None) -> dict[str, Any]:
    """What was found last, by our probe over SSH or by the node's own hooks."""
    told = record.checked_at if record else None
    if record is not None and told is not None and (health is None or told > health.at):
        return {"checked_at": told, "reached": True, "error": "", "checks": [dict(check) for check in record.checks]}
    return {
        "checked_at": health.at if health else None,
        "reached": health.reached if health else None,
        "error": health.error if health else "",
        "checks": [r.to_json() for r in health.results] if health else [],
    }


def owner_of(node: SlurmNode, record: NodeRecord | None) -> str:
    """Whose the node's drain or reason is: ``transom``, ``slurm``, ``person``, or empty where there is none."""
    if owned(node, record):
        return "transom"
    source = reason_source(node.reason).value
    # A reason in transom's form that is no longer as it was written belongs to whoever changed it.
    return {"none": "", "own": "person"}.get(source, source)


def owned(node: SlurmNode, record: NodeRecord | None) -> bool:
    """Whether what drained the node, or keeps it DOWN, is still exactly what transom wrote."""
    if record is None or not record.drain_reason or record.drain_time is None:
        return False
    return reason_is_own(node, DrainRecord(record.drain_reason, record.drain_user, record.drain_time))
