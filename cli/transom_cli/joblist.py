"""All jobs as a table. Pure: JSON in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transom_cli.text import ago, hosts, table, wrapped

HEADER: tuple[str, ...] = ("ID", "NAME", "USER", "STATE", "STEP", "CHANGED", "NODES", "WHY")
LIMITS: tuple[int, ...] = (8, 18, 10, 10, 9, 8, 24, 0)
WIDE = 110
"""Columns from which the reason has a column; below, it has a line of its own where a person should see it."""

_TELLING = ("held", "recovering", "failed")

Line = tuple[str, str]


def job_list(jobs: Sequence[Mapping[str, Any]], *, now: float, columns: int) -> list[Line]:
    """Return a header and a line a job within ``columns``, each with the state it shows (empty: none)."""
    rows = [_row(job, now) for job in jobs]
    wide = not columns or columns >= WIDE
    shown = slice(None) if wide else slice(len(HEADER) - 1)
    header, *lines = table(HEADER[shown], [row[shown] for row in rows], LIMITS[shown], columns)
    told: list[Line] = [(header, "")]
    for job, line in zip(jobs, lines, strict=True):
        state = str(job.get("state"))
        told.append((line, state))
        if not wide and (state in _TELLING or job.get("withheld")):
            told += [(more, "") for more in wrapped(_why(job), columns, indent="    ")[:2]]
    return told


def _row(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    step = job.get("step")
    return (
        str(job.get("id", "")),
        str(job.get("name", "")),
        str(job.get("user", "")),
        str(job.get("state", "")),
        "-" if step is None else str(step),
        ago(job.get("changed_at"), now).removesuffix(" ago"),
        hosts(job.get("nodes") or ()) or "-",
        _why(job),
    )


def _why(job: Mapping[str, Any]) -> str:
    withheld = f"paused, would {job['withheld']}; " if job.get("withheld") else ""
    return f"{withheld}{job.get('reason', '')}"
