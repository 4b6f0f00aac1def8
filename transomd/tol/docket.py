"""Every job that is not over: decided about one after another, recorded, and read anew where it changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from transom_sql.records import Event, Job
from transom_sql.store import Change, Conflict, StoreError

from transomd.log import about
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.books import Books
from transomd.tol.decide import decide
from transomd.tol.observe import Observer
from transomd.tol.switches import withheld
from transomd.tol.view import Decision, JobView, World, merged
from transomd.tol.watchers import Watcher
from transomd.words import IntentState

log = logging.getLogger("transom.loop")

MAX_STEPS = 50
"""Decisions in a row about one job within a cycle; more than this is a fault in the rules, and said."""
QUICK_S = 0.3
"""How soon Slurm is asked again when a decision waits for its word; longer each time that it brings nothing new."""
SLOWER = 1.3


class Pace:
    """When Slurm is asked next: once a cycle, and sooner where a decision waits for its word."""

    def __init__(self) -> None:
        self.look_at = 0.0
        self.woken = asyncio.Event()
        self._quick_s = QUICK_S

    def soon(self, now: float) -> None:
        """Ask within :data:`QUICK_S`."""
        self.look_at = min(self.look_at, now + QUICK_S)
        self.woken.set()

    def hurry(self, now: float, cycle_s: float) -> None:
        """Ask before the cycle ends; less soon each time, until something has moved."""
        if now + self._quick_s < self.look_at:
            self.look_at = now + self._quick_s
            self._quick_s = min(self._quick_s * SLOWER, cycle_s)
            self.woken.set()

    def moved(self) -> None:
        """Note that asking brought something new."""
        self._quick_s = QUICK_S


class Docket:
    """``views`` are the jobs that are not over, or that an act is left of. To be changed under the loop's lock only."""

    def __init__(
        self,
        books: Books,
        observer: Observer,
        watcher: Watcher,
        clock: Callable[[], float],
        pace: Pace,
        *,
        settings: Callable[[], Settings],
        world: Callable[[], World],
        paused: Callable[[], str],
        due: Callable[[float], None],
        read_anew: Callable[[JobView], None],
    ) -> None:
        self._books = books
        self._observer = observer
        self._watcher = watcher
        self._clock = clock
        self._pace = pace
        self._settings = settings
        self._world = world
        self._paused = paused
        self._due = due
        self._read_anew = read_anew
        self.views: dict[int, JobView] = {}
        self._wakes: dict[int, float] = {}
        self._withheld: dict[int, str] = {}

    def withheld(self, job_id: int) -> str:
        """Say what would be done about a job if transom were not paused; empty where nothing would."""
        return self._withheld.get(job_id, "")

    def wakes(self) -> list[float]:
        """Return when jobs are to be looked at again."""
        return [at for at in self._wakes.values() if at]

    def overdue(self) -> set[int]:
        """Return the jobs that are to be looked at by now."""
        now = self._clock()
        return {job_id for job_id, at in self._wakes.items() if at and at <= now}

    def jobs_on(self, node: str) -> list[int]:
        """Return the active jobs whose current attempt holds a node."""
        return [i for i, v in self.views.items() if v.attempts and node in v.attempt.nodes and not v.state.final]

    async def add(self, job: Job) -> Job:
        """Take in a new job, and decide about it."""
        now = self._clock()
        said = [Event(at=now, kind="submitted", message=f"{job.user} submitted {job.name}")]
        if job.uid == 0:
            why = "it runs as root: its program may do anything to its nodes, and to files on shares that trust root"
            said.append(Event(at=now, kind="warning", message=why))
        stored = await self._books.db(self._books.store.add_job, job, said)
        await self.load(stored.id)
        await self.settle(stored.id)
        return stored

    async def cancel(self, job_id: int, who: str) -> bool:
        """Note that a person wants a job cancelled, and decide about it; False if that is known, or it is over."""
        view = self.views.get(job_id)
        if view is None or view.state.final or view.job.cancel_requested_by:
            return False
        await self._books.db(self._books.store.commit, Change(job=replace(view.job, cancel_requested_by=who)))
        await self.load(job_id)
        await self.settle(job_id)
        return True

    async def settle_all(self, jobs: Iterable[int]) -> int:
        """Decide about jobs; return how often something was recorded."""
        return sum([await self.settle(job_id) for job_id in jobs])

    async def settle(self, job_id: int) -> int:
        """Decide about one job. A fault in a rule is logged and keeps no other job from its turn.

        That the database failed is said already.
        """
        try:
            view = self.views.get(job_id)
            with about(job=job_id, attempt=view.job.attempt if view else None):
                return await self._decide(job_id)
        except Exception as error:
            if not isinstance(error, StoreError):
                log.exception("job %d: no decision could be made or recorded; the next cycle tries again", job_id)
            self._wakes.pop(job_id, None)
            return 0

    async def _decide(self, job_id: int) -> int:
        """Decide about one job until there is nothing more to record; return how often something was."""
        for step in range(MAX_STEPS):
            view = self.views.get(job_id)
            if view is None:
                return step
            now = self._clock()
            decision = decide(view, self._world(), self._settings(), now)
            self._withheld[job_id] = withheld(view, decision) if self._paused() else ""
            if self._withheld[job_id] or not decision.writes(view):
                self._attend(view, decision, now)
                return step
            await self._record(view, decision, now)
        log.error("job %d: %d decisions in a row; left for the next cycle", job_id, MAX_STEPS)
        self._wakes.pop(job_id, None)
        return MAX_STEPS

    def _attend(self, view: JobView, decision: Decision, now: float) -> None:
        """Note when the job is to be looked at again, and start finding out what it waits for."""
        wake_at = decision.wake_at or 0.0
        self._wakes[view.job.id] = wake_at if wake_at > now else 0.0
        if self._observer.meet(decision.wants, view):
            self._pace.hurry(now, self._settings().daemon.cycle_s)

    async def _record(self, view: JobView, decision: Decision, now: float) -> None:
        moved = decision.state is not view.state
        if moved or decision.reason != view.job.reason:
            log.info("job %d: %s → %s: %s", view.job.id, view.state, decision.state, decision.reason)
        job = replace(
            view.job,
            state=decision.state.value,
            reason=decision.reason,
            changed_at=now if moved else view.job.changed_at,
            **decision.job,
        )
        change = Change(
            job=job,
            attempts=decision.attempts,
            launches=decision.launches,
            incident=decision.incident,
            intents=decision.intents,
            events=decision.events,
        )
        try:
            stored = await self._books.db(self._books.store.commit, change)
        except Conflict:
            log.info("job %d changed meanwhile; deciding again", view.job.id)
            await self.load(view.job.id)
            return
        self._watcher.recorded(view, decision, now)
        if moved:
            self._pace.moved()
        if stored is None or decision.incident or decision.intents or decision.state.final:
            await self.load(view.job.id)
        else:
            # Most records are a step further of a program that runs: nothing in them has to be read back.
            new, known = merged(view, stored, decision.attempts, decision.launches), self.views.get(view.job.id, view)
            # The time that the database took was given back to its launcher meanwhile.
            self.views[view.job.id] = replace(new, report_at=known.report_at)
        if decision.intents:
            self._due(min(intent.not_before for intent in decision.intents))
            self._pace.woken.set()

    async def load(self, job_id: int) -> None:
        """Read one job anew, and keep what only lives in memory (its launcher's last report)."""
        view = await self._books.db(self.read, job_id)
        old = self.views.get(job_id)
        if view is None:
            return
        self._read_anew(view)
        if view.state.final and not any(i.state == IntentState.PENDING for i in view.intents.values()):
            for kept in (self.views, self._wakes, self._withheld):
                kept.pop(job_id, None)
            return
        report_at = old.report_at if old else self._clock()
        self.views[job_id] = replace(view, report=old.report if old else None, report_at=report_at)

    def read(self, job_id: int) -> JobView | None:
        """Read one job from the store, on the store's thread."""
        job = self._books.store.job(job_id)
        if job is None:
            return None
        return JobView(
            job=job,
            spec=JobSpec.from_stored(job.spec),
            attempts=tuple(self._books.store.attempts(job_id)),
            launches=tuple(self._books.store.launches(job_id)),
            incidents=tuple(self._books.store.incidents(job_id)),
            intents={i.key: i for i in self._books.store.intents(job_id=job_id)},
        )
