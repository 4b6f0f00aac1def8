"""What memory holds of the checkpoints that DCP wrote: of this node's ranks, copied from others, or fetched now."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transomd.tce.dcp.facts import FILE
from transomd.tce.files import digest
from transomd.tce.memory.arena import Arena, mapped
from transomd.tce.memory.link import Link, connect, hello
from transomd.tce.memory.recall import FETCH_S, table_of
from transomd.tce.memory.table import Place, Table
from transomd.tce.replicate.holdings import Holding
from transomd.tce.replicate.holdings import decode as decode_holding

log = logging.getLogger("transom.tce")
Step = tuple[int, int]
"""Epoch and step."""
_RANK = re.compile(r"rank-(\d+)\.safetensors")


def look(directory: Path) -> list[Holding]:
    """What this node's keeper holds of a directory, of whichever rank; nothing where no keeper answers."""
    try:
        link = connect(directory, start=False)
        if link is None:
            return []
        with contextlib.closing(link):
            return [decode_holding(told) for told in hello(link, directory, 0, 1)["held"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("memory is not asked for checkpoints: %s", error)
        return []


def whole(held: Iterable[Holding]) -> dict[Step, int]:
    """The steps of which every rank's share is held, each with the number of its ranks."""
    held = list(held)
    described = {(one.epoch, one.step, one.world_size) for one in held if FILE in one.names}
    lacking = {(*at, size) for at, size, _ in partly(held)}
    return {(epoch, step): size for epoch, step, size in described - lacking}


def partly(held: Iterable[Holding]) -> list[tuple[Step, int, list[int]]]:
    """Steps of which only some shares are held, newest first; with each the number of its ranks, and who is missing."""
    ranks: dict[tuple[int, int, int], set[int]] = {}
    for one in held:
        if {*one.names} <= {FILE, f"rank-{one.rank:05d}"}:
            ranks.setdefault((one.epoch, one.step, one.world_size), set()).add(one.rank)
    missing = {at: sorted({*range(at[2])} - there) for at, there in ranks.items()}
    return [((epoch, step), size, gone) for (epoch, step, size), gone in sorted(missing.items(), reverse=True) if gone]


def search(directory: Path, parts: Iterable[tuple[Step, int, list[int]]]) -> list[Holding]:
    """What other nodes, with or without ranks of this start, hold of the first step that becomes whole with it."""
    try:
        link = connect(directory, start=False)
        if link is None:
            return []
        with contextlib.closing(link):
            found = (_abroad(link, directory, *part) for part in parts)
            return next(filter(None, found), [])
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("other nodes are not asked for shares: %s", error)
        return []


def _abroad(link: Link, directory: Path, at: Step, size: int, missing: Iterable[int]) -> list[Holding]:
    """The missing shares of a step, if other nodes have them all. Raises OSError."""
    found = []
    for rank in missing:
        hello(link, directory, rank, size)
        answer, _ = link.ask("abroad", timeout_s=FETCH_S)
        if list(at) not in answer["steps"]:
            return []
        found.append(Holding(rank, *at, size, (), (FILE,) if rank == 0 else ()))
    return found


@dataclass(frozen=True)
class Slot:
    """A slot that nobody writes over while we read; ``digests`` of each part: of its file, then of its tensors."""

    rank: int
    copy: bool
    memory: memoryview
    table: Table
    places: dict[str, Place]
    digests: dict[str, list[list[str]]]

    @property
    def parts(self) -> list[tuple[Place, memoryview]]:
        """Its parts, each with the memory in which it lies."""
        return [(place, self.memory) for place in self.table.places]

    def damaged(self) -> str:
        """A part whose file is not what its digest says; '' if there is none."""
        for name, place in self.places.items():
            at, size = (place.tensors_at, place.tensors_bytes) if place.records else (place.rest_at, place.rest_bytes)
            known = self.digests.get(name, [[""]])[0][0] if size else ""
            if known and digest(self.memory[at:][:size]) != known:
                return name
        return ""

    def find(self, file: str, name: str) -> tuple[memoryview, str] | None:
        """The bytes of a tensor, or of a file of one piece, with their digest ('': not taken yet); None: not here."""
        place = self.places.get(file.removesuffix(".safetensors"))
        if place is None:
            return None
        told = self.digests.get(place.name) or [[""] * (len(place.records) + 1)]
        if not place.records:
            return self.memory[place.rest_at :][: place.rest_bytes], told[0][0]
        for record, known in zip(place.records, told[0][1:], strict=True):
            if record.name == name:
                return self.memory[place.tensors_at + record.offset :][: record.bytes], known
        return None


class Shares:
    """The shares of one step of ``world_size`` ranks. Damage is told to the keeper and never handed out."""

    def __init__(self, directory: Path, epoch: int, step: int, world_size: int) -> None:
        """Call the keeper. Raises OSError."""
        self._directory, self._at, self._world_size = directory, (epoch, step), world_size
        self._slots: dict[int, list[Slot]] = {}
        self._fetched: set[int] = set()
        self._owned: set[int] = set()
        self._arenas: list[Arena] = []
        self._link: Link | None = connect(directory, start=False)

    def find(self, file: str, name: str) -> memoryview | None:
        """The bytes of a tensor (or of a file that is no tensors'), verified; None if memory has no good ones."""
        match = _RANK.fullmatch(file)
        rank = int(match[1]) if match else 0
        try:
            while True:
                for slot in self._slots_of(rank):
                    if (good := self._good(slot, file, name)) is not None:
                        return good
                if rank in self._fetched:
                    return None
                self._fetch(rank)
        except (OSError, ValueError) as error:
            log.warning("memory has no share of rank %d: %s", rank, error)
            self._slots[rank] = []
            self._fetched.add(rank)
            return None

    def share(self, rank: int) -> Slot:
        """All that a rank staged, verified. Raises OSError or ValueError if there is no good one, or it is not free."""
        while True:
            for slot in self._slots_of(rank):
                if rank in self._owned:
                    raise OSError("the program that saved it is still there")
                if not (wrong := slot.damaged()):
                    return slot
                self._refute(slot, wrong)
            if rank in self._fetched:
                raise OSError("memory has no good one")
            self._fetch(rank)

    def release(self) -> None:
        """Let go of what is held."""
        self._slots = {}
        for arena in self._arenas:
            arena.close()
        self._arenas = []
        if self._link is not None:
            self._link.close()
            self._link = None

    def _good(self, slot: Slot, file: str, name: str) -> memoryview | None:
        found = slot.find(file, name)
        if found is None or not found[1] or digest(found[0]) == found[1]:
            return None if found is None else found[0]
        self._refute(slot, f"tensor {name}")
        return None

    def _refute(self, slot: Slot, what: str) -> None:
        """Say what is damaged, and use the slot no more."""
        epoch, step = self._at
        log.warning("step %d of epoch %d is damaged in memory: rank %d: %s", step, epoch, slot.rank, what)
        self._slots[slot.rank] = [other for other in self._slots[slot.rank] if other is not slot]
        self._asked().tell("quarantine", epoch=epoch, step=step, of_rank=slot.rank, copy=slot.copy)

    def _slots_of(self, rank: int) -> list[Slot]:
        """The rank's slots: its own first. Raises OSError or ValueError."""
        if rank not in self._slots:
            self._slots[rank] = self._hold(rank)
        return list(self._slots[rank])

    def _hold(self, rank: int) -> list[Slot]:
        if hello(self._asked(), self._directory, rank, self._world_size)["owned"]:
            self._owned.add(rank)
        answer, descriptors = self._asked().ask("hold", epoch=self._at[0], step=self._at[1])
        slots = []
        arenas = mapped(descriptors)
        self._arenas += arenas
        for told, arena in zip(answer["slots"], arenas, strict=True):
            with contextlib.suppress(ValueError):
                table = table_of(told, arena)
                places = {place.name: place for place in table.places}
                digests = {name: files[:1] for name, files in told["digests"].items()}
                slots.append(Slot(rank, bool(told["copy"]), arena.image(told["slot"]), table, places, digests))
        return slots

    def _fetch(self, rank: int) -> None:
        """Bring the rank's share here from another node. Raises OSError if none can give it."""
        self._fetched.add(rank)
        hello(self._asked(), self._directory, rank, self._world_size)
        answer, _ = self._asked().ask("fetch", timeout_s=FETCH_S, epoch=self._at[0], step=self._at[1])
        if answer["error"]:
            raise OSError(f"no copy on another node: {answer['error']}")
        self._slots[rank] = self._hold(rank)

    def _asked(self) -> Link:
        if self._link is None:
            raise OSError("no keeper is there")
        return self._link
