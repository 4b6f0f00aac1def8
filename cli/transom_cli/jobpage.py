"""One job as a page that says why it stands where it stands. Pure: JSON in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transom_cli.text import ago, clip, hosts, plain, span, wrapped
from transomd.api.wire import MEASURES
from transomd.words import Stage

Json = Mapping[str, Any]

_MOMENTS = ("diagnosed", "drained", "fenced", "acted", "recovered")
_SHOWN_EVIDENCE = 6
_SHOWN_PAIRS = 8
_SHOWN_INCIDENTS = 3
_PENDING = ("pending",)


def job_page(view: Json, *, now: float, columns: int) -> list[str]:
    """Return the page for what ``GET /v1/jobs/ID`` answered, within ``columns``."""
    job: Json = view.get("job") or {}
    lines = [*_head(job, columns), *_where(job, view, now, columns)]
    lines += _launches(view.get("launches") or (), now, columns)
    for incident in _newest(view.get("incidents") or ()):
        lines += _incident(incident, now, columns)
    lines += _pending(view.get("intents") or (), now, columns)
    return [*lines, *wrapped(f"next: {next_command(job, view.get('incidents') or ())}", columns, indent="", whole=True)]


def _head(job: Json, columns: int) -> Iterator[str]:
    yield clip(
        f"job {job.get('id')} {plain(job.get('name', ''))} ({plain(job.get('user', ''))}): {plain(job.get('state'))}",
        columns,
    )
    yield from wrapped(str(job.get("reason") or "no reason is recorded"), columns)
    if job.get("withheld"):
        yield from wrapped(f"transom is paused; otherwise it would {job['withheld']}", columns)
    yield ""


def _where(job: Json, view: Json, now: float, columns: int) -> Iterator[str]:
    for label, text in _facts(job, view, now):
        first, *more = wrapped(text, columns, indent=" " * 14) or [""]
        yield f"  {label:<12}{first.strip()}"
        yield from more


def _facts(job: Json, view: Json, now: float) -> Iterator[tuple[str, str]]:
    if job.get("nodes"):
        yield "nodes", f"{hosts(job['nodes'])} ({len(job['nodes'])})"
    if job.get("spares"):
        yield "spares", hosts(job["spares"]) if isinstance(job["spares"], list) else str(job["spares"])
    for attempt in view.get("attempts") or ():
        yield "attempt", _attempt(attempt, now)
    if job.get("step") is not None:
        yield "step", f"{job['step']}, {ago(job.get('step_at'), now)}"
    yield "checkpoint", _checkpoint(job, now)
    if job.get("checkpoint_trouble"):
        yield "", plain(job["checkpoint_trouble"])
    if job.get("copies") and job.get("finished_at") is None:
        yield "copies", _copies(job["copies"])
    if job.get("copies_trouble") and job.get("finished_at") is None:
        yield "", plain(job["copies_trouble"])
    if job.get("checkpoints_skipped"):
        yield "", f"{job['checkpoints_skipped']} steps were not stored: storage is slower than the saves"
    if job.get("restarts"):
        yield "restarts", str(job["restarts"])
    if job.get("run_dir"):
        yield "run folder", str(job["run_dir"])
    end = f", ended {ago(job['finished_at'], now)}" if job.get("finished_at") else ""
    yield "submitted", f"{ago(job.get('created_at'), now)}{end}"


def _copies(holders: Mapping[str, str]) -> str:
    pairs = [f"{plain(node)}'s on {plain(holder)}" for node, holder in sorted(holders.items())]
    more = f" and {len(pairs) - _SHOWN_PAIRS} more (all with --json)" if len(pairs) > _SHOWN_PAIRS else ""
    return ", ".join(pairs[:_SHOWN_PAIRS]) + more


def _attempt(attempt: Json, now: float) -> str:
    text = f"{attempt.get('number')}: Slurm job {attempt.get('slurm_job_id') or 'not known yet'}"
    if attempt.get("nodes"):
        text += f" on {hosts(attempt['nodes'])}"
    for word, key in (("without", "excluded"), ("barred", "barred")):
        if attempt.get(key):
            text += f", {word} {hosts(attempt[key])}"
    if attempt.get("ended_at"):
        return text + f", ended {ago(attempt['ended_at'], now)}: {attempt.get('end_reason') or 'no reason is recorded'}"
    return text + (f", started {ago(attempt['started_at'], now)}" if attempt.get("started_at") else ", waiting")


def _checkpoint(job: Json, now: float) -> str:
    checkpoint = job.get("checkpoint")
    text = "none yet"
    if checkpoint:
        text = f"step {checkpoint.get('step')} (epoch {checkpoint.get('epoch')}), {ago(checkpoint.get('at'), now)}"
    for stage in job.get("stages") or () if job.get("finished_at") is None else ():
        if stage["stage"] != Stage.STORAGE:
            text += f"; {Stage(stage['stage']).meaning}: step {stage['step']}, {ago(stage['at'], now)}"
            text += f" (one in every {stage['every']} steps)" if stage.get("every") else ""
        elif stage.get("every"):
            text += f"; storage gets one in every {stage['every']} steps (auto{_why(stage)})"
    return text


def _why(stage: Json) -> str:
    """What the interval of a stage follows from, if that is told."""
    if not all(name in stage for name in MEASURES):
        return ""
    write, step, mttf = (span(stage[name]) for name in MEASURES)
    return f": a write takes {write}, a step {step}, and the job's MTTF is {mttf}"


def _launches(launches: Sequence[Json], now: float, columns: int) -> Iterator[str]:
    if launches:
        yield ""
        yield "launches"
    for launch in launches:
        yield from wrapped(_launch(launch, now), columns)


def _launch(launch: Json, now: float) -> str:
    text = f"epoch {launch.get('epoch')} on {hosts(launch.get('nodes') or ())}: "
    first, last = launch.get("first_step"), launch.get("last_step")
    text += "no step yet" if last is None else f"steps {first} to {last}"
    if not launch.get("ended_at"):
        return text + f", started {ago(launch.get('started_at'), now)}"
    lasted = span(launch["ended_at"] - launch["started_at"])
    return text + f", ended after {lasted}: {launch.get('end_reason') or 'no reason is recorded'}"


def _newest(incidents: Sequence[Json]) -> list[Json]:
    return sorted(incidents, key=lambda item: float(item.get("detected_at") or 0), reverse=True)[:_SHOWN_INCIDENTS]


def _incident(incident: Json, now: float, columns: int) -> Iterator[str]:
    yield ""
    yield from wrapped(verdict_text(incident), columns, indent="")
    yield from wrapped(str(incident.get("summary") or "not diagnosed yet"), columns)
    yield from wrapped(_moments(incident, now), columns)
    evidence = sorted(incident.get("evidence") or (), key=_weight)
    for item in evidence[:_SHOWN_EVIDENCE]:
        yield from evidence_lines(item, columns)
    if len(evidence) > _SHOWN_EVIDENCE:
        yield f"    and {len(evidence) - _SHOWN_EVIDENCE} more: transom incident {incident.get('id')}"


def verdict_text(incident: Json) -> str:
    """Return number, class, blame, nodes, ranks, confidence and action of an incident."""
    text = f"incident {incident.get('id')}: {incident.get('class') or 'not diagnosed yet'}"
    if incident.get("blame"):
        text += f", blame {incident['blame']}"
    if incident.get("nodes"):
        text += f" {hosts(incident['nodes'])}"
    if incident.get("ranks"):
        text += f", ranks {_ranks(incident['ranks'])}"
    if incident.get("confidence"):
        text += f", confidence {incident['confidence']}"
    return text + (f" -> {incident['action']}" if incident.get("action") else "")


def _ranks(ranks: Sequence[Any]) -> str:
    shown = ",".join(str(rank) for rank in ranks[:12])
    return shown + (f" and {len(ranks) - 12} more" if len(ranks) > 12 else "")


def _moments(incident: Json, now: float) -> str:
    start = incident.get("detected_at")
    if not isinstance(start, (int, float)):
        return "detected at an unknown time"
    told = [f"{word} +{span(incident[f'{word}_at'] - start)}" for word in _MOMENTS if incident.get(f"{word}_at")]
    return ", ".join([f"detected {ago(start, now)}", *told])


def _weight(item: Json) -> int:
    return {"root": 0, "context": 1, "victim": 2}.get(str(item.get("role")), 1)


def evidence_lines(item: Json, columns: int) -> Iterator[str]:
    """Yield one piece of evidence: role, signature, node, rank, place and count, then its text."""
    rank = f" rank {item['rank']}" if item.get("rank") is not None else ""
    place = f"{item.get('file')}:{item.get('line')}" if item.get("file") else ""
    words = [
        str(item.get("role") or ""),
        str(item.get("signature") or ""),
        f"{item.get('node') or ''}{rank}".strip(),
        place,
    ]
    count = f" (seen {item['count']} times)" if (item.get("count") or 1) > 1 else ""
    yield from wrapped("  ".join(plain(word) for word in words if word) + count, columns, indent="  - ")
    yield from wrapped(str(item.get("text") or ""), columns, indent="    ")


def _pending(intents: Sequence[Json], now: float, columns: int) -> Iterator[str]:
    pending = [intent for intent in intents if intent.get("state") in _PENDING]
    if pending:
        yield ""
        yield "under way"
    for intent in pending:
        tries = f", tried {intent['tries']} times" if (intent.get("tries") or 0) > 1 else ""
        since = ago(intent.get("created_at"), now)
        yield from wrapped(f"{intent.get('kind')} ({plain(intent.get('key'))}), wanted {since}{tries}", columns)
    yield ""


def next_command(job: Json, incidents: Sequence[Json]) -> str:
    """Return the command that a person most likely wants next."""
    number, state = job.get("id"), str(job.get("state"))
    if state == "queued":
        return (
            f"squeue --start -j {job['slurm_job_id']}"
            if job.get("slurm_job_id")
            else f"transom events --job {number} -f"
        )
    if state == "running":
        return f"transom logs {number} -f"
    if state == "held":
        return f"what is said above; or give the job up: transom cancel {number}"
    if state == "completed" or (state == "cancelled" and job.get("checkpoint")):
        return f"transom ckpt list {number}"
    if state == "cancelled" and not job.get("epoch"):
        return "nothing of it has run; to run it after all: transom submit JOB.yaml"
    newest = next(iter(_newest(incidents)), {})
    if state == "failed" and newest.get("blame") == "program":
        rank = next((f" --rank {rank}" for rank in newest.get("ranks") or ()), "")
        return f"transom logs {number}{rank}; correct the program, then submit again"
    return f"transom events --job {number}" + ("" if state in ("failed", "cancelled") else " -f")
