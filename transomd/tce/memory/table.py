"""The table at the end of a slot: which files lie where in it. JSON, as a keeper reads it without torch or trust."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from transomd.tce.image import FileImage, PartImage, Piece
from transomd.tce.manifest import FileRecord, TensorRecord
from transomd.tce.memory.arena import Arena

ALIGN = 4096


def aligned(size: int) -> int:
    """``size``, rounded up to where a file may begin."""
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Place:
    """One part in a slot: where its two files begin and their sizes (no tensors: 0), and whether storage gets it."""

    name: str
    ranks: tuple[int, ...]
    keys: tuple[str, ...]
    records: tuple[TensorRecord, ...]
    tensors_at: int
    tensors_bytes: int
    rest_at: int
    rest_bytes: int
    stored: bool

    @property
    def rest_name(self) -> str:
        """The file of what is no tensor: NAME.pt, unless NAME is a file's already."""
        return self.name if self.name.endswith(".json") else f"{self.name}.pt"


@dataclass(frozen=True)
class Table:
    """What one rank staged of one step; ``needs`` are the parts that it would load."""

    rank: int
    world_size: int
    needs: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def end(self) -> int:
        """Where the files end."""
        return max((place.rest_at + place.rest_bytes for place in self.places), default=0)


def encode(table: Table) -> bytes:
    """The bytes of a table; what stays the same from save to save is not encoded again."""
    places = b",".join(_encode_place(place) for place in table.places)
    head = json.dumps([table.rank, table.world_size, table.needs]).encode()
    return b'{"head":' + head + b',"places":[' + places + b"]}"


def decode(content: bytes) -> Table:
    """The table in ``content``; ValueError if it is none."""
    try:
        document = json.loads(content)
        rank, world_size, needs = document["head"]
        places = tuple(_decode_place(*place) for place in document["places"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a table in memory lacks {error}") from error
    return Table(rank, world_size, tuple(needs), places)


def images(arena: Arena, slot: int, table: Table) -> list[PartImage]:
    """The parts of a slot as images of their files, over the slot's memory."""
    memory = arena.image(slot)
    return [PartImage(place.name, place.ranks, place.keys, _files(memory, place)) for place in table.places]


def with_digests(part: PartImage, known: Sequence[FileRecord]) -> PartImage:
    """The part, whose digests are taken already."""
    files = tuple(replace(file, known=record) for file, record in zip(part.files, known, strict=True))
    return replace(part, files=files)


def _files(memory: memoryview, place: Place) -> tuple[FileImage, ...]:
    rest = memory[place.rest_at :][: place.rest_bytes]
    files = [FileImage(place.rest_name, place.rest_bytes, (), lambda: [rest])] if place.rest_bytes else []
    if place.records:
        tensors = memory[place.tensors_at :][: place.tensors_bytes]
        name = f"{place.name}.safetensors"
        pieces = partial(_pieces, tensors, place.records)
        files.insert(0, FileImage(name, place.tensors_bytes, place.records, pieces, whole=tensors))
    return tuple(files)


def _pieces(tensors: memoryview, records: tuple[TensorRecord, ...]) -> Iterator[Piece]:
    yield tensors[: records[0].offset]
    for record in records:
        yield tensors[record.offset :][: record.bytes]


def _encode_place(place: Place) -> bytes:
    moving = [place.tensors_at, place.rest_at, place.rest_bytes]
    return (
        b"["
        + json.dumps(moving)[1:-1].encode()
        + b","
        + _encode_still(replace(place, tensors_at=0, rest_at=0, rest_bytes=0))
        + b"]"
    )


@lru_cache(maxsize=8)
def _encode_still(place: Place) -> bytes:
    tensors = [[r.name, r.dtype, r.shape, r.offset, r.bytes, r.note] for r in place.records]
    still = [place.name, place.ranks, place.keys, place.tensors_bytes, place.stored, tensors]
    return json.dumps(still)[1:-1].encode()


def _decode_place(
    tensors_at: int,
    rest_at: int,
    rest_bytes: int,
    name: str,
    ranks: list[int],
    keys: list[str],
    tensors_bytes: int,
    stored: bool,
    tensors: list[tuple[str, str, list[int], int, int, str]],
) -> Place:
    records = tuple(
        TensorRecord(n, dtype, tuple(shape), at, size, "", note) for n, dtype, shape, at, size, note in tensors
    )
    return Place(name, tuple(ranks), tuple(keys), records, tensors_at, tensors_bytes, rest_at, rest_bytes, stored)
