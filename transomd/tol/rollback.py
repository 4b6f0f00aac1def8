"""Which checkpoint a job's next launch resumes from, and which one lies before it. Pure.

A launch resumes from the newest checkpoint: the highest step of the newest epoch. A rollback sets a bound to its step.
It stands until an epoch that began after it has a checkpoint of its own, which is the newest then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transom_sql.records import Incident, Launch

from transomd.tol.view import JobView
from transomd.words import Blame, FailureClass

SUSPECTS = frozenset({Blame.PROGRAM, Blame.UNKNOWN, Blame.NONE})
"""Who is blamed where the checkpoint itself may be what is wrong. A node that died says nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The steps that a restart can go back to: ``source`` as things are, ``older`` by a rollback.

    ``tried``: so many launches in a row resumed from ``source`` and failed before they had a newer checkpoint.
    """

    source: int | None = None
    older: int | None = None
    tried: int = 0


NO_WAY = Way()
"""Where no checkpoint is known."""


def bound(data: Mapping[str, Any]) -> int | None:
    """Return the step that a rollback allows at most (``data`` is the job's); None where the newest is right."""
    rollback = data.get("rollback")
    if not rollback or any(epoch > rollback["epoch"] for _, epoch in _known(data)):
        return None
    return int(rollback["step"])


def from_step(data: Mapping[str, Any]) -> str:
    """Return ``, from step N`` where a rollback is in force, else nothing."""
    step = bound(data)
    return "" if step is None else f", from step {step}"


def way_back(view: JobView, launches: Sequence[Launch], incidents: Sequence[Incident]) -> Way:
    """Return where a restart would resume, and what is before that among the checkpoints that are known to be whole."""
    limit = bound(view.job.data)
    allowed = [(epoch, step) for step, epoch in _known(view.job.data) if limit is None or step <= limit]
    if not allowed:
        return NO_WAY
    source = max(allowed)[1]
    before = max(((epoch, step) for epoch, step in allowed if step < source), default=None)
    return Way(source=source, older=before[1] if before else None, tried=_tried(source, launches, incidents))


def turned_back(view: JobView, step: int, epoch: int) -> dict[str, Any]:
    """Return the job's data with the bound set, after the failure of ``epoch``."""
    return {**view.job.data, "rollback": {"step": step, "epoch": max(epoch, view.job.epoch)}}


def _known(data: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(int(step), int(epoch)) for step, epoch in data.get("checkpoints", [])]


def _tried(source: int, launches: Sequence[Launch], incidents: Sequence[Incident]) -> int:
    blamed = {i.epoch: i.blame for i in incidents}
    never_started = {i.epoch for i in incidents if i.failure_class == FailureClass.LAUNCHER}
    count = 0
    for launch in reversed([x for x in launches if x.epoch not in never_started]):
        if launch.resume_step != source or blamed.get(launch.epoch, Blame.UNKNOWN) not in SUSPECTS:
            break
        count += 1
    return count
