"""The arena of one rank: a memfd that its keeper and the program both map, with a head page, slots, and nothing else.

::

    page 0            magic, number and size of the slots
    page 1 + i        the state of slot i (written by the program alone)
    page 1 + slots    what the keeper says of each slot: how many use it, the save that needs it no more; at the end,
                      up to where all pages are there, and the error number of what kept others from coming
    data              the slots

No lock is shared (each process has its own, which is a memory barrier too). The program marks a slot WRITING before it
looks whether the slot is in use; the keeper counts a use before it looks whether the slot is still STAGED. Whoever sees
the other gives way, so never do both go on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from transomd.tce.memory.pages import HUGE, Mapping
from transomd.tce.memory.slots import STAGED, SlotState, read_slot, write_slot

PAGE = 4096
_FORM = struct.Struct("<8sQQ")
_MAGIC = b"tcearena"
_SEALS = 0x0400 + 9, 0x1 | 0x2 | 0x4  # F_ADD_SEALS; no more seals, no shrinking, no growing (fcntl(2))
_CHUNK = 4 * HUGE
_LOOK_S, _PATIENCE_S, _LOST_S = 0.001, 0.1, 60.0
_LET_GO_S = 1.0
_TOUCHED = 1.5 * 2**30
"""Bytes a second of pages that come in one after the other as they are touched."""
_FILLED, _FAILED = PAGE // 8 - 1, PAGE // 8 - 2


def rounded(size: int) -> int:
    """A slot's size for a state of ``size`` bytes: it may grow a little before another arena is needed."""
    return -(-(size + size // 64 + PAGE) // PAGE) * PAGE


def whole_size(slots: int, slot_bytes: int) -> int:
    """Bytes of an arena."""
    return _start(slots) + slots * _stride(slot_bytes)


class Arena:
    """A mapped arena. ``memory`` is all of it, ``address`` where it begins in this process."""

    def __init__(self, descriptor: int) -> None:
        """Map ``descriptor``, which then belongs to the arena; ValueError if it holds something else."""
        self.descriptor = descriptor
        self._barrier = threading.Lock()
        self._closing = threading.Event()
        self._filler: threading.Thread | None = None
        size = os.fstat(descriptor).st_size
        try:
            self._map = Mapping(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self.memory, self.address = self._map.memory, self._map.address
        magic, self.slots, self.slot_bytes = _FORM.unpack(self.memory[: _FORM.size])
        if magic != _MAGIC or size != whole_size(self.slots, self.slot_bytes):
            self.close()
            raise ValueError("the descriptor holds no arena of this version of transom")
        self.bytes = size
        self._uses = self.memory[(1 + self.slots) * PAGE :][:PAGE].cast("Q")

    @classmethod
    def create(cls, slots: int, slot_bytes: int, name: str) -> Arena:
        """A new arena, without a page of its data yet. Raises OSError."""
        descriptor = os.memfd_create(f"transom:{name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, whole_size(slots, slot_bytes))
            os.pwrite(descriptor, _FORM.pack(_MAGIC, slots, slot_bytes), 0)
            fcntl.fcntl(descriptor, *_SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def fill(self) -> None:
        """The keeper's side: bring every page into memory, in a thread, slot after slot, changing nothing."""
        self._uses[_FAILED] = 0
        if self._uses[_FILLED] < self.bytes:
            self._in_thread(self._fill)

    def follow(self) -> None:
        """The program's side: bring into this process, in a thread, what the keeper brings into memory."""
        self._in_thread(self._follow)

    @property
    def filling(self) -> bool:
        """Whether ``fill`` or ``follow`` is still at work."""
        return self._filler is not None and self._filler.is_alive()

    def await_pages(self, slot: int) -> None:
        """The program's side: wait for the pages of a slot, while the keeper is faster at them than copying is.

        OSError if there is no memory for them: who touches a page that cannot be had is killed.
        """
        began = since = time.monotonic()
        before = there = self._uses[_FILLED]
        while there < self.offset(slot) + self.slot_bytes:
            if self._uses[_FAILED]:
                raise OSError(self._uses[_FAILED], os.strerror(self._uses[_FAILED]), "the memory of checkpoints")
            now = time.monotonic()
            if now - since > _PATIENCE_S or there - before < (now - began - _PATIENCE_S) * _TOUCHED:
                return
            time.sleep(_LOOK_S)
            there, was = self._uses[_FILLED], there
            since = now if there != was else since

    def _in_thread(self, work: Callable[[int, int], bool]) -> None:
        self._filler = threading.Thread(target=self._by_chunk, args=(work,), daemon=True)
        self._filler.start()

    def _by_chunk(self, work: Callable[[int, int], bool]) -> None:
        for at in range(_start(self.slots), self.bytes, _CHUNK):
            if self._closing.is_set() or not work(at, min(_CHUNK, self.bytes - at)):
                return

    def _fill(self, at: int, length: int) -> bool:
        if not self._map.bring_in(at, length):
            try:
                os.posix_fallocate(self.descriptor, at, length)
            except OSError as error:
                self._uses[_FAILED] = error.errno or errno.ENOMEM
                return False
        self._uses[_FILLED] = max(at + length, self._uses[_FILLED])
        return True

    def _follow(self, at: int, length: int) -> bool:
        seen, since = -1, time.monotonic()
        while self._uses[_FILLED] < at + length:
            if seen != self._uses[_FILLED]:
                seen, since = self._uses[_FILLED], time.monotonic()
            if time.monotonic() - since > _LOST_S or self._closing.wait(20 * _LOOK_S):
                return False
        return self._map.map_in(at, length)

    def offset(self, slot: int) -> int:
        """Where the data of a slot begin."""
        return _start(self.slots) + slot * _stride(self.slot_bytes)

    def image(self, slot: int) -> memoryview:
        """The data of a slot."""
        return self.memory[self.offset(slot) :][: self.slot_bytes]

    def state(self, slot: int) -> SlotState:
        """What stands in a slot."""
        return read_slot(self.memory, (1 + slot) * PAGE)

    def states(self) -> list[SlotState]:
        """What stands in each slot."""
        return [self.state(slot) for slot in range(self.slots)]

    def set_state(self, slot: int, state: SlotState) -> None:
        """The program's side: put another state in force."""
        with self._barrier:
            write_slot(self.memory, (1 + slot) * PAGE, state)

    def table(self, slot: int, state: SlotState) -> bytes:
        """The table of what was staged in a slot as ``state`` says; ValueError if it does not match its digest.

        What the slot says now is not asked: it is WRITING for a moment also where the program then gives way.
        """
        content = bytes(self.image(slot)[state.table_offset :][: state.table_bytes])
        if state.state != STAGED or xxh3_64_intdigest(content) != state.table_digest:
            raise ValueError(f"the table of step {state.step} in memory is damaged")
        return content

    def used(self, slot: int) -> bool:
        """Whether the keeper, or somebody through it, reads the slot."""
        with self._barrier:
            return self._uses[2 * slot] > 0

    def settled(self, slot: int) -> int:
        """The newest save in this slot that the keeper needs no more."""
        return self._uses[2 * slot + 1]

    def settle(self, slot: int, seq: int) -> None:
        """The keeper's side: this save needs no more to be done."""
        self._uses[2 * slot + 1] = max(seq, self._uses[2 * slot + 1])

    def acquire(self, slot: int, seq: int) -> bool:
        """The keeper's side: keep the slot from being written to; False if another save is in it."""
        with self._barrier:
            self._uses[2 * slot] += 1
        with self._barrier:
            state = self.state(slot)
            if state.state == STAGED and state.seq == seq:
                return True
            self._uses[2 * slot] -= 1
        return False

    def release(self, slot: int) -> None:
        """The keeper's side: one use less."""
        with self._barrier:
            if self.descriptor >= 0:
                self._uses[2 * slot] -= 1

    def forget_uses(self) -> None:
        """The keeper's side: nobody uses anything, as an earlier keeper is gone."""
        for slot in range(self.slots):
            self._uses[2 * slot] = self._uses[2 * slot + 1] = 0

    def close(self) -> None:
        """Unmap, if nobody still has a view, and close the descriptor."""
        if self.filling and self._filler is not None:
            self._closing.set()
            self._filler.join()
        with contextlib.suppress(AttributeError):
            del self._uses
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def staged(arenas: list[Arena]) -> Iterator[tuple[Arena, int, SlotState]]:
    """Every staged slot, newest first."""
    found = [(arena, slot, state) for arena in arenas for slot, state in enumerate(arena.states())]
    whole = [entry for entry in found if entry[2].state == STAGED]
    return iter(sorted(whole, key=lambda entry: entry[2].order, reverse=True))


def mapped(descriptors: list[int]) -> list[Arena]:
    """Map all, or none: OSError or ValueError, and every descriptor is closed."""
    arenas: list[Arena] = []
    try:
        for descriptor in descriptors:
            arenas.append(Arena(descriptor))
    except (OSError, ValueError):
        for arena in arenas:
            arena.close()
        for descriptor in descriptors[len(arenas) + 1 :]:
            os.close(descriptor)
        raise
    return arenas


def close_aside(arenas: Sequence[Arena], users: Sequence[threading.Thread] = ()) -> None:
    """Close them in a thread, once their ``users`` have ended, or each had a second to do so: nobody need wait for it.

    A user may hang in the store, and unmapping takes half as long as copying did.
    """
    threading.Thread(target=_close, args=(arenas, users), daemon=True).start()


def _close(arenas: Sequence[Arena], users: Sequence[threading.Thread]) -> None:
    for user in users:
        user.join(_LET_GO_S)
    for arena in arenas:
        arena.close()


def _start(slots: int) -> int:
    return -(-(2 + slots) * PAGE // HUGE) * HUGE if slots else PAGE


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // PAGE) * PAGE
