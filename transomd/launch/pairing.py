"""Before a launch: who holds whose copy of checkpoints, told to the agents. A launch never fails for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from transomd.launch.hub import Hub
from transomd.tce.replicate.partners import partners

log = logging.getLogger("transom.launcher")

ASK_S = 5.0
"""How long agents may take to say where their keepers listen; those that do not have no part in it."""


async def pair(hub: Hub, epoch: int, launch: Sequence[str], alive: Sequence[str]) -> dict[str, str]:
    """Tell each node that is ``alive`` who its partner is and what others hold; the holder of each node's copy.

    Only nodes of the ``launch`` hold copies for each other. The others are named, as they may still have some of an
    earlier launch, or may have been started on with none of their own.
    """
    answers = await hub.ask_all(alive, "keeper", ASK_S)
    there = {node: answer for node, answer in answers.items() if isinstance(answer, dict) and answer.get("port")}
    found = partners([node for node in launch if node in there], {n: str(told["domain"]) for n, told in there.items()})
    keepers = {node: [node, told["port"], told["ranks"]] for node, told in there.items()}
    told = (
        hub.ask(node, "peers", ASK_S, epoch=epoch, me=node, partner=found.get(node, ""), keepers=keepers)
        for node in there
    )
    for problem in await asyncio.gather(*told, return_exceptions=True):
        if isinstance(problem, Exception):
            log.warning("an agent was not told who holds its copies: %s", problem)
    log.info("copies of checkpoints: %s", told_of(found))
    return found


def told_of(found: Mapping[str, str]) -> str:
    """Who holds whose copy, for the log."""
    if not found:
        return "no other node can hold any"
    pairs = [f"{holder} holds {node}'s" for node, holder in sorted(found.items())]
    return ", ".join(pairs[:8]) + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
