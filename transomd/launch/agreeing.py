"""While a program runs: hears which copies every node has, and tells all which to keep. No launch fails for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from transomd.launch.agents import Agents
from transomd.launch.folder import CheckpointFolder
from transomd.tce.replicate.agreement import Step, Told, agree, aimed, missed

log = logging.getLogger("transom.launcher")

LOOK_S = 0.5
"""How often what the agents have said is looked at."""
ASK_S = 5.0
MARGIN_S, LONGEST_MARGIN_S = 1.5, 60.0
"""How long it takes at least that what a keeper knows reaches the launcher, and its word all keepers."""
AGAIN_S = 3.0
"""How soon a node is told again that does not say that it keeps what it was told to."""


class Agreement:
    """What holders keep of the copies of ``world_size`` ranks, and which step is copied next; lives with the launcher.

    ``newest`` is the newest step of which every rank has a copy, and when that was first so (Unix seconds).
    """

    def __init__(self, agents: Agents, folder: CheckpointFolder, world_size: int) -> None:
        self.newest: tuple[Step, float] | None = None
        self._agents = agents
        self._folder = folder
        self._world_size = world_size
        self._anchor: Step | None = None
        self._aim: Step | None = None
        self._pace = Pace()
        self._said: dict[str, tuple[Any, float]] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look again and again, until ``stop``."""
        self.stop()
        self._looking = asyncio.create_task(self._look_again())

    def stop(self) -> None:
        """Look no more: what is kept stays so."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # without agreement the copies go on, each rank's by themselves
                log.exception("which copies to keep could not be agreed on")

    async def look(self) -> None:
        """Decide once, and tell the nodes that do not keep what they are to."""
        heard = self._agents.hub.copies(self._agents.alive())
        told = {node: told_by(said, self._folder.real) for node, said in heard.items()}
        if self._anchor is None:
            # Another launcher may have begun it; what was kept first is what all have.
            self._anchor = min((step for one in told.values() for step in one.keeps), default=None)
        self._anchor, beyond = agree(self._anchor, told.values(), self._world_size)
        keeps = [step for step in (self._anchor, beyond) if step is not None]
        if keeps and (self.newest is None or self.newest[0] != keeps[-1]):
            self.newest = keeps[-1], time.time()
        now = time.monotonic()
        self._take_aim(list(told.values()), now)
        wanted = keeps, self._aim
        doing = {node: (sorted(one.keeps), _step(heard[node]["aim"])) for node, one in told.items()}
        nodes = [node for node in told if doing[node] != wanted and self._due(node, wanted, now)]
        self._said.update(dict.fromkeys(nodes, (wanted, now)))
        await self._agents.hub.ask_all(nodes, "keep", ASK_S, steps=keeps, aim=self._aim)

    def _take_aim(self, told: list[Told], now: float) -> None:
        """Aim anew once all have, and keep, what was aimed at; or once they have missed it, and then further ahead."""
        staged = self._agents.hub.checkpoints(self._agents.alive())
        saving = [rank for ranks in staged.values() for rank in ranks if "memory" in rank["stages"]]
        stages = [rank["stages"]["memory"] for rank in saving]
        newest = max(((int(one["epoch"]), int(one["step"])) for one in stages), default=None)
        if newest is None:
            return
        self._pace.see(newest, now)
        aim = self._aim
        if aim is not None and aim[0] == newest[0]:
            reached = self._anchor is not None and self._anchor >= aim
            if not reached and not missed(aim, told, self._world_size):
                return
            self._pace.learn(reached)
        every = max(int(rank.get("replica_every") or 1) for rank in saving)
        self._aim = aimed(newest, self._pace.ahead, every)

    def _due(self, node: str, wanted: Any, now: float) -> bool:
        said, at = self._said.get(node, (None, 0.0))
        return said != wanted or now - at > AGAIN_S


class Pace:
    """How far ahead a step must be that no rank has saved yet when the last one hears of it."""

    def __init__(self) -> None:
        self._margin_s = MARGIN_S
        self._seen: deque[tuple[Step, float]] = deque(maxlen=8)

    def see(self, newest: Step, now: float) -> None:
        """Note the newest step that any rank has staged."""
        if self._seen and self._seen[-1][0][0] != newest[0]:
            self._seen.clear()
        if not self._seen or self._seen[-1][0] != newest:
            self._seen.append((newest, now))

    def learn(self, reached: bool) -> None:
        """Go further ahead if ranks have copied different steps, and slowly back if they have not."""
        self._margin_s = max(MARGIN_S, 0.9 * self._margin_s) if reached else min(2 * self._margin_s, LONGEST_MARGIN_S)

    @property
    def ahead(self) -> int:
        """In steps, at least one."""
        if len(self._seen) < 2:
            return 1
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return 1 + math.ceil(self._margin_s * max(0, last[1] - first[1]) / max(ended - began, 0.1))


def _step(told: Any) -> Step | None:
    return (int(told[0]), int(told[1])) if told else None


def told_by(said: Mapping[str, Any], directory: str) -> Told:
    """What an agent's word of its keeper's copies says about one checkpoint directory."""
    copies: dict[int, frozenset[Step]] = defaultdict(frozenset)
    for copy in said["copies"]:
        if copy["directory"] == directory:
            copies[int(copy["rank"])] |= {(int(epoch), int(step)) for epoch, step in copy["steps"]}
    return Told(frozenset((int(epoch), int(step)) for epoch, step in said["keeps"]), copies)
