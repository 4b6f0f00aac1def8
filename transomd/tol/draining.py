"""Grants the drains that incidents and findings call for, and knows which incidents still wait for confirmation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from transom_sql.records import Event, Incident, Intent, Switch
from transom_sql.store import Change

from transomd.settings import Settings
from transomd.tol.act import Actor
from transomd.tol.admit import REMEMBERED_S, Refusal, admit_drains
from transomd.tol.books import Books
from transomd.tol.drains import CONFIRM_WITHIN_S, propose_drains
from transomd.tol.switches import counted_since, trip_sentence, tripped
from transomd.tol.view import SlurmView, World
from transomd.tol.watchers import Watcher
from transomd.words import IntentKind


class DrainDesk:
    """Knows the incidents of late that blame nodes, of jobs that are over as well.

    ``cleared_at`` is when each node was put back into service; what was found before is no reason to drain it.
    """

    def __init__(self, actor: Actor, books: Books, watcher: Watcher, cleared_at: Mapping[str, float]) -> None:
        self._actor = actor
        self._cleared_at = cleared_at
        self._books = books
        self._watcher = watcher
        self._sources: list[Callable[[SlurmView, float], Iterable[Intent]]] = []
        self._waiting: dict[int, Incident] = {}
        self._refused: dict[str, str] = {}
        self._known: set[str] = set()
        self._recent: dict[str, float] = {}

    async def start(self, now: float) -> None:
        """Read what an earlier daemon left."""
        self.note(await self._books.db(self._books.store.incidents))
        drains = await self._books.db(self._books.store.intents, kinds=[IntentKind.DRAIN.value])
        self._known = {intent.key for intent in drains}
        self._recent = {intent.key: intent.created_at for intent in drains}
        self._forget(now)

    def propose_from(self, source: Callable[[SlurmView, float], Iterable[Intent]]) -> None:
        """Have further drains proposed in every cycle."""
        self._sources.append(source)

    def note(self, incidents: Iterable[Incident]) -> None:
        """Take in incidents as they are now."""
        for incident in incidents:
            if incident.data.get("await_drain"):
                self._waiting[incident.id] = incident
            else:
                self._waiting.pop(incident.id, None)

    def _forget(self, now: float) -> None:
        limit = now - CONFIRM_WITHIN_S
        self._waiting = {i: one for i, one in self._waiting.items() if (one.diagnosed_at or now) >= limit}
        self._recent = {key: at for key, at in self._recent.items() if now - at < REMEMBERED_S}

    def forget_refusals(self) -> None:
        """Say anew what is refused from now on."""
        self._refused.clear()

    async def grant(
        self, world: World, settings: Settings, paused: str, switches: Mapping[str, Switch], now: float
    ) -> tuple[int, list[Switch]]:
        """Record the drains that are called for, confirmed and within the budgets.

        Returns how many, and the switches of the budgets that this tripped.
        """
        fresh = self._proposals(world, settings, now)
        if not fresh:
            return 0, []
        stopped = paused or self._actor.kill_switch() or trip_sentence(switches)
        since, budget = counted_since(switches), settings.drain
        history = await self._history()
        admitted = admit_drains(fresh, history, world.slurm, budget, now, stopped=stopped, since=since)
        told = [r for r in admitted.refused if self._refused.get(r.intent.key) != r.reason]
        if admitted.granted or told:
            events = [_refusal_event(refusal, now) for refusal in told]
            await self._books.db(self._books.store.commit, Change(intents=admitted.granted, events=events))
            self._watcher.admitted(replace(admitted, refused=tuple(told)), now)
        self._refused.update({refusal.intent.key: refusal.reason for refusal in told})
        self._known |= {intent.key for intent in admitted.granted}
        self._recent |= {intent.key: intent.created_at for intent in admitted.granted}
        return len(admitted.granted), [tripped(trip.budget, trip.reason, now) for trip in admitted.trips]

    def _proposals(self, world: World, settings: Settings, now: float) -> list[Intent]:
        self._forget(now)
        incidents = [self._waiting[key] for key in sorted(self._waiting)]
        found = [*propose_drains(incidents, world.slurm, settings, now, self._cleared_at, world.health)]
        found += [intent for source in self._sources for intent in source(world.slurm, now)]
        return [intent for intent in found if intent.key not in self._known]

    async def _history(self) -> list[Intent]:
        """Return the drains of late as they are now."""
        found = [await self._books.db(self._books.store.intent, key) for key in self._recent]
        return [intent for intent in found if intent is not None]


def _refusal_event(refusal: Refusal, now: float) -> Event:
    node = str(refusal.intent.args["node"])
    words = f"{node} is not drained: {refusal.reason}"
    return Event(at=now, kind="drain-refused", node=node, job_id=refusal.intent.job_id, message=words)
