"""The reconcile loop: observe, decide, admit, record, act. The frame is here; jobs are kept by :mod:`docket`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from transom_sql.records import Intent, Job, Switch
from transom_sql.store import Store, StoreError

from transomd.api.wire import Directive, LauncherReport
from transomd.settings import Settings
from transomd.tol.act import Actor
from transomd.tol.acting import Acts
from transomd.tol.books import Books
from transomd.tol.clearings import Clearings, record_lifted
from transomd.tol.docket import Docket, Pace
from transomd.tol.draining import DrainDesk
from transomd.tol.hearing import Hearing
from transomd.tol.observe import Observer
from transomd.tol.reports import Reports
from transomd.tol.switchboard import Switchboard
from transomd.tol.switches import goes_on_while_paused
from transomd.tol.view import JobView, SlurmView, World
from transomd.tol.watchers import Watcher
from transomd.words import IntentState, JobState

log = logging.getLogger("transom.loop")
ACTIVE = tuple(state.value for state in JobState if not state.final)


class Operator:
    """Owns every job, and the ``books``. All changes of jobs go through here, one after another."""

    def __init__(
        self,
        store: Store,
        observer: Observer,
        actor: Actor,
        settings: Settings,
        clock: Callable[[], float],
        watcher: Watcher | None = None,
        *,
        executor: Executor | None = None,
    ) -> None:
        self._observer = observer
        self._settings = settings
        self._clock = clock
        self._watcher = watcher or Watcher()
        self._lock = asyncio.Lock()
        self.books = Books(store, self._watcher, self._waited, executor=executor)
        self._board = Switchboard(self.books, self._watcher)
        self.clearings = Clearings()
        self._acts = Acts(actor, self.books, clock, self._lock, self._watcher, self.clearings, self._acted)
        self._drains = DrainDesk(actor, self.books, self._watcher, self.clearings.at)
        self._hearing = Hearing(clock)
        self._pace = Pace()
        self._docket = Docket(
            self.books,
            observer,
            self._watcher,
            clock,
            self._pace,
            settings=lambda: self._settings,
            world=self.world,
            paused=lambda: self.paused,
            due=self._acts.due,
            read_anew=lambda view: self._drains.note(view.incidents),
        )
        self._reports = Reports(
            self.books,
            self._docket,
            clock,
            self._pace,
            settings=lambda: self._settings,
            world=observer.world,
            paused=lambda: self.paused,
        )

    # --- what is so -------------------------------------------------------------------------------------------------

    def world(self) -> World:
        """Return the newest snapshot."""
        world = self._observer.world()
        return replace(world, deaf=True) if self._hearing.deaf else world

    async def nodes_now(self) -> SlurmView:
        """Ask Slurm for the nodes: what a person is about to change must not be judged by how it was a moment ago."""
        return await self._observer.look_at_nodes()

    @property
    def paused(self) -> str:
        """Who stopped every act, and why; empty when they go on."""
        return self._board.paused

    @property
    def switches(self) -> Mapping[str, Switch]:
        """Everything that was ever stopped, by name."""
        return self._board.known

    def withheld(self, job_id: int) -> str:
        """Say what would be done about a job if transom were not paused; empty where nothing would."""
        return self._docket.withheld(job_id)

    def all_withheld(self) -> dict[int, str]:
        """Return what would be done if transom were not paused, by the job."""
        return {job: why for job in self.views() if (why := self.withheld(job))}

    def views(self) -> Mapping[int, JobView]:
        """Return every active job."""
        return self._docket.views

    def acting(self) -> list[str]:
        """Return the keys of the acts that are being carried out."""
        return self._acts.under_way()

    def view(self, job_id: int) -> JobView | None:
        """Return what is known about an active job."""
        return self._docket.views.get(job_id)

    def jobs_on(self, node: str) -> list[int]:
        """Return the active jobs whose current attempt holds a node."""
        return self._docket.jobs_on(node)

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read every job that is not over, and every switch: what a daemon that was killed left behind."""
        await self._board.load()
        db, store = self.books.db, self.books.store
        pending = await db(store.intents, states=[IntentState.PENDING.value])
        unfinished = {intent.job_id for intent in pending if intent.job_id is not None}
        active = {job.id for job in await db(store.jobs, states=ACTIVE, limit=None)}
        for job_id in sorted(active | unfinished):
            await self._docket.load(job_id)
        self.clearings.load(await db(store.nodes))
        await self._drains.start(self._clock())

    async def run(self) -> None:
        """Work until cancelled; what fails is logged and tried again."""
        while True:
            began = time.monotonic()
            try:
                log.debug("%s", await self.step())
            except Exception as error:
                if not isinstance(error, StoreError):
                    log.exception("a cycle failed; the next one tries again")
                self._pace.look_at = self._clock() + self._settings.daemon.cycle_s
                self._watcher.cycled(time.monotonic() - began, error)
            await self._rest()

    async def _rest(self) -> None:
        until = min(self._settings.daemon.cycle_s, max(0.0, self.due_at() - self._clock()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._pace.woken.wait(), until)
        self._pace.woken.clear()
        await asyncio.sleep(0.02)

    def due_at(self) -> float:
        """Return when there is something to do next: a look at Slurm, a deadline of a job, an act."""
        return min([self._pace.look_at, self._acts.due_at, *self._docket.wakes()])

    async def step(self) -> str:
        """Do what is due: a whole cycle when Slurm is to be looked at, else only what is new."""
        self._docket.views = self._hearing.after_a_pause(self._docket.views, self._settings)
        wait = self._pace.look_at - self._clock()
        # Much longer than a cycle: the clock was set back, and Slurm would not be looked at until it has caught up.
        if wait <= 0.0 or wait > self._settings.daemon.cycle_s + 1.0:
            began = time.monotonic()
            said = await self.cycle()
            self._watcher.cycled(time.monotonic() - began, None)
        else:
            async with self._lock:
                await self._docket.settle_all(self._observer.news() | self._docket.overdue())
                said = f"{await self._start_acts()} acts begun"
        self._hearing.listened()
        return said

    async def cycle(self) -> str:
        """Do one whole cycle and return a sentence that says what it did."""
        self._pace.look_at = self._clock() + self._settings.daemon.cycle_s
        await self._observer.look([v.attempt for v in self._docket.views.values() if v.attempts])
        self._watcher.looked(self._observer.world().slurm, self._clock())
        self._observer.news()
        slurm = self._observer.world().slurm
        self._docket.views = self._hearing.while_suspended(self._docket.views, slurm)
        self._hearing.count(self._docket.views.values(), slurm, self._settings)
        async with self._lock:
            await self._record_lifted(self._observer.world().slurm)
            written = await self._docket.settle_all(list(self._docket.views))
            drains = await self._grant_drains()
            acts = await self._start_acts()
        return (
            f"{len(self._docket.views)} jobs, {written} decisions recorded, {drains} drains granted, {acts} acts begun"
        )

    async def _record_lifted(self, slurm: SlurmView) -> None:
        lifted = self.clearings.look(slurm)
        if lifted:
            # Recorded before it is noted: what the database refuses is looked at again in the next cycle.
            await self.books.db(record_lifted, self.books.store, lifted, slurm.nodes_at)
        for name in lifted:
            self.clearings.note(name, slurm.nodes_at)

    async def _grant_drains(self) -> int:
        granted, trips = await self._drains.grant(
            self.world(), self._settings, self.paused, self.switches, self._clock()
        )
        for trip in trips:
            await self._board.set(trip, f"{trip.name} is tripped: {trip.reason}")
        if granted:
            self._acts.due(self._clock())
        return granted

    async def _start_acts(self) -> int:
        paused = self.paused
        return await self._acts.start(self._docket.views, lambda i, v: not paused or goes_on_while_paused(i, v))

    async def _acted(self, intent: Intent) -> None:
        """An act has ended, or waits for its next try. Called under the lock."""
        if intent.job_id in self._docket.views:
            await self._docket.load(intent.job_id)
            await self._docket.settle(intent.job_id)
        self._pace.woken.set()

    def _waited(self, seconds: float) -> None:
        """A call of the store has kept others waiting."""
        self._docket.views = self._hearing.after_a_wait(self._docket.views, seconds)

    # --- what comes in ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the loop look for what is due now."""
        self._acts.due(self._clock())
        self._pace.woken.set()

    def propose_from(self, source: Callable[[SlurmView, float], Iterable[Intent]]) -> None:
        """Have further drains proposed in every cycle, under the same budgets and guards."""
        self._drains.propose_from(source)

    async def admit_now(self) -> None:
        """Decide about all proposed drains at once; what is granted is recorded when this returns."""
        async with self._lock:
            await self._grant_drains()
        self.wake()

    def read(self, job_id: int) -> JobView | None:
        """Read one job from the store, on the store's thread."""
        return self._docket.read(job_id)

    async def submit(self, job: Job) -> Job:
        """Take in a new job."""
        async with self._lock:
            stored = await self._docket.add(job)
        self.wake()
        return stored

    async def cancel(self, job_id: int, who: str) -> None:
        """Note that a person wants a job cancelled."""
        async with self._lock:
            noted = await self._docket.cancel(job_id, who)
        if noted:
            self.wake()

    async def launcher_job(self, token: str, job_id: int | None) -> JobView:
        """Return the job that a launcher's token belongs to; ``job_id`` None: any active one.

        Raises NotFoundError for a job that is not known, PermissionError for a token that is not the job's, or whose
        job has been over for long.
        """
        return await self._reports.job_of(token, job_id)

    async def report(self, report: LauncherReport, token: str) -> Directive:
        """Take a launcher's report and answer it.

        It has been read by :meth:`LauncherReport.from_json`, which checks it; here it is made plausible. Raises
        NotFoundError for a job that is not known, PermissionError when the token is not the job's.
        """
        await self.launcher_job(token, report.job_id)
        self._watcher.reported(report)
        async with self._lock:
            return await self._reports.take(report)

    async def pause(self, who: str, reason: str) -> None:
        """Stop every act of transom's own at once; what has begun already ends by itself. Survives a restart."""
        async with self._lock:
            await self._board.pause(who, reason, self._clock())
        self.wake()

    async def resume_actions(self, who: str) -> list[Switch]:
        """Let acts go on: end the pause and reset every tripped budget. Return the switches that were set."""
        now = self._clock()
        async with self._lock:
            were = await self._board.reset(who, now)
            self._drains.forget_refusals()
        self._pace.look_at = 0.0
        self._acts.due(now)
        self.wake()
        return were

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings
        self.wake()

    async def act_now(self, intent: Intent) -> Intent:
        """Record an act that a person asked for, carry it out, and return it with its outcome."""
        return await self._acts.now(intent)

    async def close(self) -> None:
        """Stop acting; what is unfinished stays recorded and is taken up at the next start."""
        await self._acts.close()
        await self._observer.close()
        self.books.close()
