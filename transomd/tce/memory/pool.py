"""The slots of this rank's arena, on the program's side: which a save may take, which are open, what is in force."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from xxhash import xxh3_64_intdigest

from transomd.tce.errors import CheckpointError
from transomd.tce.memory.arena import PAGE, Arena
from transomd.tce.memory.ledger import Ledger
from transomd.tce.memory.slots import STAGED, WRITING, SlotState
from transomd.tce.memory.table import Table, encode

Policy = Literal["latest", "wait"]


def policy_of(told: str) -> Policy:
    """The policy of this name; CheckpointError if there is none."""
    if told not in ("latest", "wait"):
        raise CheckpointError(f"when_full is {told!r} and must be 'latest' or 'wait'")
    return "wait" if told == "wait" else "latest"


@dataclass(frozen=True)
class Opened:
    """A slot that is being copied into."""

    arena: Arena
    slot: int

    def fits(self, end: int, table: Table) -> bool:
        """Whether files that end at ``end`` find room in it, and then a table like this one and one file's more."""
        return bool(end + len(encode(table)) + PAGE <= self.arena.slot_bytes)


class Pool:
    """Slots for the saves of ``epoch``, of the arena that is this rank's now (None: it has none yet).

    What must not be lost, and what a save takes the place of, is the ``ledger``'s. Not safe for several threads.
    """

    def __init__(self, epoch: int, policy: Policy, ledger: Ledger) -> None:
        self.arena: Arena | None = None
        self.opened: list[Opened] = []
        self._epoch = epoch
        self._policy = policy
        self._ledger = ledger
        self._seq = 0

    def has(self, size: int) -> bool:
        """Whether there are slots of at least ``size`` bytes."""
        return self.arena is not None and self.arena.slot_bytes >= size

    def take(self, descriptors: list[int], seq: int) -> None:
        """Go on in the arena that the keeper sent, which knows of ``seq`` saves of this rank. Raises OSError."""
        arena = self.arena
        if arena is not None and descriptors and os.path.sameopenfile(arena.descriptor, descriptors[0]):
            # Another keeper hands back what it got from here: what is open in it stays so.
            os.close(descriptors[0])
        else:
            self._replace(descriptors)
        self._seq = max(self._seq, seq)

    def _replace(self, descriptors: list[int]) -> None:
        try:
            arena = Arena(descriptors[0])
        except (ValueError, IndexError) as error:
            raise OSError(f"the keeper sent no arena: {error}") from error
        before, self.arena = self.arena, arena
        self._close_unless_open(before)
        arena.follow()

    def open(self, step: int) -> Opened | None:
        """A slot for ``step``, marked WRITING: never one in use, never the newest. None: it is to be waited for.

        Raises NoRoom if the step is skipped, OSError if there is no memory for the slot's pages.
        """
        arena = self._present()
        slot = self._choose(arena)
        if slot is None and self._policy == "latest":
            raise self._ledger.no_room(step, arena.slots)
        if slot is None or not self._mark(arena, slot, step):
            return None
        arena.await_pages(slot)
        opened = Opened(arena, slot)
        self.opened = [*self.opened, opened]
        return opened

    def publish(self, opened: Opened, step: int, table: Table) -> int:
        """Put in force what was copied into a slot, and return which of the rank's saves it is.

        Raises OSError if the memory is not this rank's any more.
        """
        arena, slot, content = opened.arena, opened.slot, encode(table)
        if arena is not self.arena:
            raise OSError("the memory of this rank was replaced meanwhile")
        arena.image(slot)[table.end : table.end + len(content)] = content
        self._seq += 1
        digest = xxh3_64_intdigest(content)
        arena.set_state(slot, SlotState(STAGED, self._seq, step, self._epoch, table.end, len(content), digest))
        return self._seq

    def adopt(self, step: int, epoch: int) -> bool:
        """Put in force as this epoch's own what an earlier one staged; whether it is there."""
        arena = self._present()
        for slot, state in enumerate(arena.states()):
            if state.state == STAGED and (state.step, state.epoch) == (step, epoch):
                self._seq += 1
                arena.set_state(slot, replace(state, epoch=self._epoch, seq=self._seq))
                return True
        return False

    def drop(self, opened: Opened) -> bool:
        """Nobody copies into this slot any more; whether somebody might have."""
        left = [other for other in self.opened if other is not opened]
        was_open, self.opened = len(left) < len(self.opened), left
        self._close_unless_open(opened.arena)
        return was_open

    def holds(self, step: int, epoch: int) -> bool:
        """Whether this is staged here."""
        states = self.arena.states() if self.arena is not None else []
        return any(state.state == STAGED and (state.step, state.epoch) == (step, epoch) for state in states)

    def close(self) -> None:
        """Let go of the arena."""
        if self.arena is not None:
            self.arena.close()
        self.arena = None

    def _present(self) -> Arena:
        assert self.arena is not None, "an arena is taken first"
        return self.arena

    def _close_unless_open(self, arena: Arena | None) -> None:
        """Unmap an arena that has been replaced, once nobody copies into it any more."""
        if arena is not None and arena is not self.arena and not any(o.arena is arena for o in self.opened):
            arena.close()

    def _choose(self, arena: Arena) -> int | None:
        """The slot whose loss matters least."""
        states = arena.states()
        newest = max((state.order for state in states if state.state == STAGED), default=None)
        ledger = self._ledger
        free = [
            (
                state.state == STAGED,
                state.seq > arena.settled(slot) and ledger.due(state.step),
                state.epoch == self._epoch and ledger.awaits_copy(state.step),
                state.order,
                slot,
            )
            for slot, state in enumerate(states)
            if not (arena.used(slot) or self._is_open(arena, slot) or (state.state == STAGED and state.order == newest))
        ]
        if not free:
            return None
        whole, wanted, *_, slot = min(free)
        return None if whole and wanted and self._policy == "wait" else slot

    def _is_open(self, arena: Arena, slot: int) -> bool:
        return any(opened.arena is arena and opened.slot == slot for opened in self.opened)

    def _mark(self, arena: Arena, slot: int, step: int) -> bool:
        """Take the slot, unless the keeper begins to use it at this very moment."""
        before = arena.state(slot)
        arena.set_state(slot, SlotState(WRITING, before.seq, step, self._epoch))
        if arena.used(slot):
            arena.set_state(slot, before)
            return False
        if before.state == STAGED and before.seq > arena.settled(slot) and before.epoch == self._epoch:
            self._ledger.skip(before.step, step, before.seq)
        return True
