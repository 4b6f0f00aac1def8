"""Which steps' copies are kept, so that there is always one of which every rank has a copy. Pure.

Copies that are slower than the saves leave out steps, each rank's other ones; holders that went on by themselves would
sooner or later share no step. So the launcher, which hears what every holder has, tells them what to keep: the
*anchor*, which all have and keep, and the newest step that all have since. A step becomes the anchor once all holders
have said that they keep it; only then may the anchor before it be written over. One of the two is there at any moment.
It also tells them the *aim*: the next step to copy is the first that is saved from there on, so that all copy the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from transomd.tce.memory.slots import STAGED, SlotState

Step = tuple[int, int]
"""Epoch and step."""


@dataclass(frozen=True)
class Told:
    """What one node has said: the steps that it keeps, and of each rank the steps of which it has a whole copy."""

    keeps: frozenset[Step]
    copies: Mapping[int, frozenset[Step]]


def agree(anchor: Step | None, told: Iterable[Told], world_size: int) -> tuple[Step | None, Step | None]:
    """The anchor from now on, and the newest step that all ranks have a copy of beyond it (None: there is none)."""
    told = list(told)
    sure = common(
        (Told(one.keeps, {r: steps & one.keeps for r, steps in one.copies.items()}) for one in told), world_size
    )
    anchor = max([*sure, *([anchor] if anchor else [])], default=None)
    beyond = [step for step in common(told, world_size) if anchor is None or step > anchor]
    return anchor, max(beyond, default=None)


def common(told: Iterable[Told], world_size: int) -> list[Step]:
    """The steps of which every rank has a copy."""
    there: dict[Step, set[int]] = defaultdict(set)
    for one in told:
        for rank, steps in one.copies.items():
            for step in steps:
                there[step].add(rank)
    return [step for step, ranks in there.items() if ranks >= set(range(world_size))]


def aimed(newest: Step, ahead: int, every: int) -> Step:
    """The aim, at least ``ahead`` steps beyond the ``newest`` that was saved; only what ``every`` divides is copied."""
    epoch, step = newest
    return epoch, -(-(step + ahead) // every) * every


def missed(aim: Step, told: Iterable[Told], world_size: int) -> bool:
    """Whether every rank has copied something from the aim on, and not all the same."""
    told = list(told)
    late = [
        Told(one.keeps, {r: frozenset(s for s in steps if s >= aim) for r, steps in one.copies.items()}) for one in told
    ]
    there = {rank for one in late for rank, steps in one.copies.items() if steps}
    return there >= set(range(world_size)) and not common(late, world_size)


def writable(slots: Sequence[SlotState], whole: Collection[int], keeps: Collection[Step], given_up: bool) -> list[int]:
    """The slots of a copy that may be written over, what is needed least first; ``whole`` have good copies in them.

    Never the newest copy, unless another one is kept and it is ``given_up``, as not all ranks have it.
    """
    newest = max(whole, key=lambda slot: slots[slot].order, default=None)
    kept = {slot for slot in whole if (slots[slot].epoch, slots[slot].step) in keeps}
    free = [slot for slot in range(len(slots)) if slot != newest and slot not in kept]
    if not free and newest is not None and newest not in kept and given_up:
        return [newest]
    return sorted(free, key=lambda slot: (slots[slot].state == STAGED and slot in whole, slots[slot].order))
