"""What one keeper offers another: a staged step of one rank, and the digests that its owner took of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from transomd.tce.manifest import FileRecord
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Place, Table, decode

Key = tuple[str, int]
"""Directory and rank."""
Digests = dict[str, tuple[FileRecord, ...]]
Told = dict[str, list[list[str]]]
"""Digests as they are told: of each file of a part, then of its tensors."""


@dataclass(frozen=True)
class Offer:
    """One staged step of one rank, as its keeper offers it; ``table`` is what its slot says of itself."""

    directory: str
    rank: int
    state: SlotState
    table: bytes
    digests: Told

    @property
    def key(self) -> Key:
        """Whose it is."""
        return self.directory, self.rank

    def checked_table(self) -> Table:
        """The table; ValueError if it is not that of the state, or tells of bytes outside the slot."""
        table, state = decode(self.table), self.state
        if xxh3_64_intdigest(self.table) != state.table_digest or len(self.table) != state.table_bytes:
            raise ValueError("the table does not match its digest")
        areas = [area for place in table.places for area in areas_of(place)]
        if any(at < 0 or size < 0 or at + size > state.table_offset for at, size in areas):
            raise ValueError("a part lies outside its slot")
        if any(r.offset < 0 or r.offset + r.bytes > p.tensors_bytes for p in table.places for r in p.records):
            raise ValueError("a tensor lies outside its part")
        return table


def told(digests: Mapping[str, tuple[FileRecord, ...]]) -> Told:
    """Digests as they are told to others."""
    return {
        name: [[file.xxh3_128, *(tensor.xxh3_128 for tensor in file.tensors)] for file in files]
        for name, files in digests.items()
    }


def areas_of(place: Place) -> list[tuple[int, int]]:
    """Where the two files of a part lie, and their sizes."""
    return [(place.tensors_at, place.tensors_bytes), (place.rest_at, place.rest_bytes)]
