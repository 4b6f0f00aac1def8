"""All jobs as a table. Pure: JSON in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transom_cli.text import ago, hosts, table

HEADER = ("ID", "NAME", "USER", "STATE", "STEP", "NODES", "CHANGED", "WHY")
LIMITS = (8, 18, 10, 10, 9, 16, 8, 0)


def job_list(jobs: Sequence[Mapping[str, Any]], *, now: float, columns: int) -> list[str]:
    """Return one line a job under a header, within ``columns``."""
    return table(HEADER, [_row(job, now) for job in jobs], LIMITS, columns)


def _row(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    return (
        str(job.get("id", "")),
        str(job.get("name", "")),
        str(job.get("user", "")),
        str(job.get("state", "")),
        _step(job),
        hosts(job.get("nodes") or ()) or "-",
        ago(job.get("changed_at"), now).removesuffix(" ago"),
        str(job.get("reason", "")),
    )


def _step(job: Mapping[str, Any]) -> str:
    step = job.get("step")
    return "-" if step is None else str(step)
