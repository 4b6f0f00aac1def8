"""The reconcile loop: observe, decide, admit, record, act. The frame is here; every decision is elsewhere and pure."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from transom_sql.records import Event, Intent, Job, Switch
from transom_sql.store import Change, Conflict, Store, StoreError

from transomd.api.wire import Directive, LauncherReport
from transomd.errors import NotFoundError
from transomd.log import about
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.act import Actor
from transomd.tol.acting import Acts
from transomd.tol.clearings import Clearings, record_lifted
from transomd.tol.decide import decide
from transomd.tol.directive import directive
from transomd.tol.draining import DrainDesk
from transomd.tol.hearing import Hearing
from transomd.tol.observe import Observer
from transomd.tol.outage import StoreOutage
from transomd.tol.plausible import known_nodes, plausible
from transomd.tol.switchboard import Switchboard
from transomd.tol.switches import goes_on_while_paused, held_directive, withheld
from transomd.tol.view import Decision, JobView, SlurmView, World, merged
from transomd.tol.watchers import Watcher
from transomd.words import IntentState, JobState

log = logging.getLogger("transom.loop")
T = TypeVar("T")

ACTIVE = tuple(state.value for state in JobState if not state.final)
MAX_STEPS = 50
"""Decisions in a row about one job within a cycle; more than this is a fault in the rules, and said."""
QUICK_S = 0.3
"""How soon Slurm is asked again when a decision waits for its word; longer each time that it brings nothing new."""
SLOWER = 1.3
OVERTAKEN_S = 60.0
"""A report that is older than the last by more was not overtaken on its way: its node's clock was set back."""
TOKEN_OUTLIVES_S = 3600.0
"""How long after its job's end a launcher is still told so; nothing that it reports counts any more."""


