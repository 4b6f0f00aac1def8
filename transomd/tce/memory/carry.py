"""Carrying what was loaded from another place than a rank's own memory over into that memory, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from transomd.tce.memory.table import Place, Table, aligned

Share = Sequence[tuple[Place, memoryview]]
"""Parts, and the slots in which they are at present."""


def share(held: Iterable[tuple[Place, memoryview]], rank: int, first_of_node: bool) -> Share:
    """What of it the rank would stage itself: what is its own, and for its node what all ranks hold alike."""
    return [
        (replace(place, stored=place.ranks == (rank,) or rank == 0), memory)
        for place, memory in held
        if place.ranks == (rank,) or rank == 0 or first_of_node
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
