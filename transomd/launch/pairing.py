"""Who holds whose copy of checkpoints, told to the agents before a launch and while it runs. No launch fails for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transomd.launch.hub import Hub
from transomd.tce.replicate.partners import partners

log = logging.getLogger("transom.launcher")

ASK_S = 5.0
"""How long agents may take to say where their keepers listen; those that do not have no part in it yet."""
AGAIN_S = 10.0
"""How often they are asked again: who did not answer in time, or has been started anew, gets its part then."""
AWAY_ROUNDS = 6
"""After so many times, a minute, that an agent says that its keeper is not there, the others are paired without it."""


class Pairing:
    """The pairs of one launch. ``alive`` tells the nodes whose agents were heard lately.

    Only nodes of the ``launch`` hold copies for each other. The others are named, as they may still have some of an
    earlier launch, or may have been started on with none of their own. A node that ceases to answer keeps its part: it
    may only be slow, and if it is lost the launch ends. One whose agent says, again and again, that there is no keeper
    has none until there is one.
    """

    def __init__(self, hub: Hub, epoch: int, launch: Sequence[str], alive: Callable[[], Sequence[str]]) -> None:
        self._hub = hub
        self._epoch = epoch
        self._launch = launch
        self._alive = alive
        self._there: dict[str, dict[str, Any]] = {}
        self._partners: dict[str, str] = {}
        self._untold: set[str] = set()
        self._rounds_away: dict[str, int] = {}
        self._away: set[str] = set()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Form the pairs, and from then on look again and again, until ``stop``."""
        await self.form()
        self._keeping = asyncio.create_task(self._keep())

    def stop(self) -> None:
        """Look no more."""
        if self._keeping is not None:
            self._keeping.cancel()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            await self.form()

    async def form(self) -> None:
        """Ask every node that is alive, and tell all of them if anything has changed, else who was not reached."""
        answers = await self._hub.ask_all(self._alive(), "keeper", ASK_S)
        new = {node: answer for node, answer in answers.items() if isinstance(answer, dict) and answer.get("port")}
        moved = any(self._place(node) != (told["port"], told["domain"]) for node, told in new.items())
        away = self._still_away(new)
        if moved or away != self._away:
            self._away = away
            self._there.update(new)
            self._untold = set(self._there)
            self._partners = self._paired()
            log.info("copies of checkpoints: %s", told_of(self._partners))
        await self._tell()

    def _still_away(self, answers: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """The nodes whose keepers have been away for long, as of these answers; who does not answer says nothing."""
        for node, told in answers.items():
            # An agent of an earlier version does not say.
            self._rounds_away[node] = 0 if told.get("there", True) else self._rounds_away.get(node, 0) + 1
        return {node for node, rounds in self._rounds_away.items() if rounds >= AWAY_ROUNDS}

    def _place(self, node: str) -> tuple[Any, Any]:
        told = self._there.get(node, {})
        return told.get("port"), told.get("domain")

    def _paired(self) -> dict[str, str]:
        launched = [node for node in self._launch if node in self._there and node not in self._away]
        return partners(launched, {node: str(told["domain"]) for node, told in self._there.items()})

    async def _tell(self) -> None:
        keepers = {node: [node, told["port"], told["ranks"]] for node, told in self._there.items()}
        nodes = sorted(self._untold.intersection(self._alive()))
        told = {"epoch": self._epoch, "keepers": keepers}
        asked = (
            self._hub.ask(node, "peers", ASK_S, me=node, partner=self._partners.get(node), **told) for node in nodes
        )
        for node, answer in zip(nodes, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, Exception):
                log.warning("an agent was not told who holds its copies: %s", answer)
            else:
                self._untold.discard(node)


def told_of(found: Mapping[str, str]) -> str:
    """Who holds whose copy, for the log."""
    if not found:
        return "no other node can hold any"
    pairs = [f"{holder} holds {node}'s" for node, holder in sorted(found.items())]
    return ", ".join(pairs[:8]) + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