class Operator:
    """Owns every job. All changes of jobs go through here, one after another."""

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
        self._store = store
        self._observer = observer
        self._settings = settings
        self._clock = clock
        self._watcher = watcher or Watcher()
        self._thread = executor or ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lock = asyncio.Lock()
        self._views: dict[int, JobView] = {}
        self._wakes: dict[int, float] = {}
        self._board = Switchboard(self, self._watcher)
        self._withheld: dict[int, str] = {}
        self.clearings = Clearings()
        self._acts = Acts(actor, self, clock, self._lock, self._watcher, self.clearings, self._acted)
        self._drains = DrainDesk(actor, self, self._watcher)
        self._hearing = Hearing(clock)
        self._outage = StoreOutage()
        self._wake = asyncio.Event()
        self._look_at = 0.0
        self._quick_s = QUICK_S

    async def db(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one store call on the store's thread."""
        began, ok = time.monotonic(), False
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
            ok = True
            self._outage.worked(call.__name__)
        except StoreError as error:
            if not isinstance(error, Conflict):
                self._outage.failed(call.__name__, error)
            raise
        finally:
            took = time.monotonic() - began
            self._watcher.stored(took, ok)
            self._views = self._hearing.after_a_wait(self._views, took)
        return answer

    # --- what is so -------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store, for reading (through :meth:`db`)."""
        return self._store

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

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
        return self._withheld.get(job_id, "")

    def views(self) -> Mapping[int, JobView]:
        """Return every active job."""
        return self._views

    def acting(self) -> list[str]:
        """Return the keys of the acts that are being carried out."""
        return self._acts.under_way()

    def view(self, job_id: int) -> JobView | None:
        """Return what is known about an active job."""
        return self._views.get(job_id)

    def jobs_on(self, node: str) -> list[int]:
        """Return the active jobs whose current attempt holds a node."""
        return [i for i, v in self._views.items() if v.attempts and node in v.attempt.nodes and not v.state.final]

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read every job that is not over, and every switch: what a daemon that was killed left behind."""
        await self._board.load()
        pending = await self.db(self._store.intents, states=[IntentState.PENDING.value])
        unfinished = {intent.job_id for intent in pending if intent.job_id is not None}
        active = {job.id for job in await self.db(self._store.jobs, states=ACTIVE, limit=None)}
        for job_id in sorted(active | unfinished):
            await self._load(job_id)
        self.clearings.load(await self.db(self._store.nodes))
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
                self._look_at = self._clock() + self._settings.daemon.cycle_s
                self._watcher.cycled(time.monotonic() - began, error)
            await self._rest()

    async def _rest(self) -> None:
        until = min(self._settings.daemon.cycle_s, max(0.0, self.due_at() - self._clock()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), until)
        self._wake.clear()
        await asyncio.sleep(0.02)

    def due_at(self) -> float:
        """Return when there is something to do next: a look at Slurm, a deadline of a job, an act."""
        return min([self._look_at, self._acts.due_at, *(at for at in self._wakes.values() if at)])

    async def step(self) -> str:
        """Do what is due: a whole cycle when Slurm is to be looked at, else only what is new."""
        self._views = self._hearing.after_a_pause(self._views, self._settings)
        wait = self._look_at - self._clock()
        # Much longer than a cycle: the clock was set back, and Slurm would not be looked at until it has caught up.
        if wait <= 0.0 or wait > self._settings.daemon.cycle_s + 1.0:
            began = time.monotonic()
            said = await self.cycle()
            self._watcher.cycled(time.monotonic() - began, None)
        else:
            async with self._lock:
                await self._settle_all(self._observer.news() | self._overdue())
                said = f"{await self._start_acts()} acts begun"
        self._hearing.listened()
        return said

    async def cycle(self) -> str:
        """Do one whole cycle and return a sentence that says what it did."""
        self._look_at = self._clock() + self._settings.daemon.cycle_s
        await self._observer.look([v.attempt for v in self._views.values() if v.attempts])
        self._watcher.looked(self._observer.world().slurm, self._clock())
        self._observer.news()
        self._hearing.count(self._views.values(), self._settings)
        async with self._lock:
            await self._record_lifted(self._observer.world().slurm)
            written = await self._settle_all(list(self._views))
            drains = await self._grant_drains()
            acts = await self._start_acts()
        return f"{len(self._views)} jobs, {written} decisions recorded, {drains} drains granted, {acts} acts begun"

    async def _record_lifted(self, slurm: SlurmView) -> None:
        lifted = self.clearings.look(slurm)
        if lifted:
            # Recorded before it is noted: what the database refuses is looked at again in the next cycle.
            await self.db(record_lifted, self._store, lifted, slurm.nodes_at)
        for name in lifted:
            self.clearings.note(name, slurm.nodes_at)

    def _overdue(self) -> set[int]:
        now = self._clock()
        return {job_id for job_id, at in self._wakes.items() if at and at <= now}

    async def _grant_drains(self) -> int:
        granted, trips = await self._drains.grant(self.world(), self.paused, self.switches, self._clock())
        for trip in trips:
            await self._board.set(trip, f"{trip.name} is tripped: {trip.reason}")
        if granted:
            self._acts.due(self._clock())
        return granted

    async def _start_acts(self) -> int:
        paused = self.paused
        return await self._acts.start(self._views, lambda i, v: not paused or goes_on_while_paused(i, v))

    # --- one job ----------------------------------------------------------------------------------------------------

    async def _settle_all(self, jobs: Iterable[int]) -> int:
        return sum([await self._settle(job_id) for job_id in jobs])

    async def _settle(self, job_id: int) -> int:
        """Decide about one job. A fault in a rule is logged and keeps no other job from its turn.

        That the database failed is said already.
        """
        try:
            view = self._views.get(job_id)
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
            view = self._views.get(job_id)
            if view is None:
                return step
            now = self._clock()
            decision = decide(view, self.world(), self._settings, now)
            self._withheld[job_id] = withheld(view, decision) if self.paused else ""
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
        if self._observer.meet(decision.wants, view) and now + self._quick_s < self._look_at:
            self._look_at = now + self._quick_s
            self._quick_s = min(self._quick_s * SLOWER, self._settings.daemon.cycle_s)
            self._wake.set()

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
            stored = await self.db(self._store.commit, change)
        except Conflict:
            log.info("job %d changed meanwhile; deciding again", view.job.id)
            await self._load(view.job.id)
            return
        self._watcher.recorded(view, decision, now)
        self._quick_s = QUICK_S if moved else self._quick_s
        if stored is None or decision.incident or decision.intents or decision.state.final:
            await self._load(view.job.id)
        else:
            # Most records are a step further of a program that runs: nothing in them has to be read back.
            self._views[view.job.id] = merged(view, stored, decision.attempts, decision.launches)
        if decision.intents:
            self._acts.due(min(intent.not_before for intent in decision.intents))
            self._wake.set()

    async def _load(self, job_id: int) -> None:
        """Read one job anew, and keep what only lives in memory (its launcher's last report)."""
        old = self._views.get(job_id)
        view = await self.db(self.read, job_id)
        if view is None:
            return
        self._drains.note(view.incidents)
        if view.state.final and not any(i.state == IntentState.PENDING for i in view.intents.values()):
            for kept in (self._views, self._wakes, self._withheld):
                kept.pop(job_id, None)
            return
        report_at = old.report_at if old else self._clock()
        self._views[job_id] = replace(view, report=old.report if old else None, report_at=report_at)

    def read(self, job_id: int) -> JobView | None:
        """Read one job from the store, on the store's thread."""
        job = self._store.job(job_id)
        if job is None:
            return None
        return JobView(
            job=job,
            spec=JobSpec.from_stored(job.spec),
            attempts=tuple(self._store.attempts(job_id)),
            launches=tuple(self._store.launches(job_id)),
            incidents=tuple(self._store.incidents(job_id)),
            intents={i.key: i for i in self._store.intents(job_id=job_id)},
        )

    async def _acted(self, intent: Intent) -> None:
        """An act has ended, or waits for its next try. Called under the lock."""
        if intent.job_id in self._views:
            await self._load(intent.job_id)
            await self._settle(intent.job_id)
        self._wake.set()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the loop look for what is due now."""
        self._acts.due(self._clock())
        self._wake.set()

    def propose_from(self, source: Callable[[SlurmView, float], Iterable[Intent]]) -> None:
        """Have further drains proposed in every cycle, under the same budgets and guards."""
        self._drains.propose_from(source)

    async def admit_now(self) -> None:
        """Decide about all proposed drains at once; what is granted is recorded when this returns."""
        async with self._lock:
            await self._grant_drains()
        self.wake()

    async def submit(self, job: Job) -> Job:
        """Take in a new job."""
        now = self._clock()
        said = [Event(at=now, kind="submitted", message=f"{job.user} submitted {job.name}")]
        if job.uid == 0:
            why = "it runs as root: its program may do anything to its nodes, and to files on shares that trust root"
            said.append(Event(at=now, kind="warning", message=why))
        async with self._lock:
            stored = await self.db(self._store.add_job, job, said)
            await self._load(stored.id)
            await self._settle(stored.id)
        self.wake()
        return stored

    async def cancel(self, job_id: int, who: str) -> None:
        """Note that a person wants a job cancelled."""
        async with self._lock:
            view = self._views.get(job_id)
            if view is None or view.state.final or view.job.cancel_requested_by:
                return
            await self.db(self._store.commit, Change(job=replace(view.job, cancel_requested_by=who)))
            await self._load(job_id)
            await self._settle(job_id)
        self.wake()

    async def launcher_job(self, token: str, job_id: int | None) -> JobView:
        """Return the job that a launcher's token belongs to; ``job_id`` None: any active one.

        Raises NotFoundError for a job that is not known, PermissionError for a token that is not the job's, or whose
        job has been over for long.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        if job_id is None:
            view = next((v for v in self._views.values() if hmac.compare_digest(digest, v.job.token_sha256)), None)
        else:
            view = self._views.get(job_id) or await self.db(self.read, job_id)
            if view is None:
                # Not a refusal: a database that was lost or restored must not end what trains.
                raise NotFoundError(f"job {job_id}: this transomd knows no such job", hint="transom status --all")
        if view is None or not hmac.compare_digest(digest, view.job.token_sha256):
            raise PermissionError("no such job, or not its token")
        ended = view.job.finished_at
        if view.state.final and ended is not None and self._clock() - ended > TOKEN_OUTLIVES_S:
            raise PermissionError(f"job {view.job.id} is over, and its token with it")
        return view

    async def report(self, report: LauncherReport, token: str) -> Directive:
        """Take a launcher's report and answer it.

        It has been read by :meth:`LauncherReport.from_json`, which checks it; here it is made plausible. Raises
        NotFoundError for a job that is not known, PermissionError when the token is not the job's.
        """
        await self.launcher_job(token, report.job_id)
        self._watcher.reported(report)
        async with self._lock:
            view = self._views.get(report.job_id)
            if view is not None and directive(view, report, self._settings).gate != "refuse":
                await self._hear(view, report)
            view = self._views.get(report.job_id) or await self.db(self.read, report.job_id)
        assert view is not None
        return self._directive(view, report)

    async def _hear(self, view: JobView, report: LauncherReport) -> None:
        """Take what can be true of a report; nothing of it, before Slurm has said which nodes are the job's."""
        if not known_nodes(view, self._observer.world()):
            self._look_at = min(self._look_at, self._clock() + QUICK_S)
            self._wake.set()
            return
        self._take(view, plausible(view, report, self._observer.world(), self._clock()))
        await self._settle(report.job_id)

    def _take(self, view: JobView, report: LauncherReport) -> None:
        """Keep a report, unless a newer one of the same launcher has overtaken it."""
        old = view.report
        same = old is not None and (old.attempt, old.generation) == (report.attempt, report.generation)
        newest = old if same and old is not None and 0.0 < old.at - report.at < OVERTAKEN_S else report
        self._views[report.job_id] = replace(view, report=newest, report_at=self._clock())

    def _directive(self, view: JobView, report: LauncherReport) -> Directive:
        answer = directive(view, report, self._settings)
        return held_directive(answer, report, view, self.paused) if self.paused else answer

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
        self._look_at = 0.0
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
        self._thread.shutdown()
