"""After a program that ended well: waits until what it saved last, which keepers may hold in memory alone, is stored.

Its last checkpoint is what the job was for, and the keepers end with the allocation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from transom_slurm.nodesets import fold

from transomd.launch import stages
from transomd.launch.agents import Agents
from transomd.launch.hub import AgentGone

log = logging.getLogger("transom.launcher")

ASK_S = 6.0
"""How long an agent has to answer: a little longer than it waits for its keeper."""
LONGEST_S = 1800.0
"""How long a store that hangs is waited for; writes that it refuses are given up by the keepers before that."""


class LostError(Exception):
    """What a program saved last was lost before it was in storage."""


@dataclass
class _Node:
    """``left``: the ranks whose share is not in storage yet (None: not heard of); ``ranks``: what is told of them."""

    left: list[int] | None = None
    pid: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)


class Storing:
    """Asks the keepers of ``nodes`` until they have nothing left to write. ``clock`` gives seconds.

    ``told``: what is waited for; at last, what has not come to storage, and why ('': nothing).
    """

    def __init__(self, agents: Agents, nodes: Iterable[str], clock: Callable[[], float]) -> None:
        self.told = ""
        self._agents = agents
        self._nodes = {node: _Node() for node in nodes}
        self._clock = clock
        self._until = clock() + LONGEST_S

    async def look(self) -> bool:
        """Ask once; whether nothing is waited for any more. Raises LostError."""
        waits = [name for name, node in self._nodes.items() if node.left != []]
        for name, answer in (await self._agents.hub.ask_all(waits, "unstored", ASK_S)).items():
            self._hear(name, self._nodes[name], answer)
        waits = [name for name in waits if self._nodes[name].left != []]
        over = self._clock() > self._until
        told = {name: node.ranks for name, node in self._nodes.items()}
        if waits and not over:
            why = stages.trouble(told)
            self.told = f"the program has ended; what it saved last is being stored by {fold(waits)}"
            self.told += f" ({why})" if why else ""
            return False
        self.told = stages.unstored(told)
        if self.told:
            log.error("%s", self.told)
        return True

    def _hear(self, name: str, node: _Node, answer: Any) -> None:
        if isinstance(answer, AgentGone):
            if self._agents.lost([name]):
                self._gone(name, node, "it stopped answering")
        elif isinstance(answer, Exception):
            node.left = []  # an agent of an earlier version, which outlives an upgrade, cannot tell
        elif not answer["there"] or (node.pid and answer.get("pid", node.pid) != node.pid):
            self._gone(name, node, "its keeper was lost")
        elif "unstored" in answer:
            node.left, node.pid, node.ranks = answer["unstored"], int(answer["pid"]), answer["ranks"]

    def _gone(self, name: str, node: _Node, how: str) -> None:
        """Nothing more comes from a node, whose memory is gone."""
        if node.left:
            ranks = ", ".join(map(str, node.left))
            raise LostError(f"the program ended, but what rank {ranks} saved last was not stored yet on {name}: {how}")
        log.info("what the keeper of %s held, if anything, is not known: %s", name, how)
        node.left = []
