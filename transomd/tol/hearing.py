"""Whether launchers are silent, or it is this daemon that does not hear."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from transom_slurm.types import SlurmJob

from transomd.settings import Settings
from transomd.tol.facts import ended, suspended
from transomd.tol.view import Absence, JobView, SlurmView
from transomd.words import JobState

log = logging.getLogger("transom.loop")

MANY = 3
"""Launchers that are silent at once before it may be this daemon that does not hear."""
STOOD_STILL_S = 30.0
"""A pause of this process that is longer than a cycle and this (a suspended machine) is nobody's silence."""
SLOW_STORE_S = 1.0
"""A call to the database that takes longer keeps reports waiting."""


class Hearing:
    """``deaf`` is set while most launchers are silent at once: that is no coincidence, and no fault of theirs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listened_at: float | None = None
        self.deaf = False

    def listened(self) -> None:
        """Note that reports could be heard until now."""
        self._listened_at = self._clock()

    def after_a_pause(self, views: dict[int, JobView], settings: Settings) -> dict[int, JobView]:
        """Return the jobs with the time given back to their launchers in which this process stood still."""
        still = 0.0 if self._listened_at is None else self._clock() - self._listened_at
        if still < 0.0:
            # The clock was set back: silence is counted anew, not from a time that is still to come.
            now = self._clock()
            return {job_id: replace(view, report_at=min(now, view.report_at)) for job_id, view in views.items()}
        if still <= STOOD_STILL_S + settings.daemon.cycle_s:
            return views
        log.warning("transomd stood still for %.0f s; no launcher was silent in that time", still)
        return {job_id: replace(view, report_at=view.report_at + still) for job_id, view in views.items()}

    def after_a_wait(self, views: dict[int, JobView], seconds: float) -> dict[int, JobView]:
        """Return the jobs with the time given back to their launchers in which the database let no report be taken."""
        if seconds <= SLOW_STORE_S:
            return views
        now = self._clock()
        return {i: replace(view, report_at=min(now, view.report_at + seconds)) for i, view in views.items()}

    def while_suspended(self, views: dict[int, JobView], slurm: SlurmView) -> dict[int, JobView]:
        """Return the jobs with the launchers of those heard now that Slurm has suspended: they cannot speak."""
        still = {job_id for job_id, view in views.items() if suspended(view, slurm)}
        now = self._clock()
        return {i: replace(view, report_at=now) if i in still else view for i, view in views.items()}

    def count(self, views: Iterable[JobView], slurm: SlurmView, settings: Settings) -> None:
        """Find out anew whether this daemon is deaf."""
        limit = self._clock() - settings.watch.launcher_silence_s
        heard = [view.report_at for view in views if _may_speak(view, slurm)]
        silent = sum(1 for at in heard if at < limit)
        deaf = silent >= MANY and silent * 2 > len(heard)
        if deaf and not self.deaf:
            log.error("%d of %d launchers are silent: can nodes reach transomd? They are let be", silent, len(heard))
        self.deaf = deaf


def _may_speak(view: JobView, slurm: SlurmView) -> bool:
    """Whether the job is to have a launcher: between two attempts, which may be long, there is none."""
    if view.state is not JobState.RECOVERING:
        return view.state is JobState.RUNNING
    job = slurm.job(view.attempt)
    if not isinstance(job, SlurmJob):
        return job is Absence.UNKNOWN
    return not (ended(job) or "COMPLETING" in job.status.flags)
