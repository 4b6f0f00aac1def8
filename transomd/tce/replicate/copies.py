"""What a keeper holds for ranks of other nodes: two slots for each, one whole and one to receive into.

A copy is published only when every byte of it matches the digests that its owner took. Until then, and whoever dies or
is cut off meanwhile, the copy before it stands; what was received counts when the same step is offered again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from transomd.tce.image import digest_file
from transomd.tce.memory.arena import Arena, rounded, staged, whole_size
from transomd.tce.memory.digests import Entry
from transomd.tce.memory.slots import WRITING, SlotState
from transomd.tce.memory.table import Table, decode, encode, images
from transomd.tce.replicate.agreement import Step, writable
from transomd.tce.replicate.offer import Digests, Key, Offer, areas_of, told
from transomd.tce.replicate.peer import CHUNK, LOOK_S

log = logging.getLogger("transom.tce.keeper")
SLOTS = 2
AGREE_S = 10.0
"""How long a copy stays for all ranks to have one of the same step, where an older one is kept that all have."""


class Refused(Exception):
    """A copy is not taken; the text says why."""


class NotYet(Refused):
    """It is taken later, when what is here is needed no more."""


@dataclass
class Incoming:
    """A slot that is being received into; ``missing``: the numbers of the chunks that are not there yet."""

    offer: Offer
    table: Table
    arena: Arena
    slot: int
    missing: set[int]

    def memory(self, number: int) -> memoryview:
        """Where a chunk goes; ValueError if none of this number was asked for."""
        if number not in self.missing:
            raise ValueError(f"chunk {number} was not asked for")
        return piece(self.arena, self.slot, number, self.offer.state.table_offset)


def piece(arena: Arena, slot: int, number: int, end: int) -> memoryview:
    """The bytes of a chunk, in a slot whose files end at ``end``."""
    return arena.image(slot)[number * CHUNK : min(number * CHUNK + CHUNK, end)]


class Copy:
    """The copies of what one rank staged on another node. Looks like a tenant to whoever loads."""

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.arenas: list[Arena] = []
        self.busy = threading.Lock()
        self.awaited = threading.Event()
        self.keeps: frozenset[Step] = frozenset()
        self.aim: Step | None = None
        self._published_at = 0.0
        self._incoming: Incoming | None = None
        self._digests: dict[tuple[int, int, SlotState], Digests] = {}
        self._bad: set[tuple[int, SlotState]] = set()

    def claim(self) -> None:
        """Take ``busy`` for a rank that waits to load: what is being received unasked gives way (``awaited``)."""
        self.awaited.set()
        while not self.busy.acquire(timeout=LOOK_S):
            # Who had it may have been another one that waited.
            self.awaited.set()
        self.awaited.clear()

    def staged(self) -> list[Entry]:
        """Every good copy, newest first."""
        return [entry for entry in staged(list(self.arenas)) if (id(entry[0]), entry[2]) not in self._bad]

    def table(self, entry: Entry) -> Table:
        """What a copy says of itself; ValueError if it is damaged."""
        return decode(entry[0].table(entry[1], entry[2]))

    def digests(self, entry: Entry) -> Digests:
        """Its digests, which its bytes matched when it was published."""
        return self._digests.get((id(entry[0]), entry[1], entry[2]), {})

    def quarantine(self, entry: Entry) -> None:
        """This copy is damaged: it is neither loaded nor handed on any more."""
        arena, _, state = entry
        self._bad.add((id(arena), state))
        log.warning("the copy of step %d of rank %d was damaged in memory", state.step, self.rank)

    def has(self, offer: Offer) -> bool:
        """Whether this very step is here, in good order."""
        return any(
            (entry[2].epoch, entry[2].step, entry[2].seq) == (offer.state.epoch, offer.state.step, offer.state.seq)
            and told(self.digests(entry)).items() <= offer.digests.items()
            for entry in self.staged()
        )

    def begin(
        self, offer: Offer, without: Iterable[str], make: Callable[[int], Arena], anyhow: bool = False
    ) -> Incoming:
        """Get ready to receive; goes on with what was received of the same offer. Raises Refused or ValueError.

        ``anyhow``: also what is older than a copy that is here.
        """
        table = offer.checked_table()
        table = replace(table, places=tuple(place for place in table.places if place.name not in set(without)))
        before = self._incoming
        if before is not None and before.offer == offer and before.table == table:
            return before
        newest = next(iter(self.staged()), None)
        if newest is not None and newest[2].order >= offer.state.order and not anyhow:
            raise Refused(f"step {newest[2].step} of epoch {newest[2].epoch} is here, which is newer")
        self._incoming = None
        arena, slot = self._room(offer, make)
        missing = {
            number
            for place in table.places
            for at, size in areas_of(place)
            if size
            for number in range(at // CHUNK, (at + size - 1) // CHUNK + 1)
        }
        self._incoming = Incoming(offer, table, arena, slot, missing)
        return self._incoming

    def _room(self, offer: Offer, make: Callable[[int], Arena]) -> tuple[Arena, int]:
        """A large enough slot, marked WRITING, that may be written over (``writable``) and that nobody reads."""
        size = offer.state.table_offset + offer.state.table_bytes
        if not self.arenas or self.arenas[-1].slot_bytes < size:
            self.arenas = [*self.arenas, make(rounded(size))]
        arena = self.arenas[-1]
        whole = {entry[1] for entry in self.staged() if entry[0] is arena}
        free = writable(arena.states(), whole, self.keeps, self._given_up())
        if not free:
            raise NotYet("the copies that are here are kept until all ranks have a newer one")
        for slot in free:
            before = arena.state(slot)
            arena.set_state(slot, SlotState(WRITING, before.seq, offer.state.step, offer.state.epoch))
            if not arena.used(slot):
                return arena, slot
            arena.set_state(slot, before)
        raise Refused("the older copy is being read")

    def _given_up(self) -> bool:
        """Whether the newest copy is not to be waited for any more: others have another step, or take too long."""
        newest = next(iter(self.staged()), None)
        passed = self.aim is not None and newest is not None and (newest[2].epoch, newest[2].step) < self.aim
        return passed or time.monotonic() - self._published_at > AGREE_S

    def finish(self) -> list[str]:
        """Publish what was received, if all of it matches; else the parts that do not, which are then missing again."""
        got = self._incoming
        assert got is not None
        assert not got.missing
        parts = images(got.arena, got.slot, got.table)
        taken = {part.name: tuple(digest_file(file) for file in part.files) for part in parts}
        wrong = [name for name, digests in told(taken).items() if digests != got.offer.digests.get(name)]
        self._incoming = None
        if wrong:
            return wrong
        content, state = encode(got.table), got.offer.state
        image = got.arena.image(got.slot)
        image[state.table_offset : state.table_offset + len(content)] = content
        state = replace(state, table_bytes=len(content), table_digest=xxh3_64_intdigest(content))
        held = {(id(arena), slot, s) for arena in self.arenas for slot, s in enumerate(arena.states())}
        self._digests = {key: value for key, value in self._digests.items() if key in held}
        self._digests[id(got.arena), got.slot, state] = taken
        got.arena.set_state(got.slot, state)
        self._published_at = time.monotonic()
        self._drop_outgrown()
        return []

    def _drop_outgrown(self) -> None:
        kept = {id(entry[0]) for entry in self.staged() if (entry[2].epoch, entry[2].step) in self.keeps}
        for arena in self.arenas[:-1]:
            if id(arena) not in kept and not any(arena.used(slot) for slot in range(arena.slots)):
                self.arenas = [other for other in self.arenas if other is not arena]

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(arena.bytes for arena in list(self.arenas))

    def used(self) -> bool:
        """Whether somebody reads or writes."""
        return self.busy.locked() or any(a.used(slot) for a in list(self.arenas) for slot in range(a.slots))


class Copies:
    """All copies of a node. ``refusal`` says why so many more bytes cannot be had, '' if they can."""

    def __init__(self, refusal: Callable[[int], str]) -> None:
        self._refusal = refusal
        self.keeps: frozenset[Step] = frozenset()
        self.aim: Step | None = None
        self._all: dict[Key, Copy] = {}
        self._lock = threading.Lock()

    def of(self, key: Key) -> Copy:
        """The copies of a rank, made if need be."""
        with self._lock:
            copy = self._all.setdefault(key, Copy(*key))
            copy.keeps, copy.aim = self.keeps, self.aim
            return copy

    def keep(self, steps: frozenset[Step], aim: Step | None) -> None:
        """Write over no copy of these steps until told otherwise; others from before ``aim`` may go."""
        with self._lock:
            self.keeps, self.aim = steps, aim
            for copy in self._all.values():
                copy.keeps, copy.aim = steps, aim

    def all(self, directory: str | None = None) -> list[Copy]:
        """Those of one directory, or of all."""
        return [copy for copy in list(self._all.values()) if directory in (None, copy.directory)]

    @property
    def bytes(self) -> int:
        """Memory taken by all."""
        return sum(copy.bytes for copy in self.all())

    @property
    def unfilled(self) -> int:
        """What of it does not show in the kernel's numbers yet; at most so much."""
        return sum(arena.bytes for copy in self.all() for arena in list(copy.arenas) if arena.filling)

    def make(self, slot_bytes: int, offer: Offer) -> Arena:
        """Memory for copies. What is of earlier epochs makes room if it must. Raises Refused with the numbers."""
        with self._lock:
            size = whole_size(SLOTS, slot_bytes)
            refusal = self._refusal(size)
            if refusal and self._drop_before(offer.state.epoch, offer.directory):
                refusal = self._refusal(size)
            if refusal:
                raise Refused(refusal)
            try:
                arena = Arena.create(SLOTS, slot_bytes, f"copy-{offer.rank}")
            except OSError as error:
                raise Refused(f"no memory: {error}") from error
            # Another thread may be about to read a copy that is dropped: the memory goes when nobody knows it any more.
            weakref.finalize(arena, os.close, arena.descriptor)
            arena.fill()
            return arena

    def tidy(self, offer: Offer) -> None:
        """After two steps of one epoch have come, and all ranks have one, earlier epochs are needed no more."""
        if any(epoch < offer.state.epoch for epoch, _ in self.keeps):
            return
        states = [entry[2] for entry in self.of(offer.key).staged()]
        if len(states) == SLOTS and all(state.epoch == offer.state.epoch for state in states):
            with self._lock:
                self._drop_before(offer.state.epoch, offer.directory)

    def _drop_before(self, epoch: int, directory: str) -> bool:
        gone = [
            copy
            for copy in self.all(directory)
            if copy.arenas and not copy.used() and all(s.epoch < epoch for a in copy.arenas for s in a.states())
        ]
        for copy in gone:
            self._all.pop((copy.directory, copy.rank), None)
        return bool(gone)
