"""What a keeper holds of a checkpoint directory, told to other keepers, and which steps a rank can load of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transomd.tce.manifest import FileRecord
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Table

Step = tuple[int, int]
"""Epoch and step."""


class Holder(Protocol):
    """One rank's memory here: its own arenas (a tenant), or copies of what it staged elsewhere."""

    rank: int

    def staged(self) -> list[tuple[Arena, int, SlotState]]:
        """Every good slot, newest first."""
        ...

    def table(self, entry: tuple[Arena, int, SlotState]) -> Table:
        """What a slot says of itself; ValueError if it is damaged."""
        ...

    def digests(self, entry: tuple[Arena, int, SlotState]) -> Mapping[str, tuple[FileRecord, ...]]:
        """Its digests, as far as they have been taken."""
        ...

    def quarantine(self, entry: tuple[Arena, int, SlotState]) -> None:
        """What is in this slot is damaged."""
        ...


@dataclass(frozen=True)
class Holding:
    """One slot: whose it is, of which step, what that rank would load (``needs``), and which parts are in it."""

    rank: int
    epoch: int
    step: int
    world_size: int
    needs: tuple[str, ...]
    names: tuple[str, ...]

    def encode(self) -> list[Any]:
        """As JSON."""
        return [self.rank, self.epoch, self.step, self.world_size, self.needs, self.names]


def decode(told: list[Any]) -> Holding:
    """From JSON; ValueError or TypeError if it is none."""
    rank, epoch, step, world_size, needs, names = told
    return Holding(int(rank), int(epoch), int(step), int(world_size), tuple(map(str, needs)), tuple(map(str, names)))


def holdings(holders: Iterable[Holder]) -> list[Holding]:
    """What is held, slot by slot; what is damaged is left out."""
    found = []
    for holder in holders:
        for entry in holder.staged():
            with contextlib.suppress(ValueError):
                table, state = holder.table(entry), entry[2]
                names = tuple(place.name for place in table.places)
                found.append(Holding(holder.rank, state.epoch, state.step, table.world_size, table.needs, names))
    return found


def loadable(held: Iterable[Holding], rank: int, world_size: int) -> list[Step]:
    """The steps of which everything that the rank needs is held, newest first."""
    names: dict[Step, set[str]] = {}
    needs: dict[Step, set[str]] = {}
    for one in held:
        if one.world_size == world_size:
            names.setdefault((one.epoch, one.step), set()).update(one.names)
            if one.rank == rank:
                needs[one.epoch, one.step] = set(one.needs)
    return sorted((at for at, wanted in needs.items() if wanted <= names[at]), reverse=True)
