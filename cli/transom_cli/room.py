"""Whether a job can be started in its partition, as far as sinfo tells: said at submission, and never in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from transom_slurm.runner import CommandError, clean_env, run

from transom_cli.text import span
from transomd.forms import time_limit_seconds
from transomd.spec import JobSpec

SINFO = ("sinfo", "-h", "-o", "%P|%a|%l|%s|%F")
DEADLINE_S = 5.0


class Partition(NamedTuple):
    """A line of sinfo. ``most`` nodes a job and ``limit_s`` are None where there is no limit."""

    name: str
    default: bool
    state: str
    limit_s: int | None
    most: int | None
    away: int
    total: int


def notes(spec: JobSpec) -> list[str]:
    """Return what will keep the job waiting, a sentence each; nothing where sinfo does not answer."""
    try:
        answer = asyncio.run(run(SINFO, env=clean_env(), timeout=DEADLINE_S))
    except CommandError:
        return []
    return remarks(spec, partitions(answer.stdout)) if answer.rc == 0 else []


def partitions(text: str) -> list[Partition]:
    """Read sinfo's lines; what cannot be read is left out."""
    found = (_partition(line.split("|")) for line in text.splitlines())
    return [one for one in found if one is not None]


def _partition(fields: list[str]) -> Partition | None:
    if len(fields) != 5:
        return None
    name, state, limit, sizes, counts = fields
    most = sizes.rpartition("-")[2]
    try:
        _, _, away, total = (int(count) for count in counts.split("/"))
        limit_s = time_limit_seconds(limit)
        most_nodes = None if most == "infinite" else int(most)
    except ValueError:
        return None
    return Partition(name.rstrip("*"), name.endswith("*"), state, limit_s, most_nodes, away, total)


def remarks(spec: JobSpec, found: Iterable[Partition]) -> list[str]:
    """Say what keeps the job waiting in every partition that it may run in; nothing if one of them can start it."""
    wanted = spec.partition.split(",") if spec.partition else []
    mine = [one for one in found if (one.name in wanted if wanted else one.default)]
    told = [_remark(spec, one) for one in mine]
    return told if all(told) else []


def _remark(spec: JobSpec, there: Partition) -> str:
    count, name = spec.total_nodes, f"partition {there.name}"
    asked = f"{count} nodes are asked for" + (f" ({spec.nodes} and {spec.spares} spare)" if spec.spares else "")
    look = f"Slurm may never start it so: scontrol show partition {there.name}"
    if count > there.total:
        return f"{asked}, and {name} has {there.total} in all; {look}"
    if there.most is not None and count > there.most:
        return f"{asked}, and {name} gives a job {there.most} at most; {look}"
    if there.limit_s is not None and (spec.time_limit_s or 0) > there.limit_s:
        return f"time_limit is {span(spec.time_limit_s or 0)}, and {name} allows {span(there.limit_s)}; {look}"
    if there.state != "up":
        return f"{name} is {there.state}, and starts no job until an administrator sets it up"
    if count > there.total - there.away:
        return f"{asked}, and {there.away} of the {there.total} of {name} are out of service: it waits (sinfo -R)"
    return ""
