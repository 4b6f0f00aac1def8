"""Keeping in a rank's own memory the steps of which other nodes keep copies: together they are one whole checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from transomd.tce.memory.arena import Arena, staged
from transomd.tce.memory.digests import Entry
from transomd.tce.memory.slots import STAGED, SlotState

Step = tuple[int, int]
"""Epoch and step."""


def leaves_room(states: Sequence[SlotState], used: Collection[int], pinned: Collection[int]) -> bool:
    """Whether the program can still copy into a slot: one that is neither ``used``, ``pinned`` nor the newest."""
    whole = [slot for slot, state in enumerate(states) if state.state == STAGED]
    newest = max(whole, key=lambda slot: states[slot].order, default=-1)
    return any(slot not in used and slot not in pinned and slot != newest for slot in range(len(states)))


class Pins:
    """The slots of one rank that its program does not write over, as long as it has another one to copy into."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[int, int], Entry] = {}

    def update(self, arenas: list[Arena], wanted: Iterable[Step]) -> None:
        """Pin the slots of these steps, what matters most first, and no others."""
        target: dict[tuple[int, int], Entry] = {}
        for step in wanted:
            for entry in staged(arenas):
                arena, slot, state = entry
                if (state.epoch, state.step) == step and (arena is not arenas[-1] or self._room(arena, slot, target)):
                    target[id(arena), slot] = entry
                    break
        for key in [key for key in self._pinned if key not in target]:
            arena, slot, _ = self._pinned.pop(key)
            arena.release(slot)
        for key, entry in target.items():
            if key not in self._pinned and entry[0].acquire(entry[1], entry[2].seq):
                self._pinned[key] = entry

    def _room(self, arena: Arena, slot: int, target: Collection[tuple[int, int]]) -> bool:
        mine = {at for of, at in self._pinned if of == id(arena)}
        pinned = {at for of, at in target if of == id(arena)} | {slot}
        used = {at for at in range(arena.slots) if arena.used(at) and at not in mine}
        return leaves_room(arena.states(), used, pinned)
