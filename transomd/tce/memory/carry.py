"""Carrying what was loaded from another place than a rank's own memory over into that memory, byte by byte."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from transomd.tce.groups import Ranks, first_of_node
from transomd.tce.memory.ledger import NoRoom
from transomd.tce.memory.table import Place, Table, aligned
from transomd.tce.memory.tier import MemoryTier

if TYPE_CHECKING:
    from transomd.tce.memory.recall import Recall
    from transomd.tce.restore import Found

log = logging.getLogger("transom.tce")
Share = Sequence[tuple[Place, memoryview]]
"""Parts, and the slots in which they are at present."""


def share(held: Iterable[tuple[Place, memoryview]], rank: int, before: Ranks) -> Share:
    """What of it the rank would stage itself: what is its own, and for its node what several ranks hold alike.

    ``before``: the ranks of its node that come before it.
    """
    return [
        (replace(place, stored=place.ranks[0] == rank), memory)
        for place, memory in held
        if place.ranks[0] == rank or first_of_node(place.ranks, before)
    ]


def lay_out(parts: Share, rank: int, world_size: int, needs: tuple[str, ...]) -> Table:
    """Where each part goes in a slot of the rank's own."""
    at = 0
    places = []
    for place, _ in parts:
        rest_at = at + aligned(place.tensors_bytes)
        places.append(replace(place, tensors_at=at, rest_at=rest_at))
        at = rest_at + aligned(place.rest_bytes)
    return Table(rank, world_size, needs, tuple(places))


def fill(image: memoryview, table: Table, parts: Share) -> None:
    """Copy every part to its place."""
    for to, (place, memory) in zip(table.places, parts, strict=True):
        image[to.tensors_at :][: to.tensors_bytes] = memory[place.tensors_at :][: place.tensors_bytes]
        image[to.rest_at :][: to.rest_bytes] = memory[place.rest_at :][: place.rest_bytes]


def restage(tier: MemoryTier, step: int, parts: Share, needs: tuple[str, ...]) -> None:
    """Stage under the tier's epoch, byte by byte, what an earlier start staged.

    Raises OSError, MemoryError or NoRoom.
    """
    table = lay_out(parts, tier.writer.rank, tier.writer.world_size, needs)
    opened = tier.open(step, table)
    try:
        fill(opened.arena.image(opened.slot), table, parts)
        tier.publish(opened, step, table, None)
    finally:
        tier.drop(opened)


def carry_over(tier: MemoryTier, found: Found, recall: Recall, before: Ranks) -> None:
    """Make the tier's own what memory alone gave, while ``recall`` holds it, so that this start stores it.

    It is copied from another place than the rank's memory, and from memory that had become too small.
    """
    step, epoch = found.manifest.step, found.manifest.epoch
    tier.wants(step)
    try:
        if recall.own(epoch, step) and tier.adopt(step, epoch):
            return
        held = recall.held()
        restage(tier, step, share(held, tier.writer.rank, before), tuple(place.name for place, _ in held))
    except (OSError, MemoryError, NoRoom) as error:
        log.warning("step %d, which was loaded, is not brought to storage: %s", step, error)
