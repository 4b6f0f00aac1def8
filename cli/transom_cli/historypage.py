"""What happened to a job, to a node, or to all: attempts, launches, incidents, drains. Pure: JSON in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transom_cli.incidentpage import INCIDENT_HEADER, INCIDENT_LIMITS, incident_table_row
from transom_cli.text import ago, hosts, plain, span, table, wrapped

Json = Mapping[str, Any]
SHOWN = 20
"""Newest incidents and drains that are shown."""


def job_history(view: Json, *, now: float, columns: int) -> list[str]:
    """Return a job's attempts, launches, incidents and drains, oldest first."""
    job: Json = view.get("job") or {}
    lines = [f"job {job.get('id')} {plain(job.get('name', ''))}: {plain(job.get('state'))}", ""]
    header = ("ATTEMPT", "SLURM JOB", "NODES", "LASTED", "END")
    rows = [_attempt(attempt, now) for attempt in view.get("attempts") or ()]
    lines += table(header, rows, (7, 10, 24, 8, 0), columns) if rows else ["no attempts"]
    rows = [_launch(launch, now) for launch in view.get("launches") or ()]
    if rows:
        lines += ["", *table(("EPOCH", "NODES", "STEPS", "LASTED", "END"), rows, (5, 24, 14, 8, 0), columns)]
    lines += _incidents(view.get("incidents") or (), now, columns)
    drains = [i for i in view.get("intents") or () if i.get("kind") in ("drain", "undrain")]
    return lines + _drains([_drain_of(intent) for intent in drains], now, columns)


def node_history(node: str, answer: Json, *, now: float, columns: int) -> list[str]:
    """Return a node's incidents, in all jobs, and its drains."""
    incidents, drains = answer.get("incidents") or (), answer.get("drains") or ()
    blamed = [incident for incident in incidents if incident.get("blame") == "node"]
    jobs = {incident.get("job_id") for incident in blamed}
    lines = [f"{plain(node)}: blamed in {_count(len(blamed), 'incident')} of {_count(len(jobs), 'job')}"]
    lines[0] += f", drained by transom {_count(_done(drains), 'time')}"
    if not incidents and not drains:
        return [*lines, "transom has no record of anything on it"]
    return lines + _incidents(incidents, now, columns) + _drains(drains, now, columns)


def all_history(answer: Json, *, now: float, columns: int) -> list[str]:
    """Return nodes that were blamed again and again, then the newest incidents and drains."""
    lines = []
    lemons = answer.get("lemons") or ()
    if lemons:
        rows = [
            (
                str(x["node"]),
                str(x["incidents"]),
                str(x["jobs"]),
                ago(x["last"], now),
                ", ".join(x.get("classes") or ()),
            )
            for x in lemons
        ]
        lines += ["nodes blamed more than once"]
        lines += table(("NODE", "INCIDENTS", "JOBS", "LAST", "CLASSES"), rows, (20, 9, 6, 12, 0), columns)
    shown = _incidents(answer.get("incidents") or (), now, columns)
    shown += _drains(answer.get("drains") or (), now, columns)
    return [*lines, *(shown if lines else shown[1:])] or ["nothing has happened yet"]


def _lemon(row: Json, now: float) -> tuple[str, ...]:
    classes = ", ".join(row.get("classes") or ())
    return str(row["node"]), str(row["incidents"]), str(row["jobs"]), ago(row["last"], now), classes


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _done(drains: Sequence[Json]) -> int:
    return sum(1 for drain in drains if drain.get("kind") == "drain" and drain.get("state") == "done")


def _lasted(record: Json, now: float) -> str:
    started, ended = record.get("started_at"), record.get("ended_at")
    if not started:
        return "-"
    return span((ended or now) - started)


def _attempt(attempt: Json, now: float) -> tuple[str, ...]:
    return (
        str(attempt.get("number")),
        str(attempt.get("slurm_job_id") or "-"),
        hosts(attempt.get("nodes") or ()) or "-",
        _lasted(attempt, now),
        str(attempt.get("end_reason") or ("ended" if attempt.get("ended_at") else "goes on")),
    )


def _launch(launch: Json, now: float) -> tuple[str, ...]:
    first, last = launch.get("first_step"), launch.get("last_step")
    return (
        str(launch.get("epoch")),
        hosts(launch.get("nodes") or ()) or "-",
        "none" if last is None else f"{first} to {last}",
        _lasted(launch, now),
        str(launch.get("end_reason") or ("ended" if launch.get("ended_at") else "runs")),
    )


def _incidents(incidents: Sequence[Json], now: float, columns: int) -> list[str]:
    if not incidents:
        return ["", "no incidents"]
    newest = sorted(incidents, key=lambda incident: -float(incident.get("detected_at") or 0))
    rows = [incident_table_row(incident, now) for incident in newest[:SHOWN]]
    lines = ["", *table(INCIDENT_HEADER, rows, INCIDENT_LIMITS, columns)]
    return lines + _more(newest, "incidents")


def _more(records: Sequence[Json], what: str) -> list[str]:
    return [f"and {len(records) - SHOWN} older {what} (--json shows all)"] if len(records) > SHOWN else []


def _drain_of(intent: Json) -> Json:
    args, outcome = intent.get("args") or {}, intent.get("outcome") or {}
    at = intent.get("finished_at") or intent.get("created_at")
    return {**intent, "node": args.get("node"), "reason": args.get("reason"), "error": outcome.get("error"), "at": at}


def _drains(drains: Sequence[Json], now: float, columns: int) -> list[str]:
    newest = sorted(drains, key=lambda drain: -float(drain.get("at") or 0))
    lines = [line for drain in newest[:SHOWN] for line in _drain(drain, now, columns)]
    return ["", "drains", *lines, *_more(newest, "drains")] if lines else []


def _drain(drain: Json, now: float, columns: int) -> Iterator[str]:
    done = drain.get("state") == "done"
    word = f"{drain.get('kind')}ed" if done else f"{drain.get('kind')} {drain.get('state')}"
    why = drain.get("reason") if done else drain.get("error") or drain.get("reason")
    return iter(wrapped(f"{ago(drain.get('at'), now)}: {plain(drain.get('node'))} {word}: {plain(why or '')}", columns))
