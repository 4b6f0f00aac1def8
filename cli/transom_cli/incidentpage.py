"""One incident as a page: verdict, timeline in seconds, what was done to nodes and why, evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transom_cli.jobpage import evidence_lines, verdict_text
from transom_cli.text import ago, hosts, plain, span, wrapped

Json = Mapping[str, Any]

_STAGES = (
    ("diagnosed", "the verdict was reached"),
    ("fenced", "nothing of the old launch runs any more, or its nodes are barred"),
    ("drained", "a node was drained"),
    ("acted", ""),
    ("recovered", "first step that is new"),
    ("closed", "closed"),
)
_TOLD = ("recovered", "failure", "verdict")
"""Events that say what the page says anyway."""
_SAME = {"drained": "drained", "acted": "launch"}
"""Stages that an event of a kind tells more exactly."""


def incident_page(answer: Json, *, now: float, columns: int) -> list[str]:
    """Return the page for what ``GET /v1/incidents/ID`` answered, within ``columns``."""
    incident, job = answer.get("incident") or {}, answer.get("job") or {}
    lines = wrapped(verdict_text(incident), columns, indent="")
    lines += wrapped(str(incident.get("summary") or "not diagnosed yet"), columns)
    lines += wrapped(_job(incident, job), columns)
    lines += ["", "timeline", *_timeline(answer, now, columns)]
    nodes = answer.get("nodes") or ()
    if nodes:
        lines += ["", "nodes", *(line for node in nodes for line in _node(node, columns))]
    evidence = incident.get("evidence") or ()
    lines += ["", f"evidence ({len(evidence)})" if evidence else "no evidence is recorded"]
    lines += [line for item in evidence for line in evidence_lines(item, columns)]
    return [
        *lines,
        "",
        *wrapped(f"next: transom status {job.get('id')}; transom logs {job.get('id')}", columns, indent=""),
    ]


def _job(incident: Json, job: Json) -> str:
    by = f", detected by {plain(incident['detected_by'])}" if incident.get("detected_by") else ""
    at = f" at step {incident['last_step']}" if incident.get("last_step") is not None else ""
    name = plain(job.get("name", ""))
    return f"job {job.get('id')} {name}, attempt {incident.get('attempt')}, epoch {incident.get('epoch')}{at}{by}"


def _timeline(answer: Json, now: float, columns: int) -> Iterator[str]:
    incident = answer.get("incident") or {}
    start = incident.get("detected_at")
    if not isinstance(start, (int, float)):
        return
    for at, text in sorted(_moments(answer, start, now), key=lambda moment: moment[0]):
        first, *more = wrapped(text, columns, indent=" " * 14) or [""]
        yield f"  {_offset(at - start):>9}   {first.strip()}"
        yield from more


def _offset(seconds: float) -> str:
    if abs(seconds) < 1000:
        return f"{seconds:+.1f} s"
    return f"{'-' if seconds < 0 else '+'}{span(abs(seconds))}"


def _moments(answer: Json, start: float, now: float) -> Iterator[tuple[float, str]]:
    incident = answer.get("incident") or {}
    last: Json = next((x for x in answer.get("launches") or () if x.get("epoch") == incident.get("epoch")), {})
    if last.get("last_step_at") and last["last_step_at"] <= start:
        yield last["last_step_at"], f"last step before it: {last.get('last_step')}"
    yield start, f"detected, {ago(start, now)}"
    events = [event for event in answer.get("events") or () if event.get("kind") not in _TOLD]
    kinds = {event.get("kind") for event in events}
    for word, text in _STAGES:
        at = incident.get(f"{word}_at")
        same = (word == "closed" and at == incident.get("recovered_at")) or _SAME.get(word) in kinds
        if isinstance(at, (int, float)) and not same:
            yield at, text or _acted(str(incident.get("action")))
    for event in events:
        yield float(event.get("at") or 0), f"{plain(event.get('kind'))}: {plain(event.get('message'))}"


def _acted(action: str) -> str:
    return "nothing was started again" if action in ("stop", "none") else "the program was started again"


def _node(node: Json, columns: int) -> list[str]:
    return wrapped(f"{node.get('node')}: {node.get('why')}", columns)


def incident_table_row(incident: Json, now: float) -> tuple[str, ...]:
    """Return an incident as a row: id, age, job, class, blame, nodes, action, how long it took."""
    took = "open"
    if incident.get("recovered_at"):
        took = span(incident["recovered_at"] - incident["detected_at"])
    elif incident.get("closed_at"):
        took = "-"
    return (
        str(incident.get("id")),
        ago(incident.get("detected_at"), now).removesuffix(" ago"),
        str(incident.get("job_id")),
        str(incident.get("class") or "?"),
        str(incident.get("blame") or "?"),
        hosts(incident.get("nodes") or ()) or "-",
        str(incident.get("action") or "-"),
        took,
    )


INCIDENT_HEADER: Sequence[str] = ("ID", "AGE", "JOB", "CLASS", "BLAME", "NODES", "ACTION", "RECOVERED IN")
INCIDENT_LIMITS: Sequence[int] = (6, 7, 6, 13, 9, 16, 9, 0)
