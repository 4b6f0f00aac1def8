"""The memory tier under DCP: one for each rank of a directory, whichever writer saves, as the engine has one."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from transomd.tce.dcp import commit
from transomd.tce.dcp.commit import Share
from transomd.tce.dcp.facts import FILE, KEYS
from transomd.tce.handle import SaveHandle
from transomd.tce.layout import Layout
from transomd.tce.memory.copy import fill, lay_out
from transomd.tce.memory.table import ALIGN
from transomd.tce.memory.tier import MemoryTier, Opened, Policy
from transomd.tce.payload import Payload, plan
from transomd.tce.persist import Writer
from transomd.tce.store import Store

AT_EXIT_S = 60.0
"""How long a program that ends waits for storage; its keeper goes on after that."""
_FACTS_BYTES = 1 << 16
_FACTS_BYTES_EACH = 512
_tiers: dict[tuple[Path, int], tuple[Share, MemoryTier]] = {}


@dataclass(frozen=True)
class Terms:
    """What a writer asks of the tier: see TransomStorageWriter; ``token`` tells a claim of its epoch from others'."""

    directory: Path
    keep: int
    every: int
    policy: Policy
    token: str


def tier_of(share: Share, terms: Terms) -> MemoryTier:
    """The tier of this rank of this start of the program."""
    key = terms.directory, share.rank
    known = _tiers.get(key)
    if known is not None:
        if (known[0].epoch, known[0].world_size) == (share.epoch, share.world_size):
            return known[1]
        known[1].close(AT_EXIT_S, leave=False)
    writer = Writer(terms.directory, share.rank, share.world_size, share.epoch)
    tier = MemoryTier(Store(writer, terms.token, terms.keep, terms.every), terms.policy, None)
    _tiers[key] = share, tier
    return tier


def close(directory: Path, timeout: float, leave: bool) -> None:
    """Wait until what is staged of this directory is on the disk, and let go of its memory."""
    for key in [key for key in _tiers if key[0] == directory]:
        _tiers.pop(key)[1].close(timeout, leave)


class Staging:
    """This rank's share of a step, in a slot of memory and not yet in force."""

    def __init__(self, tier: MemoryTier, share: Share, tensors: dict[str, torch.Tensor]) -> None:
        """Copy ``tensors``, by their names in the file. Raises OSError, MemoryError or NoRoom."""
        self.share = share
        self._tier = tier
        header = plan(share.name, (), Layout({}, values=tensors))
        self._payloads = [replace(header, rest=b"")]
        self.records = header.records
        self._opened = self._copy(_FACTS_BYTES + _FACTS_BYTES_EACH * len(tensors) * share.world_size)

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
            tier.publish(self._opened, step, self._table, handle)
        except OSError:
            self._opened = self._copy(0)
            tier.publish(self._opened, step, self._table, handle)
        for folder in commit.RESUMED:
            tier.spare(folder)
        return handle

    def drop(self) -> None:
        """Let go of the slot: it will not be published."""
        self._tier.drop(self._opened)

    def _add(self, facts: bytes) -> None:
        payload = Payload(FILE, (), Layout(dict.fromkeys(KEYS)), b"", (), facts)
        self._payloads.append(payload)
        table = lay_out([(payload, True)], 0, 1, ())
        at = -(-self._table.end // ALIGN) * ALIGN
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
