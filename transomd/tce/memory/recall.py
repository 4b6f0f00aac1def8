"""Loading from this node's memory: which steps it offers, whether their bytes are undamaged, and the values."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transomd.tce.files import digest
from transomd.tce.manifest import PartEntry, StepManifest
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.link import Link, hello
from transomd.tce.memory.table import Place, decode
from transomd.tce.persist import Writer

if TYPE_CHECKING:
    from transomd.tce.layout import Layout
    from transomd.tce.payload import MemoryReader

log = logging.getLogger("transom.tce")


@dataclass(frozen=True)
class _Held:
    """One part in a slot that nobody writes over while we read; ``digests``: of its tensors, then of the rest."""

    owner: int
    place: Place
    memory: memoryview
    digests: list[str]

    def pieces(self) -> Iterator[tuple[str, memoryview, str]]:
        """What each piece is called, its bytes and its digest ('': not taken yet)."""
        tensors = self.memory[self.place.tensors_at :]
        known = iter(self.digests or [""] * (len(self.place.records) + 1))
        for record, told in zip(self.place.records, known, strict=False):
            yield f"tensor {record.name}", tensors[record.offset :][: record.bytes], told
        yield f"{self.place.name}.pt", self.rest, next(known)

    @property
    def rest(self) -> memoryview:
        """What is no tensor."""
        return self.memory[self.place.rest_at :][: self.place.rest_bytes]


class Recall:
    """One rank's look at the memory of its node."""

    def __init__(self, link: Link, writer: Writer) -> None:
        """Ask the keeper. Raises OSError."""
        self._link = link
        self._writer = writer
        answer = hello(link, writer.directory, writer.rank, writer.world_size)
        self.steps = [(epoch, step) for epoch, step in answer["steps"]]
        self.staged = [(epoch, step) for epoch, step in answer["staged"]]
        self.owned = bool(answer["owned"])
        self._held: list[_Held] = []
        self._arenas: list[Arena] = []

    def problems(self, epoch: int, step: int) -> list[str]:
        """Read everything that this rank would load of a step; what is wrong with it. Damage is never loaded again."""
        self.release()
        try:
            self._hold(epoch, step)
        except (OSError, ValueError) as error:
            return [f"memory: {error}"]
        found = [told for held in self._held for told in _damaged(held)]
        if found:
            log.warning("step %d of epoch %d is damaged in memory: %s", step, epoch, "; ".join(found[:5]))
            with contextlib.suppress(OSError):
                for rank in {held.owner for held in self._held if list(_damaged(held))}:
                    self._link.tell("quarantine", epoch=epoch, step=step, of_rank=rank)
            self.release()
        return found

    def manifest(self, epoch: int, step: int) -> StepManifest:
        """What is held, told as a manifest tells it."""
        parts = tuple(
            PartEntry(held.place.name, held.owner, held.place.ranks, held.place.keys, {}) for held in self._held
        )
        return StepManifest(step, epoch, self._writer.world_size, time.time(), (), parts)

    def opened(self) -> list[tuple[tuple[str, ...], Layout, MemoryReader]]:
        """The parts that are held: their keys, what is no tensor, and the tensors."""
        # Here and not above: torch.
        from transomd.tce.payload import MemoryReader, layout_of

        return [(held.place.keys, layout_of(bytes(held.rest)), _reader(held, MemoryReader)) for held in self._held]

    def release(self) -> None:
        """Let go of what is held."""
        if self._held or self._arenas:
            self._held = []
            for arena in self._arenas:
                arena.close()
            self._arenas = []
            with contextlib.suppress(OSError):
                self._link.tell("release")

    def _hold(self, epoch: int, step: int) -> None:
        answer, descriptors = self._link.ask("hold", epoch=epoch, step=step)
        self._arenas = [Arena(descriptor) for descriptor in descriptors]
        needs: set[str] = set()
        for told, arena in zip(answer["slots"], self._arenas, strict=True):
            table = decode(arena.table(told["slot"]))
            if told["rank"] == self._writer.rank:
                needs = set(table.needs)
            memory = arena.image(told["slot"])
            for place in table.places:
                if self._writer.rank in place.ranks and place.name not in {held.place.name for held in self._held}:
                    self._held.append(_Held(told["rank"], place, memory, _flat(told["digests"].get(place.name, []))))
        missing = needs - {held.place.name for held in self._held}
        if missing or not needs:
            raise ValueError(f"step {step} of epoch {epoch} is not whole any more")


def _reader(held: _Held, kind: type[MemoryReader]) -> MemoryReader:
    return kind(held.memory, held.place.tensors_at, held.place.records)


def _flat(files: list[list[str]]) -> list[str]:
    """Digests of a part's tensors, and then of its rest, from those of its files."""
    tensors = [told for file in files[:-1] for told in file[1:]]
    return [*tensors, files[-1][0]] if files else []


def _damaged(held: _Held) -> Iterable[str]:
    """Which pieces do not match their digests. In threads: the program does nothing else now."""
    pieces = [piece for piece in held.pieces() if piece[2]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        good: Any = pool.map(lambda piece: digest(piece[1]) == piece[2], pieces)
        return [
            f"memory of rank {held.owner}: {name} is damaged"
            for (name, _, _), right in zip(pieces, good, strict=True)
            if not right
        ]
