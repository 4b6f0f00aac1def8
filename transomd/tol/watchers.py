"""Who is told what the loop does: metrics, notifications, the watchdog. None of them can hold it up or stop it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from transom_sql.records import Intent, Switch

from transomd.api.wire import LauncherReport
from transomd.tol.act import Outcome
from transomd.tol.admit import Admission
from transomd.tol.view import Decision, JobView, SlurmView

log = logging.getLogger("transom.watchers")


class Watcher:
    """Told of everything, after it is recorded; does nothing. A subclass takes what it wants, and must not block."""

    def recorded(self, view: JobView, decision: Decision, now: float) -> None:
        """A decision about a job, which was as ``view`` before, is recorded."""

    def acted(self, intent: Intent, outcome: Outcome, now: float) -> None:
        """An act has ended or is to be tried again."""

    def admitted(self, admission: Admission, now: float) -> None:
        """Drains were granted or newly refused."""

    def switched(self, switch: Switch, now: float) -> None:
        """Something was stopped, or may go on."""

    def reported(self, report: LauncherReport) -> None:
        """A launcher reported."""

    def looked(self, slurm: SlurmView, now: float) -> None:
        """Slurm was asked, and this is now the newest that is known of it."""

    def cycled(self, seconds: float, error: Exception | None) -> None:
        """A cycle came to its end, or failed."""

    def stored(self, seconds: float, ok: bool) -> None:
        """A call of the store took so long."""


class Watchers(Watcher):
    """Tells several; one that fails is logged and keeps none of the others from being told."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self._watchers = list(watchers)

    def add(self, watcher: Watcher) -> None:
        """Tell one more."""
        self._watchers.append(watcher)

    def _tell(self, call: Callable[[Watcher], None]) -> None:
        for watcher in self._watchers:
            try:
                call(watcher)
            except Exception:
                log.exception("%s failed", type(watcher).__name__)

    def recorded(self, view: JobView, decision: Decision, now: float) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.recorded(view, decision, now))

    def acted(self, intent: Intent, outcome: Outcome, now: float) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.acted(intent, outcome, now))

    def admitted(self, admission: Admission, now: float) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.admitted(admission, now))

    def switched(self, switch: Switch, now: float) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.switched(switch, now))

    def reported(self, report: LauncherReport) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.reported(report))

    def looked(self, slurm: SlurmView, now: float) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.looked(slurm, now))

    def cycled(self, seconds: float, error: Exception | None) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.cycled(seconds, error))

    def stored(self, seconds: float, ok: bool) -> None:
        """Tell all."""
        self._tell(lambda watcher: watcher.stored(seconds, ok))
