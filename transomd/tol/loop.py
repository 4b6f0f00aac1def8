"""The reconcile loop: observe, decide, admit, record, act. The frame is here; every decision is elsewhere and pure."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from transom_sql.records import Event, Intent, Job, Switch
from transom_sql.store import Change, Conflict, Store

from transomd.api.wire import Directive, LauncherReport
from transomd.log import about
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.act import Actor, Outcome
from transomd.tol.admit import admit_drains
from transomd.tol.decide import decide
from transomd.tol.directive import directive
from transomd.tol.drains import CONFIRM_WITHIN_S, propose_drains
from transomd.tol.observe import Observer
from transomd.tol.plausible import known_nodes, plausible
from transomd.tol.switches import (
    PAUSE,
    counted_since,
    goes_on_while_paused,
    held_directive,
    pause_sentence,
    trip_sentence,
    tripped,
    withheld,
)
from transomd.tol.view import Decision, JobView, SlurmView, Want, World
from transomd.tol.watchers import Watcher
from transomd.words import IntentKind, IntentState, JobState

log = logging.getLogger("transom.loop")
T = TypeVar("T")

ACTIVE = tuple(state.value for state in JobState if not state.final)
MAX_STEPS = 50
"""Decisions in a row about one job within a cycle; more than this is a fault in the rules, and said."""
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
    ) -> None:
        self._store = store
        self._observer = observer
        self._actor = actor
        self._settings = settings
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._lock = asyncio.Lock()
        self._views: dict[int, JobView] = {}
        self._wants: dict[int, tuple[Want, ...]] = {}
        self._wakes: dict[int, float] = {}
        self._acting: dict[str, asyncio.Task[None]] = {}
        self._refusals: dict[str, str] = {}
        self._sources: list[Callable[[SlurmView, float], Iterable[Intent]]] = []
        self._switches: dict[str, Switch] = {}
        self._withheld: dict[int, str] = {}
        self._watcher = watcher or Watcher()
        self._wake = asyncio.Event()
        self._wake_at = 0.0

    async def db(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one store call on the store's thread."""
        began, ok = time.monotonic(), False
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
            ok = True
        finally:
            self._watcher.stored(time.monotonic() - began, ok)
        return answer

    @property
    def store(self) -> Store:
        """The store, for reading (through :meth:`db`)."""
        return self._store

    def world(self) -> World:
        """Return the newest snapshot."""
        return self._observer.world()

    @property
    def paused(self) -> str:
        """Who stopped every act, and why; empty when they go on."""
        return pause_sentence(self._switches.get(PAUSE))

    @property
    def switches(self) -> Mapping[str, Switch]:
        """Everything that was ever stopped, by name."""
        return self._switches

    def withheld(self, job_id: int) -> str:
        """Say what would be done about a job if transom were not paused; empty where nothing would."""
        return self._withheld.get(job_id, "")

    def views(self) -> Mapping[int, JobView]:
        """Return every active job."""
        return self._views

    def acting(self) -> list[str]:
        """Return the keys of the acts that are being carried out."""
        return sorted(self._acting)

    def view(self, job_id: int) -> JobView | None:
        """Return what is known about an active job."""
        return self._views.get(job_id)

    def jobs_on(self, node: str) -> list[int]:
        """Return the active jobs whose current attempt holds a node."""
        return [i for i, v in self._views.items() if v.attempts and node in v.attempt.nodes and not v.state.final]

    def propose_from(self, source: Callable[[SlurmView, float], Iterable[Intent]]) -> None:
        """Have further drains proposed in every cycle, under the same budgets and guards."""
        self._sources.append(source)

    async def admit_now(self) -> None:
        """Decide about all proposed drains at once; what is granted is recorded when this returns."""
        async with self._lock:
            await self._drains()
        self.wake()

    def wake(self) -> None:
        """Have the next cycle run now."""
        self._wake.set()

    async def start(self) -> None:
        """Read every job that is not over, and every switch: what a daemon that was killed left behind."""
        self._switches = {switch.name: switch for switch in await self.db(self._store.switches)}
        for job in await self.db(self._store.jobs, states=ACTIVE, limit=1_000_000):
            await self._load(job.id)

    async def run(self) -> None:
        """Cycle until cancelled; a cycle that fails is logged and tried again."""
        while True:
            began, failed = time.monotonic(), None
            try:
                sentence = await self.cycle()
                log.debug("%s", sentence)
            except Exception as error:
                failed = error
                log.exception("the cycle failed; the next one tries again")
            self._watcher.cycled(time.monotonic() - began, failed)
            await self._rest()

    async def _rest(self) -> None:
        until = min(self._settings.daemon.cycle_s, max(0.05, self._wake_at - self._clock()) if self._wake_at else 1e9)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), until)
        self._wake.clear()
        await asyncio.sleep(0.02)

    async def cycle(self) -> str:
        """Do one cycle and return a sentence that says what it did."""
        await self._observer.look([v.attempt for v in self._views.values() if v.attempts])
        self._watcher.looked(self._observer.world().slurm, self._clock())
        written = 0
        async with self._lock:
            for job_id in list(self._views):
                written += await self._settle(job_id)
            drains = await self._drains()
            acts = await self._start_acts()
        again = self._observer.meet([w for wants in self._wants.values() for w in wants], self._views)
        wakes = [v for v in self._wakes.values() if v > self._clock()]
        self._wake_at = min([*wakes, *([self._clock() + 0.3] if again else [])], default=0.0)
        return f"{len(self._views)} jobs, {written} decisions recorded, {drains} drains granted, {acts} acts begun"

    async def _settle(self, job_id: int) -> int:
        """Decide about one job. A fault in a rule is logged and keeps no other job from its turn."""
        try:
            view = self._views.get(job_id)
            with about(job=job_id, attempt=view.job.attempt if view else None):
                return await self._decide(job_id)
        except Exception:
            log.exception("job %d: no decision could be made or recorded; the next cycle tries again", job_id)
            return 0

    async def _decide(self, job_id: int) -> int:
        """Decide about one job until there is nothing more to record."""
        for step in range(MAX_STEPS):
            view = self._views.get(job_id)
            if view is None:
                return step
            now = self._clock()
            decision = decide(view, self._observer.world(), self._settings, now)
            self._wants[job_id] = decision.wants
            self._wakes[job_id] = decision.wake_at or 0.0
            self._withheld[job_id] = withheld(view, decision) if self.paused else ""
            if self._withheld[job_id] or not decision.writes(view):
                return step
            await self._record(view, decision, now)
        log.error("job %d: %d decisions in a row; left for the next cycle", job_id, MAX_STEPS)
        return MAX_STEPS

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
            nodes=decision.nodes,
            intents=decision.intents,
            events=decision.events,
        )
        try:
            await self.db(self._store.commit, change)
        except Conflict:
            log.info("job %d changed meanwhile; deciding again", view.job.id)
        else:
            self._watcher.recorded(view, decision, now)
        await self._load(view.job.id)

    async def _load(self, job_id: int) -> None:
        """Read one job anew, and keep what only lives in memory (its launcher's last report)."""
        old = self._views.get(job_id)
        view = await self.db(self.read, job_id)
        if view is None or (view.state.final and not any(_pending(i) for i in view.intents.values())):
            self._views.pop(job_id, None)
            self._wants.pop(job_id, None)
            self._wakes.pop(job_id, None)
            self._withheld.pop(job_id, None)
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

    async def _drains(self) -> int:
        now = self._clock()
        recent = [
            i
            for i in await self.db(self._store.incidents)
            if i.data.get("await_drain") and now - (i.diagnosed_at or 0) < CONFIRM_WITHIN_S
        ]
        world = self._observer.world()
        proposals = list(propose_drains(recent, world.slurm, self._settings, now))
        proposals += [intent for source in self._sources for intent in source(world.slurm, now)]
        if not proposals:
            return 0
        history = [i for i in await self.db(self._store.intents) if i.kind == IntentKind.DRAIN]
        stopped = self.paused or self._actor.kill_switch() or trip_sentence(self._switches)
        since = counted_since(self._switches)
        verdict = admit_drains(proposals, history, world.slurm, self._settings.drain, now, stopped=stopped, since=since)
        for trip in verdict.trips:
            await self._switch(tripped(trip.budget, trip.reason, now), f"drain.{trip.budget} is tripped: {trip.reason}")
        told = [r for r in verdict.refused if self._refusals.get(r.intent.key) != r.reason]
        self._refusals.update({r.intent.key: r.reason for r in told})
        events = [
            Event(
                at=now,
                kind="drain-refused",
                node=str(r.intent.args["node"]),
                job_id=r.intent.job_id,
                message=f"{r.intent.args['node']} is not drained: {r.reason}",
            )
            for r in told
        ]
        if verdict.granted or events:
            await self.db(self._store.commit, Change(intents=verdict.granted, events=events))
            self._watcher.admitted(replace(verdict, refused=tuple(told)), now)
        return len(verdict.granted)

    async def _start_acts(self) -> int:
        now = self._clock()
        begun = 0
        for intent in await self.db(self._store.intents, states=[IntentState.PENDING.value]):
            if intent.key in self._acting or intent.not_before > now:
                continue
            if self.paused and not goes_on_while_paused(intent, self._views.get(intent.job_id or 0)):
                continue
            task = asyncio.create_task(self._act(intent), name=intent.key)
            self._acting[intent.key] = task
            begun += 1
        return begun

    async def _act(self, intent: Intent) -> None:
        try:
            view = self._views.get(intent.job_id or 0)
            with about(job=intent.job_id, node=intent.args.get("node"), intent=intent.key):
                log.info("acting: %s", intent.key)
                outcome = await self._actor.perform(intent, view)
            async with self._lock:
                await self._finish(intent, outcome)
        except Exception:
            log.exception("%s: its outcome could not be recorded; it is looked at again", intent.key)
        finally:
            self._acting.pop(intent.key, None)
            self.wake()

    async def _finish(self, intent: Intent, outcome: Outcome) -> None:
        now = self._clock()
        self._watcher.acted(intent, outcome, now)
        if outcome.again_s is not None:
            await self.db(self._store.retry_intent, intent.key, now + outcome.again_s, outcome.data)
        else:
            events = list(outcome.events)
            if outcome.state is IntentState.FAILED:
                why = f"{intent.key} failed: {outcome.data.get('error', '')}"
                events.append(Event(at=now, kind="act-failed", job_id=intent.job_id, message=why))
            await self.db(self._end_intent, intent.key, outcome, now, events)
            if intent.kind == IntentKind.DRAIN and outcome.state is IntentState.DONE:
                await self._mark_drained(intent, now)
        if intent.job_id in self._views:
            await self._load(intent.job_id)

    def _end_intent(self, key: str, outcome: Outcome, now: float, events: Sequence[Event]) -> None:
        """Record an act's end, on the store's thread; what checks found on its nodes stays as it was."""
        nodes = []
        for new in outcome.nodes:
            old = self._store.node(new.name)
            nodes.append(replace(new, checked_at=old.checked_at, checks=old.checks, data=old.data) if old else new)
        self._store.finish_intent(key, outcome.state.value, outcome.data, now, events, nodes)

    async def _mark_drained(self, intent: Intent, now: float) -> None:
        incidents = await self.db(self._store.incidents, intent.job_id)
        for incident in incidents:
            if incident.id == intent.incident_id and incident.drained_at is None:
                await self.db(self._store.commit, Change(incident=replace(incident, drained_at=now)))

    async def submit(self, job: Job) -> Job:
        """Take in a new job."""
        now = self._clock()
        said = Event(at=now, kind="submitted", message=f"{job.user} submitted {job.name}")
        async with self._lock:
            stored = await self.db(self._store.add_job, job, [said])
            await self._load(stored.id)
            await self._settle(stored.id)
        self.wake()
        return stored

    async def cancel(self, job_id: int, who: str) -> None:
        """Note that a person wants a job cancelled."""
        async with self._lock:
            view = self._views.get(job_id)
            if view is None or view.job.cancel_requested_by:
                return
            await self.db(self._store.commit, Change(job=replace(view.job, cancel_requested_by=who)))
            await self._load(job_id)
            await self._settle(job_id)
        self.wake()

    async def launcher_job(self, token: str, job_id: int | None) -> JobView:
        """Return the job that a launcher's token belongs to; ``job_id`` None: any active one.

        Raises PermissionError for a token that is not the job's, or whose job has been over for long.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        if job_id is None:
            view = next((v for v in self._views.values() if hmac.compare_digest(digest, v.job.token_sha256)), None)
        else:
            view = self._views.get(job_id) or await self.db(self.read, job_id)
        if view is None or not hmac.compare_digest(digest, view.job.token_sha256):
            raise PermissionError("no such job, or not its token")
        ended = view.job.finished_at
        if view.state.final and ended is not None and self._clock() - ended > TOKEN_OUTLIVES_S:
            raise PermissionError(f"job {view.job.id} is over, and its token with it")
        return view

    async def report(self, report: LauncherReport, token: str) -> Directive:
        """Take a launcher's report and answer it. Raises PermissionError when the token is not the job's."""
        now = self._clock()
        answer = self._directive(await self.launcher_job(token, report.job_id), report, now)
        self._watcher.reported(report)
        if answer.gate == "refuse" or report.job_id not in self._views:
            return answer
        async with self._lock:
            view = self._views.get(report.job_id)
            if view is None or not known_nodes(view, self._observer.world()):
                # Nothing that a launcher says about nodes is taken before Slurm has said which are the job's.
                self.wake()
                return answer
            report = plausible(view, report, self._observer.world(), now)
            self._views[report.job_id] = replace(view, report=report, report_at=now)
            await self._settle(report.job_id)
            view = self._views.get(report.job_id) or await self.db(self.read, report.job_id)
        self.wake()
        assert view is not None
        return self._directive(view, report, self._clock())

    def _directive(self, view: JobView, report: LauncherReport, now: float) -> Directive:
        answer = directive(view, report, self._settings, now)
        return held_directive(answer, report, view, self.paused, now) if self.paused else answer

    async def pause(self, who: str, reason: str) -> None:
        """Stop every act of transom's own at once; what has begun already ends by itself. Survives a restart."""
        now = self._clock()
        async with self._lock:
            said = f"{who} paused transom" + (f": {reason}" if reason else "")
            await self._switch(Switch(name=PAUSE, changed_at=now, since=now, who=who, reason=reason), said)
        self.wake()

    async def resume_actions(self, who: str) -> list[Switch]:
        """Let acts go on: end the pause and reset every tripped budget. Return the switches that were set."""
        now = self._clock()
        async with self._lock:
            were = [switch for switch in self._switches.values() if switch.since is not None]
            for switch in were:
                said = f"{who} resumed what {switch.name} had stopped ({switch.who}: {switch.reason})"
                await self._switch(replace(switch, changed_at=now, since=None, who=who, reason="resumed"), said)
            self._refusals.clear()
        self.wake()
        return were

    async def _switch(self, switch: Switch, said: str) -> None:
        kind = "resumed" if switch.since is None else "paused" if switch.name == PAUSE else "budget-tripped"
        log.warning("%s", said)
        event = Event(at=switch.changed_at, kind=kind, message=said)
        await self.db(self._store.commit, Change(switches=[switch], events=[event]))
        self._switches[switch.name] = switch
        self._watcher.switched(switch, switch.changed_at)

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings
        self.wake()

    async def act_now(self, intent: Intent) -> Intent:
        """Record an act that a person asked for, carry it out, and return it with its outcome."""
        await self.db(self._store.commit, Change(intents=[intent]))
        await self._act(intent)
        return await self.db(self._store.intent, intent.key) or intent

    async def close(self) -> None:
        """Stop acting; what is unfinished stays recorded and is taken up at the next start."""
        tasks = list(self._acting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._observer.close()
        self._thread.shutdown()


def _pending(intent: Intent) -> bool:
    return intent.state == IntentState.PENDING
