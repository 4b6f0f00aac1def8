"""The memory tier under DCP: one for each rank of a directory, whichever writer saves, as the engine has one."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transomd.tce.dcp import commit
from transomd.tce.dcp.commit import Share
from transomd.tce.dcp.facts import FILE, KEYS
from transomd.tce.dcp.stager import Staged, Stager
from transomd.tce.dcp.staging import VALUE
from transomd.tce.handle import SaveHandle
from transomd.tce.layout import Layout
from transomd.tce.memory.copy import fill, lay_out
from transomd.tce.memory.pool import Opened, Policy
from transomd.tce.memory.table import Table, aligned
from transomd.tce.memory.tier import MemoryTier
from transomd.tce.payload import Payload, bytes_of, plan
from transomd.tce.persist import Writer
from transomd.tce.schedule import Every
from transomd.tce.store import Store

AT_EXIT_S = 60.0
"""How long a program that ends waits for storage; its keeper goes on after that."""
_FACTS_BYTES = 1 << 16
_FACTS_BYTES_EACH = 512
_tiers: dict[tuple[Path, int], Tier] = {}


@dataclass(frozen=True)
class Terms:
    """What a writer asks of the tier: see TransomStorageWriter; ``token``: what it claims its epoch with."""

    directory: Path
    keep: int
    every: Every
    policy: Policy
    token: str


class Tier:
    """The memory tier of a rank and what stages into it; ``room``: bytes for what the last save had beside tensors."""

    def __init__(self, directory: Path, share: Share, memory: MemoryTier) -> None:
        self.directory = directory
        self.share = share
        self.memory = memory
        self.stager = Stager(memory)
        self.room = 0


def known(directory: Path) -> Tier | None:
    """The tier of this process, if it has saved into this directory."""
    return next((tier for (place, _), tier in _tiers.items() if place == directory), None)


def tier_of(share: Share, terms: Terms) -> Tier:
    """The tier of this rank of this start of the program, which knows what must stay of what was loaded."""
    tier = _tier_of(share, terms)
    for folder, lacking in commit.loaded(terms.directory):
        tier.memory.resumed(folder, lacking)
    return tier


def _tier_of(share: Share, terms: Terms) -> Tier:
    key = terms.directory, share.rank
    before = _tiers.get(key)
    if before is not None:
        if (before.share.epoch, before.share.world_size) == (share.epoch, share.world_size):
            return before
        before.memory.close(AT_EXIT_S, leave=False)
    writer = Writer(terms.directory, share.rank, share.world_size, share.epoch)
    # Not this process's token: the claim is that of the coordinator.
    memory = MemoryTier(Store(writer, share.token, terms.keep, terms.every), terms.policy, None)
    _tiers[key] = Tier(terms.directory, share, memory)
    return _tiers[key]


def close(directory: Path, timeout: float, leave: bool) -> None:
    """Wait until what is staged of this directory is on the disk, and let go of its memory."""
    for key in [key for key in _tiers if key[0] == directory]:
        _tiers.pop(key).memory.close(timeout, leave)


class Staging:
    """This rank's share of a step, in a slot of memory and not yet in force."""

    def __init__(
        self, tier: Tier, share: Share, tensors: dict[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> None:
        """Put ``tensors``, by their names in the file, into a slot, where a stager has not; ``values`` are the last.

        Raises OSError, MemoryError or NoRoom.
        """
        self.share = share
        self._tier = tier.memory
        planned = plan(share.name, (), Layout({}, values=tensors))
        self.records = tuple(replace(r, note=VALUE) if r.name in values else r for r in planned.records)
        self._payloads = [replace(planned, records=self.records, rest=b"")]
        room = _FACTS_BYTES + _FACTS_BYTES_EACH * len(tensors) * share.world_size
        tier.room = 2 * sum(value.nbytes for value in values.values()) + room
        staged = tier.stager.of(tensors)
        if staged is None or not self._adopt(staged, tensors, values):
            self._opened = self._copy(room)
        if staged is not None:
            tier.stager.wrote(staged, tensors, self.records)

    def _adopt(self, staged: Staged, tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> bool:
        """Make the share of what lies in the staged slot already; False if that is not as the file has it."""
        payload = self._payloads[0]
        head, at = len(payload.header), staged.start - len(payload.header)
        size = payload.tensor_bytes
        lies = [r for r in self.records if r.bytes and r.name not in values]
        right = all(
            staged.path(tensors[r.name]) is not None and staged.offset(tensors[r.name]) == r.offset - head for r in lies
        )
        if not right or at < 0 or not staged.opened.fits(at + size + _FACTS_BYTES, self._lay_out(at)):
            return False
        image = staged.opened.arena.image(staged.opened.slot)
        for record in (r for r in self.records if r.name in values):
            image[at + record.offset :][: record.bytes] = bytes_of(values[record.name])
        image[at : at + head] = payload.header
        self._table, self._opened = self._lay_out(at), staged.opened
        return True

    def _lay_out(self, at: int) -> Table:
        share = self.share
        table = lay_out([(self._payloads[0], True)], share.rank, share.world_size, (share.name,))
        place = table.places[0]
        return replace(table, places=(replace(place, tensors_at=at, rest_at=at + place.tensors_bytes),))

    def _copy(self, room: int) -> Opened:
        """Copy the payloads into a slot with ``room`` for what is to come."""
        share = self.share
        payloads: Sequence[tuple[Payload, bool]] = [(payload, True) for payload in self._payloads]
        self._table = lay_out(payloads, share.rank, share.world_size, (share.name,))
        opened = self._tier.open(share.step, self._table, room)
        try:
            fill(opened.arena, opened.slot, self._table, payloads)
        except BaseException:
            self._tier.drop(opened)
            raise
        return opened

    def publish(self, facts: bytes = b"") -> SaveHandle:
        """Put it in force, on the coordinator with the facts. Raises OSError, MemoryError or NoRoom."""
        if facts:
            self._add(facts)
        tier, step = self._tier, self.share.step
        handle = SaveHandle(step, lambda: tier.progress(step), pause=tier.pause)
        try:
            self._publish(handle)
        except OSError:
            self._opened = self._copy(0)
            self._publish(handle)
        return handle

    def _publish(self, handle: SaveHandle) -> None:
        self._tier.publish(self._opened, self.share.step, self._table, handle)

    def drop(self) -> None:
        """Let go of the slot: it will not be published."""
        self._tier.drop(self._opened)

    def _add(self, facts: bytes) -> None:
        payload = Payload(FILE, (), Layout(dict.fromkeys(KEYS)), b"", (), facts)
        self._payloads.append(payload)
        table = lay_out([(payload, True)], 0, 1, ())
        at = aligned(self._table.end)
        if not self._opened.fits(at + len(facts), self._table):
            self._tier.drop(self._opened)
            self._opened = self._copy(0)
            return
        place = replace(table.places[0], tensors_at=at, rest_at=at)
        self._opened.arena.image(self._opened.slot)[at : at + len(facts)] = facts
        self._table = replace(self._table, places=(*self._table.places, place))


def _close_all() -> None:
    """At the end of the program: what was saved is brought to storage."""
    for directory in {key[0] for key in _tiers}:
        close(directory, AT_EXIT_S, leave=False)


atexit.register(_close_all)
