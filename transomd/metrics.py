"""What Prometheus reads. Counters and histograms count from the start of this daemon; gauges are made when asked.

No label holds what a user wrote: states, classes, blames and verbs are words of transom, and jobs are numbers, of
active jobs only.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from transom_slurm.client import SlurmClient
from transom_slurm.errors import SlurmError, SlurmUnavailable
from transom_sql.records import Incident, Intent, Launch, Switch

from transomd.api.wire import LauncherReport
from transomd.tol.act import Outcome
from transomd.tol.admit import Admission
from transomd.tol.goodput import goodput
from transomd.tol.switches import BUDGET, PAUSE
from transomd.tol.view import Decision, JobView, SlurmView
from transomd.tol.watchers import Watcher
from transomd.words import IntentKind, JobState, Stage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_JOBS = 1000
"""Jobs that have a series of their own at most, newest first."""

# When each series began is one more series for each, and nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]
_FAST = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_SLOW = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
_VERBS = frozenset(name for name, verb in vars(SlurmClient).items() if inspect.iscoroutinefunction(verb))


class Metrics(Watcher):
    """Counts what the loop does. :meth:`text` is the answer to GET /metrics."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._slurm = SlurmView()
        ProcessCollector(registry=self._registry)
        self._jobs_and_incidents()
        self._work()
        self._levels()

    def _jobs_and_incidents(self) -> None:
        self._ended = self._counter("transom_jobs_ended", "Jobs that came to an end, by their last state.", "state")
        self._restarts = self._counter("transom_restarts", "Launches after a job's first, by what failed.", "class")
        self._incidents = self._counter("transom_incidents", "Diagnosed failures.", "class", "blame")
        said = "Seconds from the last step before a failure to its detection (an upper bound)."
        self._detect = self._histogram("transom_detect_seconds", said, _SLOW, "class")
        self._diagnose = self._histogram(
            "transom_diagnose_seconds", "Seconds from a failure's detection to its verdict.", _SLOW, "class"
        )
        said = "Seconds from a failure's detection to the first new step."
        self._recover = self._histogram("transom_recover_seconds", said, _SLOW, "class")
        self._granted = self._counter("transom_drains_granted", "Drains that the budgets let through.")
        self._refused = self._counter("transom_drains_refused", "Drains that were refused, by why.", "cause")
        self._acts = self._counter("transom_acts", "Acts on the cluster that ended, by kind and how.", "kind", "state")

    def _work(self) -> None:
        self._cycle = self._histogram("transom_cycle_seconds", "Duration of a cycle.", _FAST)
        self._failed = self._counter("transom_cycles_failed", "Cycles that failed and were tried again.")
        said = "Duration of a call of Slurm."
        self._query = self._histogram("transom_slurm_query_seconds", said, _FAST, "verb")
        said = "Calls that Slurm did not answer, or refused."
        self._no_answer = self._counter("transom_slurm_failures", said, "verb", "kind")
        self._reports = self._counter("transom_launcher_reports", "Reports of launchers.")
        self._store = self._histogram("transom_store_seconds", "Duration of a call of the database.", _FAST)
        self._store_failed = self._counter("transom_store_failures", "Calls of the database that failed.")

    def _levels(self) -> None:
        self._jobs = self._gauge("transom_jobs", "Jobs that have not ended, by state.", "state")
        self._age = self._gauge("transom_slurm_answer_age_seconds", "Age of Slurm's newest answer.", "what")
        self._pending = self._gauge("transom_intents_pending", "Acts that are recorded and not yet done.", "kind")
        said = "Productive share of the time since an active job was submitted."
        self._goodput = self._gauge("transom_job_goodput_ratio", said, "job")
        said = "Newest step that every rank of an active job has in a stage of the checkpoint engine."
        self._stage = self._gauge("transom_job_checkpoint_step", said, "job", "stage")
        said = "In every how many steps of an active job storage gets one, where that is chosen by measure."
        self._every = self._gauge("transom_job_storage_every_steps", said, "job")
        self._paused = self._gauge("transom_paused", "1 while every act is stopped by a person.")
        self._tripped = self._gauge("transom_budget_tripped", "1 while a drain budget is tripped.", "budget")
        self._info = self._gauge("transom_info", "1, with the version.", "version")
        self._notices = self._gauge("transom_notices", "Runs of notify.command, by how they ended.", "outcome")
        self._lost = self._gauge("transom_log_records_lost", "Records that were not logged: the log's target is slow.")

    def _counter(self, name: str, said: str, *labels: str) -> Counter:
        return Counter(name, said, labels, registry=self._registry)

    def _gauge(self, name: str, said: str, *labels: str) -> Gauge:
        return Gauge(name, said, labels, registry=self._registry)

    def _histogram(self, name: str, said: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, said, labels, buckets=buckets, registry=self._registry)

    # --- as a watcher -------------------------------------------------------------------------------------------

    def recorded(self, view: JobView, decision: Decision, now: float) -> None:
        """Count what one decision says."""
        if decision.state is not view.state and decision.state.final:
            self._ended.labels(decision.state.value).inc()
        known = {launch.epoch for launch in view.launches}
        if known:
            failed = _class(view.incidents[-1] if view.incidents else None)
            self._restarts.labels(failed).inc(sum(1 for launch in decision.launches if launch.epoch not in known))
        if decision.incident is not None:
            before = next((i for i in view.incidents if i.id == decision.incident.id), None)
            self._incident(before, decision.incident, view.launches)

    def _incident(self, before: Incident | None, incident: Incident, launches: Iterable[Launch]) -> None:
        failed = _class(incident)
        if incident.diagnosed_at is not None and (before is None or before.diagnosed_at is None):
            self._incidents.labels(failed, incident.blame or "unknown").inc()
            self._diagnose.labels(failed).observe(incident.diagnosed_at - incident.detected_at)
            last = next((x.last_step_at for x in launches if x.epoch == incident.epoch and x.last_step_at), None)
            if last is not None and last <= incident.detected_at:
                self._detect.labels(failed).observe(incident.detected_at - last)
        if incident.recovered_at is not None and (before is None or before.recovered_at is None):
            self._recover.labels(failed).observe(incident.recovered_at - incident.detected_at)

    def acted(self, intent: Intent, outcome: Outcome, now: float) -> None:
        """Count an act; one that is to be tried again counts as pending."""
        self._acts.labels(intent.kind, outcome.state.value).inc()

    def admitted(self, admission: Admission, now: float) -> None:
        """Count drains."""
        self._granted.inc(len(admission.granted))
        for refusal in admission.refused:
            self._refused.labels(refusal.cause or "unknown").inc()

    def reported(self, report: LauncherReport) -> None:
        """Count a report."""
        self._reports.inc()

    def looked(self, slurm: SlurmView, now: float) -> None:
        """Keep when Slurm last answered."""
        self._slurm = slurm

    def cycled(self, seconds: float, error: Exception | None) -> None:
        """Time a cycle."""
        self._cycle.observe(seconds)
        self._failed.inc(error is not None)

    def stored(self, seconds: float, ok: bool) -> None:
        """Time a call of the store."""
        self._store.observe(seconds)
        self._store_failed.inc(not ok)

    def asked(self, verb: str, seconds: float, error: SlurmError | None) -> None:
        """Time a call of Slurm."""
        self._query.labels(verb).observe(seconds)
        if error is not None:
            kind = "unavailable" if isinstance(error, SlurmUnavailable) else "refused"
            self._no_answer.labels(verb, kind).inc()

    # --- as an answer -------------------------------------------------------------------------------------------

    def text(
        self,
        views: Mapping[int, JobView],
        pending: Iterable[Intent],
        switches: Mapping[str, Switch],
        *,
        version: str,
        notices: Mapping[str, int],
        log_lost: int,
    ) -> bytes:
        """Return everything in Prometheus' text format."""
        self._info.labels(version).set(1)
        self._lost.set(log_lost)
        for outcome, count in notices.items():
            self._notices.labels(outcome).set(count)
        self._count_jobs(views)
        kinds = [intent.kind for intent in pending]
        for kind in IntentKind:
            self._pending.labels(kind.value).set(kinds.count(kind.value))
        self._show_switches(switches)
        self._show_age()
        return generate_latest(self._registry)

    def _count_jobs(self, views: Mapping[int, JobView]) -> None:
        states = [view.state for view in views.values()]
        for state in JobState:
            if not state.final:
                self._jobs.labels(state.value).set(states.count(state))
        now = self._clock()
        self._goodput.clear()
        self._stage.clear()
        self._every.clear()
        for number in sorted(views, reverse=True)[:MAX_JOBS]:
            view = views[number]
            self._goodput.labels(str(number)).set(goodput(view.launches, view.job.created_at, now).share)
            for stage in view.job.data.get("stages", ()):
                self._stage.labels(str(number), stage["stage"]).set(stage["step"])
                if stage["stage"] == Stage.STORAGE and "every" in stage:
                    self._every.labels(str(number)).set(stage["every"])

    def _show_switches(self, switches: Mapping[str, Switch]) -> None:
        paused = switches.get(PAUSE)
        self._paused.set(paused is not None and paused.since is not None)
        for name, switch in switches.items():
            if name.startswith(BUDGET):
                self._tripped.labels(name.removeprefix(BUDGET)).set(switch.since is not None)

    def _show_age(self) -> None:
        now = self._clock()
        for what, at in (("jobs", self._slurm.jobs_at), ("nodes", self._slurm.nodes_at)):
            self._age.labels(what).set(now - at if at else float("inf"))


def _class(incident: Incident | None) -> str:
    return (incident.failure_class if incident is not None else "") or "unknown"


def metered(client: SlurmClient, told: Callable[[str, float, SlurmError | None], None]) -> SlurmClient:
    """Return a client that tells the duration of each call."""
    return cast(SlurmClient, _Metered(client, told))


class _Metered:
    """A client as it is, but for the clock beside each verb."""

    def __init__(self, client: SlurmClient, told: Callable[[str, float, SlurmError | None], None]) -> None:
        self._client = client
        self._told = told

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._client, name)
        if name not in _VERBS:
            return verb

        async def timed(*args: Any, **kwargs: Any) -> Any:
            began, failed = time.monotonic(), None
            try:
                return await verb(*args, **kwargs)
            except SlurmError as error:
                failed = error
                raise
            finally:
                self._told(name, time.monotonic() - began, failed)

        return timed
