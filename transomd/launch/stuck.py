"""Which processes of a launch cannot go on: two looks tell, for at any moment some wait for a disk in the kernel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transomd.launch.agents import Agents
from transomd.tee.detect import ProcessState

APART_S = 0.4
"""Two looks that are nearer to one another tell no more than one."""
LOOK_S = 1.0
"""How long agents have to say what the ranks are doing where a recovery waits for it; they need milliseconds."""


class Stuck:
    """Asks the agents that are alive; those that do not answer say nothing of their ranks. ``clock`` gives seconds."""

    def __init__(self, agents: Agents, clock: Callable[[], float] = time.monotonic) -> None:
        self._agents = agents
        self._clock = clock
        self._seen_at = 0.0
        self._seen: dict[tuple[str, int], Mapping[str, Any]] = {}

    async def look(self, epoch: int, nodes: Iterable[str], within_s: float = LOOK_S) -> list[ProcessState]:
        """Return the ranks' processes that are as they were at the look before and have not run since.

        At the first look of an epoch there are none, nor at one that follows another at once.
        """
        near = self._clock() < self._seen_at + APART_S
        alive = self._agents.alive()
        answers = await self._agents.hub.ask_all([n for n in nodes if n in alive], "ranks", within_s)
        before = self._seen
        self._seen = {
            (node, process["pid"]): process
            for node, found in answers.items()
            if isinstance(found, list)
            for process in found
            if process["rank"] is not None and process["epoch"] == epoch
        }
        self._seen_at = self._clock()
        return [
            ProcessState(rank=process["rank"], node=node, pid=pid, state=process["state"])
            for (node, pid), process in self._seen.items()
            if not near and _same(before.get((node, pid)), process)
        ]


def _same(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    return before is not None and all(before[key] == now[key] for key in ("epoch", "state", "switches"))
