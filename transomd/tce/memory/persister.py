"""Brings what one rank has staged to storage, in a thread of its own: a store that hangs holds up nothing else.

There is no lock. ``orders`` is set by the keeper's control thread, everything else by the persister's own, which alone
settles slots; only ``give_up`` is anybody's. What one thread reads of another's is replaced as a whole, never changed
in place. What is written shows as ``unfinished`` before it stops to show as ``busy``: whoever asks in that order misses
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transomd.tce.errors import CheckpointError, FencedError
from transomd.tce.handle import SaveHandle
from transomd.tce.image import PartImage
from transomd.tce.memory.digests import Digester, Entry
from transomd.tce.memory.due import Orders, Progress, Retry, due, following, wanted
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Table, decode, images
from transomd.tce.memory.trouble import Watch
from transomd.tce.persist import Writer
from transomd.tce.rate import Cap
from transomd.tce.store import Store

log = logging.getLogger("transom.tce.keeper")
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 1.0
GIVE_UP_S = 600.0
"""How long writing is tried again after the program has ended."""


class Reached(NamedTuple):
    """The newest step that has reached a stage, and when it did (Unix seconds)."""

    step: int
    epoch: int
    at: float


class Unfinished(NamedTuple):
    """A step that this rank has written and that is not known to be complete; when its write began (monotonic)."""

    epoch: int
    seq: int
    handle: SaveHandle
    begun: float


class Persister:
    """Writes what is ``staged`` (every good slot, newest first) as ``orders`` say, and completes it with other ranks'.

    ``tell`` passes a message on to the rank's program. ``cap`` bounds what is written while that is there. ``watch``
    knows what is being written, and what is wrong.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        staged: Callable[[], list[Entry]],
        digester: Digester,
        tell: Callable[[dict[str, Any]], None],
        cap: Cap,
    ) -> None:
        self.orders = Orders(gone_at=time.monotonic())
        self.watch = Watch(cap)
        self.stored: Reached | None = None
        self.skipped = 0
        """How many steps storage did not get because it got a newer one first."""
        self.fenced_at = 0.0
        """When a newer start last kept something from storage, by the monotonic clock (0: never)."""
        self.moved_at = 0.0
        """When something last came further, by the monotonic clock."""
        self._directory = directory
        self._rank = rank
        self._staged = staged
        self._digester = digester
        self._tell = tell
        self._cap = cap
        self._given_up: deque[Entry] = deque()
        self._progress = Progress()
        self._stores: dict[tuple[int, int], Store] = {}
        self._unfinished: dict[int, Unfinished] = {}
        self._retry = Retry()
        self._look_s = FIRST_LOOK_S
        self._bell, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- what other threads ask -----------------------------------------------------------------------------------

    def ring(self) -> None:
        """Something was staged, or the orders are new."""
        self._bell.set()

    @property
    def busy(self) -> bool:
        """Whether there is something to write, or that is being written."""
        return self._bell.is_set() or self.watch.writing is not None or bool(self._waiting())

    @property
    def unfinished(self) -> bool:
        """Whether something that this rank has written is not known to be complete."""
        return bool(self._unfinished)

    def give_up(self, entry: Entry) -> None:
        """This slot, which is not ``staged`` any more as it is damaged, will not be written."""
        self._given_up.append(entry)
        self.watch.complain(_damaged(entry[2]))
        self.ring()

    def end(self) -> threading.Thread:
        """Let the thread end, which is returned: it may hang in the store."""
        self._end.set()
        self._bell.set()
        return self._thread

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._bell.wait(self._wait_s())
                self._bell.clear()
                if not self._end.is_set():
                    self._work()
            except Exception as error:  # the thread must live; what is wrong stands in status
                log.exception("rank %d of %s", self._rank, self._directory)
                self.watch.complain(f"{type(error).__name__}: {error}")
                self._retry = self._retry.later(time.monotonic())
                self._end.wait(LAST_LOOK_S)  # whatever it was, it is not tried in a circle

    def _wait_s(self) -> float | None:
        waits = []
        if self._waiting():
            waits.append(max(0.0, self._retry.at - time.monotonic()))
        if self._unfinished:
            waits.append(self._look_s)
        return min(waits, default=None)

    def _work(self) -> None:
        while self._given_up:
            entry = self._given_up.popleft()
            if entry[0].settled(entry[1]) < entry[2].seq:
                self._failed(entry, CheckpointError(_damaged(entry[2])))
        with self.watch.look():
            self._store_next()
            self._settle()

    def _store_next(self) -> None:
        owner = self.orders.owner
        if owner is not None:
            self._store(owner.epoch, owner.world_size)
        entry = self._next() if time.monotonic() >= self._retry.at else None
        if entry is not None:
            arena, slot, state = entry
            if arena.acquire(slot, state.seq):
                try:
                    with self.watch.write(state.step) as writing:
                        self._write(entry, writing.begun)
                finally:
                    arena.release(slot)

    def _waiting(self) -> list[Entry]:
        """What is to be written, newest first."""
        orders, progress = self.orders, self._progress
        open_ = (entry for entry in self._staged() if entry[0].settled(entry[1]) < entry[2].seq)
        return [entry for entry in open_ if wanted(entry[2], orders, progress)]

    def _next(self) -> Entry | None:
        with contextlib.suppress(OSError):
            self._look_at_others()
        waiting = self._waiting()
        chosen = following([state for _, _, state in waiting], self.orders, self._progress)
        return next((entry for entry in waiting if entry[2] is chosen), None)

    def _look_at_others(self) -> None:
        """Note which of the staged steps another rank has begun to write."""
        found = set()
        for _, _, state in self._staged():
            at = state.epoch, state.step
            writers = [store.writer for (epoch, ranks), store in self._stores.items() if epoch == at[0] and ranks > 1]
            if writers and writers[0].folder(state.step).is_dir():
                found.add(at)
        self._progress = replace(self._progress, begun=frozenset(found))

    def _store(self, epoch: int, world_size: int) -> Store:
        """The store of an epoch, as whoever has taken over wants it.

        A start that loads on other ranks than saved has steps of both numbers of ranks.
        """
        orders, store = self.orders, self._stores.get((epoch, world_size))
        if store is None:
            keep = orders.owner.keep if orders.owner is not None else 1
            store = Store(Writer(self._directory, self._rank, world_size, epoch), "", keep)
            self._stores[epoch, world_size] = store
        if orders.owner is not None and orders.owner.epoch == epoch:
            store.owned(orders.owner.token, orders.owner.keep)
        return store

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write(self, entry: Entry, begun: float) -> None:
        arena, slot, state = entry
        try:
            table = decode(arena.table(slot, state))
        except ValueError as error:
            self._failed(entry, CheckpointError(str(error)))
            return
        store = self._store(state.epoch, table.world_size)
        stored = self._parts(entry, table)
        try:
            store.put(state.step, stored, table.needs)
        except CheckpointError as error:
            self._note_fenced(error, state.epoch)
            self._failed(entry, error)
        except (OSError, MemoryError) as error:
            self._try_again(entry, store, store.told(state.step, error, sum(part.bytes for part in stored)))
        else:
            self._written(entry, store, begun)

    def _parts(self, entry: Entry, table: Table) -> list[PartImage]:
        """What storage gets of a slot, its bytes no faster than they may; when the program has ended, time is short."""
        parts = self._digester.with_digests(entry, images(entry[0], entry[1], table))
        slowly = (self._cap.through(part, lambda: self.orders.gone_at is not None) for part in parts)
        return [part for part, place in zip(slowly, table.places, strict=True) if place.stored]

    def _written(self, entry: Entry, store: Store, begun: float) -> None:
        arena, slot, state = entry
        arena.settle(slot, state.seq)
        self._progress = replace(self._progress, written=max(state.seq, self._progress.written))
        self._retry = Retry()
        self.watch.wrote()
        self._moved()
        step = state.step
        handle = SaveHandle(step, lambda: store.completion.progress(step))
        self._unfinished[step] = Unfinished(state.epoch, state.seq, handle, begun)
        self._tell({"t": "written", "step": step, "epoch": state.epoch, "seq": state.seq})
        store.completion.resume_source = self.orders.resume_source
        store.completion.add(handle)

    def _try_again(self, entry: Entry, store: Store, error: CheckpointError) -> None:
        state, gone_at = entry[2], self.orders.gone_at
        if gone_at is not None and time.monotonic() - gone_at > GIVE_UP_S:
            store.writer.fail(state.step, str(error))
            self._failed(entry, error)
            return
        store.writer.take_back(state.step)
        self.watch.complain(str(error))
        log.warning("%s; trying again in %.1f s", error, self._retry.pause_s)
        self._tell({"t": "problem", "step": state.step, "epoch": state.epoch, "error": str(error), "hint": error.hint})
        self._retry = self._retry.later(time.monotonic())

    def _note_fenced(self, error: CheckpointError, epoch: int) -> None:
        """A newer start has begun, before the write of a step or between it and its completion."""
        if isinstance(error, FencedError):
            self.watch.complain(str(error))
            owner = self.orders.owner
            if owner is None or owner.epoch <= epoch:  # else that start has come, and has loaded what it wanted
                self.fenced_at = time.monotonic()

    def _failed(self, entry: Entry, error: CheckpointError) -> None:
        arena, slot, state = entry
        arena.settle(slot, state.seq)
        self.watch.complain(str(error))
        log.warning("%s", error)
        self._tell_failed(state.step, state.epoch, state.seq, error)

    def _tell_failed(self, step: int, epoch: int, seq: int, error: CheckpointError) -> None:
        at = {"step": step, "epoch": epoch, "seq": seq}
        self._tell({"t": "failed", **at, "error": str(error), "hint": error.hint})

    # --- completion -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Complete what can be completed, and say so."""
        for store in self._stores.values():
            store.completion.resume_source = self.orders.resume_source  # it may have been told of since the write began
            store.completion.settle()
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        for step, written in list(self._unfinished.items()):
            error = written.handle.error
            if written.handle.reached:
                self._complete(step, written)
            elif error is not None:
                self._note_fenced(error, written.epoch)
                del self._unfinished[step]
                self._tell_failed(step, written.epoch, written.seq, error)

    def _complete(self, step: int, written: Unfinished) -> None:
        epoch = written.epoch
        del self._unfinished[step]
        self.stored = Reached(step, epoch, time.time())
        self._moved()
        self._tell({"t": "complete", "step": step, "epoch": epoch, "took": time.monotonic() - written.begun})
        for arena, slot, state in self._staged():
            if (state.epoch, state.step) < (epoch, step) and arena.settled(slot) < state.seq:
                arena.settle(slot, state.seq)
                self._overtaken(state, step, epoch)

    def _overtaken(self, state: SlotState, step: int, epoch: int) -> None:
        """What is staged of ``state`` will not be stored, as ``step`` of ``epoch`` is."""
        if state.epoch < epoch:
            told = f"step {state.step} of epoch {state.epoch} is fenced: epoch {epoch} has stored step {step} since"
            self._tell_failed(state.step, state.epoch, state.seq, CheckpointError(told))
        elif due(state, self.orders):
            self.skipped += 1
            at = {"step": state.step, "epoch": state.epoch, "seq": state.seq}
            self._tell({"t": "skipped", **at, "by": step, "count": self.skipped})

    def _moved(self) -> None:
        self._look_s, self.moved_at = FIRST_LOOK_S, time.monotonic()


def _damaged(state: SlotState) -> str:
    return f"step {state.step} of epoch {state.epoch} was damaged in memory"
