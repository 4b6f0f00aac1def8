"""Keeps what is stopped until a person starts it again: reads, sets and resets switches, each with an event."""

from __future__ import annotations

import logging
from dataclasses import replace

from transom_sql.records import Event, Switch
from transom_sql.store import Change

from transomd.tol.books import Books
from transomd.tol.switches import PAUSE, pause_sentence
from transomd.tol.watchers import Watcher

log = logging.getLogger("transom.loop")


class Switchboard:
    """``known`` is everything that was ever stopped, by name. To be changed under the loop's lock only."""

    def __init__(self, books: Books, watcher: Watcher) -> None:
        self._books = books
        self._watcher = watcher
        self.known: dict[str, Switch] = {}

    @property
    def paused(self) -> str:
        """Who stopped every act, and why; empty when they go on."""
        return pause_sentence(self.known.get(PAUSE))

    async def load(self) -> None:
        """Read what an earlier daemon left."""
        self.known = {switch.name: switch for switch in await self._books.db(self._books.store.switches)}

    async def pause(self, who: str, reason: str, now: float) -> None:
        """Stop every act."""
        said = f"{who} paused transom" + (f": {reason}" if reason else "")
        await self.set(Switch(name=PAUSE, changed_at=now, since=now, who=who, reason=reason), said)

    async def reset(self, who: str, now: float) -> list[Switch]:
        """Reset all that are set, and return them as they were."""
        were = [switch for switch in self.known.values() if switch.since is not None]
        for switch in were:
            said = f"{who} resumed what {switch.name} had stopped ({switch.who}: {switch.reason})"
            await self.set(replace(switch, changed_at=now, since=None, who=who, reason="resumed"), said)
        return were

    async def set(self, switch: Switch, said: str) -> None:
        """Record a switch, with the sentence ``said``, and tell of it."""
        kind = "resumed" if switch.since is None else "paused" if switch.name == PAUSE else "budget-tripped"
        log.warning("%s", said)
        event = Event(at=switch.changed_at, kind=kind, message=said)
        await self._books.db(self._books.store.commit, Change(switches=[switch], events=[event]))
        self.known[switch.name] = switch
        self._watcher.switched(switch, switch.changed_at)
