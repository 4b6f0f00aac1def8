"""Goodput: how much of a job's time went into steps that are in its surviving history. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transom_sql.records import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of one job went: every second is in one of five buckets, which add up to ``wall_s``.

    ``productive_s``: computing steps that are in the surviving history, each counted once, with the checkpoints between
    them. ``redone_s``: computing steps whose result was lost with a failure. ``starting_s``: from submission to the
    first step (queue, checks, start). ``stopped_s``: from the last step of a launch to the start of the first step of
    the next. ``ending_s``: from the last step to the end.
    """

    productive_s: float = 0.0
    redone_s: float = 0.0
    starting_s: float = 0.0
    stopped_s: float = 0.0
    ending_s: float = 0.0
    kept_steps: int = 0
    redone_steps: int = 0

    @property
    def wall_s(self) -> float:
        """All the time that was looked at, waiting in the queue included."""
        return self.productive_s + self.redone_s + self.starting_s + self.stopped_s + self.ending_s

    @property
    def share(self) -> float:
        """The productive part of ``wall_s``, 0 to 1."""
        return self.productive_s / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The steps that one launch computed."""

    first: int
    last: int
    began: float
    ended: float

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


def goodput(launches: Sequence[Launch], began: float, ended: float) -> Goodput:
    """Divide the time from ``began`` (submission) to ``ended`` (or now) by what the launches' steps say.

    A step of a launch survives unless a later launch computed it anew.
    """
    stretches = _stretches(launches, began, ended)
    found = Goodput(starting_s=(stretches[0].began if stretches else ended) - began)
    for index, stretch in enumerate(stretches):
        later = stretches[index + 1 :]
        survives = min([stretch.last, *(other.first - 1 for other in later)])
        kept = max(0, survives - stretch.first + 1)
        productive = (stretch.ended - stretch.began) * kept / stretch.steps
        idle = (later[0].began if later else ended) - stretch.ended
        found = Goodput(
            productive_s=found.productive_s + productive,
            redone_s=found.redone_s + stretch.ended - stretch.began - productive,
            starting_s=found.starting_s,
            stopped_s=found.stopped_s + (idle if later else 0.0),
            ending_s=0.0 if later else idle,
            kept_steps=found.kept_steps + kept,
            redone_steps=found.redone_steps + stretch.steps - kept,
        )
    return found


def _stretches(launches: Sequence[Launch], began: float, ended: float) -> list[_Stretch]:
    """The launches that came to a step, none overlapping another, each from the start of its first step."""
    found: list[_Stretch] = []
    for launch in sorted(launches, key=lambda launch: launch.epoch):
        first, last = launch.first_step, launch.last_step
        first_at, last_at = launch.first_step_at, launch.last_step_at
        if first is None or last is None or first_at is None or last_at is None or last < first:
            continue
        # When the first step began nobody saw; it took about as long as the others.
        step_s = (last_at - first_at) / (last - first) if last > first else 0.0
        earliest = max(launch.started_at, found[-1].ended if found else began)
        start = min(max(first_at - step_s, earliest), ended)
        found.append(_Stretch(first, last, start, max(start, min(last_at, ended))))
    return found
