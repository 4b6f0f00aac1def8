"""Which of a rank's staged steps go on, which goes to storage next, and when one that failed is tried again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transomd.tce.memory.pins import Step
from transomd.tce.memory.slots import SlotState
from transomd.tce.schedule import CHOSEN

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0


@dataclass(frozen=True)
class Owner:
    """The start of the program whose saves the arenas hold; ``every`` is for storage, as of ``schedule.every_of``."""

    world_size: int
    epoch: int
    token: str
    keep: int
    every: int = 1
    replica_every: int = 1


@dataclass(frozen=True)
class Orders:
    """What is known of the program, and what it wants stored.

    ``gone_at``: when it was gone, by the monotonic clock (None: it is there). ``chosen``: the steps for storage, where
    it chooses them itself. ``resumed_step``: what it loaded and storage lacks (-1: nothing); ``resume_source``: the
    folder from which. ``skipped``: how many steps it has counted that storage will not get; ``heard`` of the
    persister's own are among them.
    """

    owner: Owner | None = None
    gone_at: float | None = None
    chosen: frozenset[int] = frozenset()
    resumed_step: int = -1
    resume_source: Path | None = None
    skipped: int = 0
    heard: int = 0


@dataclass(frozen=True)
class Progress:
    """How far storing has come: the newest save that was written, and the staged steps that other ranks have begun."""

    written: int = 0
    begun: frozenset[Step] = frozenset()

    def joins(self, state: SlotState) -> bool:
        """Whether another rank writes this step, so that it is complete only if this rank does, too."""
        return (state.epoch, state.step) in self.begun


@dataclass(frozen=True)
class Retry:
    """When writing may be tried again (monotonic), and how long to wait after the next failure."""

    at: float = 0.0
    pause_s: float = FIRST_RETRY_S

    def later(self, now: float) -> Retry:
        """After one more failure."""
        return Retry(now + self.pause_s, min(2 * self.pause_s, LAST_RETRY_S))


def due(state: SlotState, orders: Orders) -> bool:
    """Whether storage is to get this step while the program is there."""
    owner = orders.owner
    if owner is None or state.step == orders.resumed_step:
        return True
    if owner.every == CHOSEN:
        return state.epoch == owner.epoch and state.step in orders.chosen
    return state.step % owner.every == 0


def copied(state: SlotState, orders: Orders) -> bool:
    """Whether another node is to have a copy of this step."""
    return orders.owner is None or state.step % orders.owner.replica_every == 0


def wanted(state: SlotState, orders: Orders, progress: Progress) -> bool:
    """Whether a staged step that is not dealt with is to be written.

    While the program is there: what is due, or was begun by another rank, which chose by its own measures; and nothing
    older than what was written last, unless another rank needs it.
    """
    if orders.gone_at is not None:
        return True
    begun, owner = progress.joins(state), orders.owner
    chosen = owner is not None and owner.every == CHOSEN and owner.epoch == state.epoch
    return (due(state, orders) or (chosen and begun)) and (begun or state.seq > progress.written)


def following(waiting: Sequence[SlotState], orders: Orders, progress: Progress) -> SlotState | None:
    """Of all that is ``wanted``, newest first, what to write next.

    First what another rank has begun: ranks that differ by a step would never complete any. Then the next in turn as
    long as storage keeps up, else the newest.
    """
    begun = [state for state in waiting if progress.joins(state)]
    if begun or not waiting:
        return next(iter(begun), None)
    oldest = min(waiting, key=lambda state: state.seq)
    in_turn = orders.gone_at is None and oldest.seq == progress.written + 1
    return oldest if in_turn else waiting[0]
