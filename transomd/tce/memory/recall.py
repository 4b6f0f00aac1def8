"""Loading from this node's memory: which steps it offers, whether their bytes are undamaged, and the values."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transomd.tce.crew import together
from transomd.tce.files import digest
from transomd.tce.manifest import PartEntry, StepManifest
from transomd.tce.memory.arena import Arena, close_aside, mapped
from transomd.tce.memory.link import Link
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Place, Table, decode
from transomd.tce.memory.wire import Message
from transomd.tce.persist import Writer

if TYPE_CHECKING:
    from transomd.tce.layout import Layout
    from transomd.tce.payload import MemoryReader

log = logging.getLogger("transom.tce")
FETCH_S = 600.0
"""How long the copy of a step may take to come from another node."""


@dataclass(frozen=True)
class _Held:
    """One part in a slot that nobody writes over while we read; ``digests``: of its tensors, then of the rest.

    ``copy``: it was staged on another node.
    """

    owner: int
    copy: bool
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
    """One rank's look at the memory of its node, and, after ``look_abroad``, at what other nodes have copied of it.

    It has a line of its own, as an answer may take long: nobody else listens there, or waits for it. ``source``: where
    what is held was staged. ``owned``: whether another program has this rank's memory.
    """

    def __init__(self, link: Link, writer: Writer, greeting: Message, owned: bool) -> None:
        """``greeting``: what the keeper answered to ``hello`` on this line, which is closed by ``release``."""
        self._link = link
        self._writer = writer
        self.steps = [(epoch, step) for epoch, step in greeting["steps"]]
        self.staged = [(epoch, step) for epoch, step in greeting["staged"]]
        self.owned = owned
        self.source = "memory"
        self._here = frozenset(self.steps)
        self._held: list[_Held] = []
        self._arenas: list[Arena] = []

    def look_abroad(self) -> None:
        """Ask, through the keeper, the keepers of other nodes; what they hold is offered, too."""
        try:
            answer, _ = self._link.ask("abroad", timeout_s=FETCH_S)
            self.steps = list(dict.fromkeys([*self.steps, *((epoch, step) for epoch, step in answer["steps"])]))
        except (OSError, KeyError, ValueError) as error:
            log.warning("other nodes are not asked for copies: %s", error)

    def problems(self, epoch: int, step: int) -> list[str]:
        """Read everything that this rank would load of a step; what is wrong with it. Damage is never loaded again.

        What this node lacks, or has damaged, is fetched from another one.
        """
        found = self._verify(epoch, step) if (epoch, step) in self._here else ["it is not in this node's memory"]
        if not found:
            return []
        answer: dict[str, Any] = {"error": "it cannot be asked for"}
        with contextlib.suppress(OSError):
            answer, _ = self._link.ask("fetch", timeout_s=FETCH_S, epoch=epoch, step=step)
        if answer["error"]:
            return [*found, f"no copy on another node: {answer['error']}"]
        return self._verify(epoch, step)

    def _verify(self, epoch: int, step: int) -> list[str]:
        self._let_go()
        try:
            self._hold(epoch, step)
        except (OSError, ValueError) as error:
            self._let_go()
            return [f"memory: {error}"]
        bad = {(held.owner, held.copy): told for held in self._held if (told := _damaged(held))}
        found = [problem for told in bad.values() for problem in told]
        if found:
            log.warning("step %d of epoch %d is damaged in memory: %s", step, epoch, "; ".join(found[:5]))
            with contextlib.suppress(OSError):
                for rank, copy in bad:
                    self._link.tell("quarantine", epoch=epoch, step=step, of_rank=rank, copy=copy)
            self._let_go()
        copied = any(held.copy for held in self._held)
        self.source = "the copy of another node's memory" if copied else "memory"
        return found

    def manifest(self, epoch: int, step: int) -> StepManifest:
        """What is held, told as a manifest tells it."""
        parts = tuple(
            PartEntry(held.place.name, held.owner, held.place.ranks, held.place.keys, {}) for held in self._held
        )
        return StepManifest(step, epoch, self._writer.world_size, time.time(), (), parts)

    def own(self, epoch: int, step: int) -> bool:
        """Whether a step that was verified is, undamaged, what this very rank staged here."""
        return self.source == "memory" and (epoch, step) in self.staged

    def held(self) -> list[tuple[Place, memoryview]]:
        """The parts that are held, and the slots in which they are."""
        return [(held.place, held.memory) for held in self._held]

    def opened(self) -> list[tuple[Layout, MemoryReader]]:
        """The parts that are held: what is no tensor, and the tensors."""
        # Here and not above: torch.
        from transomd.tce.payload import MemoryReader, layout_of

        return [(layout_of(bytes(held.rest)), _reader(held, MemoryReader)) for held in self._held]

    def release(self) -> None:
        """Let go of what is held, and hang up: nothing more can be asked."""
        self._let_go()
        self._link.close()

    def _let_go(self) -> None:
        if self._held or self._arenas:
            self._held = []
            close_aside(self._arenas)
            self._arenas = []
            with contextlib.suppress(OSError):
                self._link.tell("release")

    def _hold(self, epoch: int, step: int) -> None:
        answer, descriptors = self._link.ask("hold", epoch=epoch, step=step)
        self._arenas = mapped(descriptors)
        needs: set[str] = set()
        for told, arena in zip(answer["slots"], self._arenas, strict=True):
            table = table_of(told, arena)
            if told["rank"] == self._writer.rank:
                needs = set(table.needs)
            memory = arena.image(told["slot"])
            for place in table.places:
                if self._writer.rank in place.ranks and place.name not in {held.place.name for held in self._held}:
                    digests = _flat(told["digests"].get(place.name, []))
                    self._held.append(_Held(told["rank"], told["copy"], place, memory, digests))
        missing = needs - {held.place.name for held in self._held}
        if missing or not needs:
            raise ValueError(f"step {step} of epoch {epoch} is not whole any more")


def table_of(told: Message, arena: Arena) -> Table:
    """The table of a slot that the keeper hands out (``hold``); ValueError if it is damaged."""
    # A keeper of an earlier version, which outlives an upgrade, does not tell its state.
    state = SlotState(*told["state"]) if "state" in told else arena.state(told["slot"])
    return decode(arena.table(told["slot"], state))


def _reader(held: _Held, kind: type[MemoryReader]) -> MemoryReader:
    return kind(held.memory, held.place.tensors_at, held.place.records)


def _flat(files: list[list[str]]) -> list[str]:
    """Digests of a part's tensors, and then of its rest, from those of its files."""
    tensors = [told for file in files[:-1] for told in file[1:]]
    return [*tensors, files[-1][0]] if files else []


def _damaged(held: _Held) -> list[str]:
    """Which pieces do not match their digests. In threads: the program does nothing else now."""
    pieces = sorted((piece for piece in held.pieces() if piece[2]), key=lambda piece: -len(piece[1]))
    return [f"memory of rank {held.owner}: {name} is damaged" for name in together(pieces, _mismatched)]


def _mismatched(pieces: Iterator[tuple[str, memoryview, str]]) -> Iterator[str]:
    return (name for name, content, told in pieces if digest(content) != told)
