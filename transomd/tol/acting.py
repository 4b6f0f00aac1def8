"""Carrying out the recorded intents, several at a time, each once at a time, and recording how they ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from transom_sql.records import Event, Intent
from transom_sql.store import Change, StoreError

from transomd.log import about
from transomd.tol.act import Actor, Outcome
from transomd.tol.books import Books
from transomd.tol.clearings import KEY, Clearings
from transomd.tol.view import JobView
from transomd.tol.watchers import Watcher
from transomd.words import IntentKind, IntentState

log = logging.getLogger("transom.loop")

AT_ONCE = 16
"""Acts under way at the same time: a flood of submissions must not become a flood of processes."""
AGAIN_S = 5.0
"""Seconds until an act is looked at again whose outcome the database did not take."""
LONGEST_S = 120.0
"""No act waits longer than this: one that seems to was put off before the clock was set back."""
NEVER = float("inf")


class Acts:
    """Reads pending intents from the store when one may be due.

    Outcomes are recorded under ``lock``, and ``done`` is told of each under the same hold.
    """

    def __init__(
        self,
        actor: Actor,
        books: Books,
        clock: Callable[[], float],
        lock: asyncio.Lock,
        watcher: Watcher,
        clearings: Clearings,
        done: Callable[[Intent], Awaitable[None]],
    ) -> None:
        self._actor = actor
        self._books = books
        self._clock = clock
        self._lock = lock
        self._watcher = watcher
        self._clearings = clearings
        self._done = done
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.due_at = 0.0

    def under_way(self) -> list[str]:
        """Return the keys of the acts that are being carried out."""
        return sorted(self._tasks)

    def due(self, at: float) -> None:
        """Note that an intent may be carried out from a time on."""
        self.due_at = min(self.due_at, at)

    async def start(self, views: Mapping[int, JobView], may: Callable[[Intent, JobView | None], bool]) -> int:
        """Begin every act that is due, permitted and not under way; return how many."""
        now = self._clock()
        if now < self.due_at <= now + LONGEST_S or self.due_at == NEVER:
            return 0
        self.due_at = NEVER
        begun = 0
        try:
            pending = await self._books.db(self._books.store.intents, states=[IntentState.PENDING.value])
        except StoreError:
            self.due(now + AGAIN_S)
            raise
        for intent in pending:
            view = views.get(intent.job_id or 0)
            if intent.key in self._tasks or not may(intent, view):
                continue
            if now < intent.not_before <= now + LONGEST_S:
                self.due(intent.not_before)
                continue
            self._tasks[intent.key] = asyncio.create_task(self._act(intent, view), name=intent.key)
            begun += 1
        return begun

    async def now(self, intent: Intent) -> Intent:
        """Record an intent of a person, carry it out, and return it with its outcome."""
        self._tasks[intent.key] = asyncio.create_task(self._record_and_act(intent), name=intent.key)
        await asyncio.shield(self._tasks[intent.key])
        return await self._books.db(self._books.store.intent, intent.key) or intent

    async def _record_and_act(self, intent: Intent) -> None:
        try:
            await self._books.db(self._books.store.commit, Change(intents=[intent]))
            await self._act(intent, None)
        finally:
            self._tasks.pop(intent.key, None)

    async def _act(self, intent: Intent, view: JobView | None) -> None:
        try:
            async with self._slots:
                with about(job=intent.job_id, node=intent.args.get("node"), intent=intent.key):
                    log.info("acting: %s", intent.key)
                    outcome = await self._actor.perform(intent, view)
            async with self._lock:
                await self._finish(intent, outcome)
                await self._done(intent)
        except Exception as error:
            if not isinstance(error, StoreError):
                log.exception("%s: its outcome could not be recorded; it is looked at again", intent.key)
            self.due(self._clock() + AGAIN_S)
        finally:
            self._tasks.pop(intent.key, None)

    async def _finish(self, intent: Intent, outcome: Outcome) -> None:
        now = self._clock()
        self._watcher.acted(intent, outcome, now)
        if outcome.again_s is not None:
            store = self._books.store
            await self._books.db(store.retry_intent, intent.key, now + outcome.again_s, outcome.data)
            self.due(now + outcome.again_s)
            return
        events = list(outcome.events)
        if outcome.state is IntentState.FAILED:
            why = f"{intent.key} failed: {outcome.data.get('error', '')}"
            events.append(Event(at=now, kind="act-failed", job_id=intent.job_id, message=why))
        if intent.kind == IntentKind.DRAIN and outcome.state is IntentState.DONE:
            await self._mark_drained(intent, now)
        await self._books.db(self._end, intent.key, outcome, now, events)
        for node in outcome.nodes:
            if KEY in node.data:
                self._clearings.note(node.name, float(node.data[KEY]))

    def _end(self, key: str, outcome: Outcome, now: float, events: Sequence[Event]) -> None:
        """Record an act's end, on the store's thread; what checks found on its nodes stays as it was."""
        store, nodes = self._books.store, []
        for new in outcome.nodes:
            old = store.node(new.name)
            if old is not None:
                new = replace(new, checked_at=old.checked_at, checks=old.checks, data={**old.data, **new.data})
            nodes.append(new)
        store.finish_intent(key, outcome.state.value, outcome.data, now, events, nodes)

    async def _mark_drained(self, intent: Intent, now: float) -> None:
        if intent.incident_id is None:
            return
        for incident in await self._books.db(self._books.store.incidents, intent.job_id):
            if incident.id == intent.incident_id and incident.drained_at is None:
                change = Change(incident=replace(incident, drained_at=now))
                await self._books.db(self._books.store.commit, change)

    async def close(self) -> None:
        """Stop; what is unfinished stays recorded."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
