"""What was loaded from memory alone is brought to storage by the start that loaded it, under its own epoch.

Under the old one nobody may write it any more once this start saves, and who held it may be lost with its node. Each
share is staged by one process of this start, where its node holds it if one does; the keeper stores it from there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from transomd.tce.dcp import commit
from transomd.tce.dcp.shares import Shares
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import parse_step_folder, step_folder
from transomd.tce.memory.carry import restage
from transomd.tce.memory.tier import MemoryTier
from transomd.tce.persist import Writer
from transomd.tce.store import Store

log = logging.getLogger("transom.tce")
_ALL = 1 << 62


@dataclass(frozen=True)
class Task:
    """The shares that one process, ``rank`` of ``ranks`` of this start, brings to storage under ``epoch``."""

    epoch: int
    rank: int
    shares: tuple[int, ...]
    ranks: int


def tasks(epoch: int, held: Sequence[Collection[int]], count: int) -> list[Task]:
    """Which of ``count`` shares each rank sees to; ``held``: those that each rank's node has.

    A node that has it comes first; there the rank that will save under its number, whose memory it is in, else
    whichever has the fewest.
    """
    dealt: list[list[int]] = [[] for _ in held]
    for share in range(count):
        near = [rank for rank, there in enumerate(held) if share in there] or list(range(len(held)))
        taker = share if share in near else min(near, key=lambda rank: len(dealt[rank]))
        dealt[taker].append(share)
    return [Task(epoch, rank, tuple(mine), len(dealt)) for rank, mine in enumerate(dealt)]


def bring(folder: Path, count: int, shares: Shares, task: Task) -> Path:
    """Have this node's keeper store its part of the step in ``folder``, which ``count`` ranks staged; where it then is.

    Never raises: the step is loaded, and what cannot be stored is told.
    """
    step, _ = parse_step_folder(folder.name) or (0, 0)
    carried = folder.parent / step_folder(step, task.epoch)
    commit.CARRIED.add(carried)
    staged = [_stage(folder, rank, count, shares, task) for rank in task.shares]
    if task.ranks == 1 and not any(staged):
        # Else some rank has staged something of it under this epoch, with which no other save of it may be mixed.
        commit.CARRIED.discard(carried)
    return carried


def _stage(folder: Path, rank: int, count: int, shares: Shares, task: Task) -> bool:
    """Stage the share of one of the ``count`` ranks; whether that could be done."""
    step, epoch = parse_step_folder(folder.name) or (0, 0)
    tier = MemoryTier(Store(Writer(folder.parent, rank, count, task.epoch), "", _ALL), "latest", None)
    borrowed = False
    try:
        held = shares.share(rank)
        own = not held.copy and tier.adopt(step, epoch)
        if not own:
            restage(tier, step, held.parts, held.table.needs)
        tier.resumed(folder.parent / step_folder(step, task.epoch), lacking=True)
        # Memory under a number that no rank of this start has is given back once it is stored.
        borrowed = not own and rank != task.rank
    except (OSError, MemoryError, ValueError, CheckpointError) as error:
        log.warning("step %d, which was loaded: rank %d's share is not brought to storage: %s", step, rank, error)
        return False
    finally:
        tier.close(0, leave=borrowed)
    return True
