"""The digests of what is staged, taken by a thread after the save, so that they are there even if the store hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from transomd.tce.image import PartImage, digest_file
from transomd.tce.manifest import FileRecord
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import decode, images, with_digests

Entry = tuple[Arena, int, SlotState]
Digests = dict[str, tuple[FileRecord, ...]]


class Digester:
    """Digests by slot and save. ``following`` says which to take next, None: all are known; ``told`` hears of each.

    ``damaged`` hears of slots whose tables are, and which must not be ``following`` again.
    """

    def __init__(
        self, following: Callable[[], Entry | None], told: Callable[[], None], damaged: Callable[[Entry], None]
    ) -> None:
        self._following = following
        self._told = told
        self._damaged = damaged
        self._known: dict[tuple[int, int], Digests] = {}
        self._bell, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Something was staged."""
        self._bell.set()

    def known(self, entry: Entry) -> Digests:
        """The digests of a slot as far as they have been taken."""
        return self._known.get((id(entry[0]), entry[2].seq), {})

    def knows(self, entry: Entry) -> bool:
        """Whether the digests of a slot have been taken (there may be none, where it holds nothing)."""
        return (id(entry[0]), entry[2].seq) in self._known

    def with_digests(self, entry: Entry, parts: list[PartImage]) -> list[PartImage]:
        """The parts of a slot that is in use, with their digests, which are taken now if they are not known."""
        known = self.known(entry) or self._take(entry, parts)
        return [with_digests(part, known[part.name]) for part in parts]

    def end(self) -> threading.Thread:
        """Let the thread end, which is returned."""
        self._end.set()
        self._bell.set()
        return self._thread

    def _run(self) -> None:
        while not self._end.is_set():
            self._bell.wait()
            self._bell.clear()
            # An arena may be closed under our hands: nobody needs the digests then.
            with contextlib.suppress(ValueError, OSError, AttributeError):
                while not self._end.is_set() and (entry := self._following()) is not None:
                    self._take_staged(entry)

    def _take_staged(self, entry: Entry) -> None:
        arena, slot, state = entry
        try:
            parts = images(arena, slot, decode(arena.table(slot, state)))
        except ValueError:
            if arena.state(slot) == state:  # else it was written over meanwhile, or the arena is closed
                self._damaged(entry)
            return
        self._take(entry, parts)

    def _take(self, entry: Entry, parts: list[PartImage]) -> Digests:
        arena, slot, state = entry
        taken = {part.name: tuple(digest_file(file) for file in part.files) for part in parts}
        if arena.state(slot) == state:  # else it was written over meanwhile
            there = {(id(arena), other.seq) for other in arena.states()}
            kept = {key: value for key, value in self._known.items() if key[0] != id(arena) or key in there}
            self._known = {**kept, (id(arena), state.seq): taken}
            self._told()
        return taken
