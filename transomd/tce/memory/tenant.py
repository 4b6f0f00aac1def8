"""What a keeper does for one rank: holds its arenas, and brings what is staged in them to storage.

All that touches the store happens in a thread of the tenant's own: a store that hangs holds up nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transomd.tce.errors import CheckpointError, FencedError
from transomd.tce.handle import SaveHandle
from transomd.tce.memory.arena import Arena, staged
from transomd.tce.memory.digests import Digester, Digests, Entry
from transomd.tce.memory.pins import Pins, Step
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Table, decode, images
from transomd.tce.persist import Writer
from transomd.tce.rate import Cap
from transomd.tce.schedule import CHOSEN
from transomd.tce.store import Store

log = logging.getLogger("transom.tce.keeper")
SLOTS = 3
"""One that is written to storage, the newest whole one, and one to copy into."""
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 1.0
PEERS_S = 10.0
"""How long a rank whose program has ended waits for others to write their share. Whoever writes last completes the
step, so this only bridges a file system that shows files late."""
GIVE_UP_S = 600.0
"""How long writing is tried again after the program has ended."""
FENCED_S = 30.0
"""How long what a newer start keeps from storage stays in memory, for that start to load it."""
STUCK_S = 5.0
"""How long one write may take before status calls the store slow."""


@dataclass(frozen=True)
class Owner:
    """The start of the program whose saves the arenas hold; ``every`` as of ``schedule.every_of``."""

    world_size: int
    epoch: int
    token: str
    keep: int
    every: int = 1


class Tenant:
    """One rank of one checkpoint directory. ``tell`` passes a message on to the rank's program.

    ``on_digests`` is called when something is ready to be copied to another node. Both are called by threads. ``cap``
    bounds what all tenants write to storage while their programs are there.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        tell: Callable[[Tenant, dict[str, Any]], None],
        on_digests: Callable[[], None],
        cap: Cap,
    ) -> None:
        self.directory = directory
        self.rank = rank
        self.arenas: list[Arena] = []
        self.resume_source: Path | None = None
        self.resumed_step = -1
        self.problem = ""
        self.problem_at = 0.0
        self.newest: dict[str, tuple[int, int, float]] = {}
        self.skipped = 0
        self.every = 0
        self._chosen: frozenset[int] = frozenset()
        self._pins = Pins()
        self._tell = tell
        self._cap = cap
        self._owner: Owner | None = None
        self._gone_at: float | None = time.monotonic()
        self._stores: dict[int, Store] = {}
        self._handles: dict[int, tuple[int, SaveHandle, float]] = {}
        self._bad: set[tuple[int, int]] = set()
        self._others: frozenset[tuple[int, int]] = frozenset()
        self._writing: tuple[int, float] | None = None
        self._last_written = 0
        self._pause = FIRST_LOOK_S
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._stay_until, self._fenced, self._visited = 0.0, False, False
        self._end = threading.Event()
        self._bell = threading.Event()
        self._moved_at = time.monotonic()
        self._digester = Digester(self._to_digest, on_digests)
        self._thread = threading.Thread(target=self._persist, daemon=True)
        self._thread.start()

    # --- the control thread's side ------------------------------------------------------------------------------

    def take_over(self, owner: Owner) -> None:
        """A program is there, and writes as ``owner``."""
        if self._owner is None or self._owner.epoch != owner.epoch:
            self.choose((), 0)
        self._owner, self._gone_at = owner, None
        self._stay_until, self._fenced, self._visited = 0.0, False, False
        self._store(owner.epoch, owner.world_size)
        self.ring()

    def choose(self, steps: Iterable[int], every: int) -> None:
        """Of what the program has saved lately, storage is to get these steps; ``every`` tells people how often."""
        self._chosen, self.every = frozenset(map(int, steps)), every

    def abandon(self) -> None:
        """The program is gone: what is only in memory goes to storage."""
        self._gone_at = time.monotonic()
        self._moved_at = time.monotonic()
        self._stay_if_fenced()
        self.ring()

    def _stay_if_fenced(self) -> None:
        if self._fenced and self._gone_at is not None and not self._visited:
            self._stay_until = time.monotonic() + FENCED_S

    def visited(self) -> None:
        """A later start has had its look at what is here, and is gone again."""
        self._visited, self._stay_until = True, 0.0

    def ring(self, skipped: int = 0) -> None:
        """Something was staged; ``skipped`` is how many steps the program has counted that storage will not get."""
        self.skipped = max(self.skipped, skipped)
        newest = next(iter(self.staged()), None)
        if newest is not None and self.newest.get("memory", (None, None))[:2] != (newest[2].step, newest[2].epoch):
            self.newest["memory"] = (newest[2].step, newest[2].epoch, time.time())
        self._moved_at = time.monotonic()
        self._bell.set()
        self._digester.ring()

    @property
    def quiet_for(self) -> float:
        """Seconds since the newest step was staged."""
        return time.time() - self.newest["memory"][2] if "memory" in self.newest else 0.0

    def staged(self) -> list[Entry]:
        """Every good staged slot, newest first."""
        return [entry for entry in staged(list(self.arenas)) if (id(entry[0]), entry[2].seq) not in self._bad]

    def quarantine(self, epoch: int, step: int) -> None:
        """What is staged of this step is damaged: it is neither loaded nor written any more."""
        for arena, slot, state in self.staged():
            if (state.epoch, state.step) == (epoch, step):
                self._bad.add((id(arena), state.seq))
                arena.settle(slot, state.seq)
                self._trouble(f"step {step} of epoch {epoch} was damaged in memory")

    @property
    def deserted(self) -> bool:
        """Whether the program is gone."""
        return self._gone_at is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be done, or can be."""
        return self.waits_only and (not self._handles or time.monotonic() - self._moved_at > PEERS_S)

    @property
    def waits_only(self) -> bool:
        """Whether this rank has written all that it has, and at most waits for others to write theirs."""
        busy = self._bell.is_set() or self._writing is not None or bool(self._pending())
        return not busy and time.monotonic() >= self._stay_until

    @property
    def world_size(self) -> int:
        """Ranks of the program (0: unknown)."""
        return self._owner.world_size if self._owner else 0

    def table(self, entry: Entry) -> Table:
        """What a slot says of itself; ValueError if it is damaged."""
        return decode(entry[0].table(entry[1]))

    def digests(self, entry: Entry) -> Digests:
        """The digests of a slot as far as they have been taken."""
        return self._digester.known(entry)

    def _to_digest(self) -> Entry | None:
        """What is newest, unless it is being written, which takes the digests by the way."""
        newest = next(iter(self.staged()), None)
        writing = self._writing
        return None if newest is None or (writing and writing[0] == newest[2].step) else newest

    def digested(self, entry: Entry) -> bool:
        """Whether the digests of a slot have been taken."""
        return self._digester.knows(entry)

    def replicated(self, step: int, epoch: int) -> None:
        """Note that another node holds a copy of this step."""
        self.newest["replica"] = (step, epoch, time.time())
        self._tell(self, {"t": "replicated", "step": step, "epoch": epoch})

    def pin(self, keeps: Collection[Step]) -> None:
        """Keep from the program's saves the steps whose copies are kept, and the one that was copied last.

        Only where there is a slot more for it, and not what a later start may make its own.
        """
        wanted: list[Step] = []
        if self._owner is not None and not self.deserted and self.arenas and self.arenas[-1].slots > SLOTS:
            step, epoch, _ = self.newest.get("replica", (-1, -1, 0.0))
            steps = [*sorted(keeps)[:1], (epoch, step), *sorted(keeps)[1:]]
            wanted = [each for each in dict.fromkeys(steps) if each[0] == self._owner.epoch]
        self._pins.update(self.arenas, wanted)

    def status(self) -> dict[str, Any]:
        """For people and for the launcher: newest step of each stage and when it got there, and what is wrong."""
        problem, since = self.problem, self.problem_at
        writing = self._writing
        if (
            writing is not None
            and not problem
            and time.monotonic() - writing[1] > STUCK_S + self._cap.seconds(self.bytes)
        ):
            took = time.monotonic() - writing[1]
            problem, since = f"writing step {writing[0]} has taken {took:.0f} s so far", time.time() - took
        return {
            "rank": self.rank,
            "directory": str(self.directory),
            "stages": {stage: {"step": s, "epoch": e, "at": at} for stage, (s, e, at) in self.newest.items()},
            "bytes": self.bytes,
            "skipped": self.skipped,
            "every": self.every,
            "problem": problem,
            "problem_since": since,
        }

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(arena.bytes for arena in self.arenas)

    def close(self) -> None:
        """Give the memory back."""
        self._end.set()
        self._bell.set()
        self._digester.close()
        self._thread.join(1.0)
        for arena in self.arenas:
            arena.close()
        self.arenas = []

    # --- storage ------------------------------------------------------------------------------------------------

    def _persist(self) -> None:
        while not self._end.is_set():
            self._bell.wait(self._wait_s())
            self._bell.clear()
            try:
                self._work()
            except Exception as error:  # the thread must live; what is wrong stands in status
                log.exception("rank %d of %s", self.rank, self.directory)
                self._trouble(f"{type(error).__name__}: {error}")
                self._retry_later()

    def _wait_s(self) -> float | None:
        waits = []
        if self._pending():
            waits.append(max(0.0, self._retry_at - time.monotonic()))
        if self._handles:
            waits.append(self._pause)
        return min(waits, default=None)

    def _work(self) -> None:
        entry = self._next() if time.monotonic() >= self._retry_at else None
        if entry is not None:
            arena, slot, state = entry
            if arena.acquire(slot, state.seq):
                try:
                    self._write(entry)
                finally:
                    self._writing = None
                    arena.release(slot)
        self._settle()

    def _pending(self) -> list[Entry]:
        """What is staged and not dealt with, newest first.

        While the program is there, nothing older than what was written last, unless another rank needs it.
        """
        open_ = [entry for entry in self.staged() if entry[0].settled(entry[1]) < entry[2].seq]
        if self._gone_at is not None:
            return open_
        return [e for e in open_ if self._wanted(e[2]) and (e[2].seq > self._last_written or self._begun(e[2]))]

    def _wanted(self, state: SlotState) -> bool:
        """Whether it is due, or another rank, which chose by its own measures, has begun it."""
        owner = self._owner
        chosen = owner is not None and owner.every == CHOSEN and owner.epoch == state.epoch
        return self._due(state) or (chosen and self._begun(state))

    def _due(self, state: SlotState) -> bool:
        """Whether storage is to get this step while the program is there."""
        if self._owner is None or state.step == self.resumed_step:
            return True
        if self._owner.every == CHOSEN:
            return state.epoch == self._owner.epoch and state.step in self._chosen
        return state.step % self._owner.every == 0

    def _begun(self, state: SlotState) -> bool:
        """Whether another rank writes this step, so that it is complete only if this rank does, too."""
        store = self._stores.get(state.epoch)
        return store is not None and store.writer.world_size > 1 and (state.epoch, state.step) in self._others

    def _look_at_others(self) -> None:
        """Note which of the staged steps another rank has begun to write."""
        found = set()
        for _, _, state in self.staged():
            store = self._stores.get(state.epoch)
            if store is not None and store.writer.world_size > 1 and store.writer.folder(state.step).is_dir():
                found.add((state.epoch, state.step))
        self._others = frozenset(found)

    def _next(self) -> Entry | None:
        """First what another rank has begun: ranks that differ by a step would never complete any.

        Then the next in turn as long as storage keeps up, else the newest.
        """
        with contextlib.suppress(OSError):
            self._look_at_others()
        pending = self._pending()
        begun = [entry for entry in pending if self._begun(entry[2])]
        if begun or not pending:
            return next(iter(begun), None)
        oldest = min(pending, key=lambda entry: entry[2].seq)
        in_turn = self._gone_at is None and oldest[2].seq == self._last_written + 1
        return oldest if in_turn else pending[0]

    def _write(self, entry: Entry) -> None:
        arena, slot, state = entry
        self._writing = state.step, time.monotonic()
        try:
            table = self.table(entry)
        except ValueError as error:
            self._failed(entry, CheckpointError(str(error)))
            return
        store = self._store(state.epoch, table.world_size)
        parts = self._digester.with_digests(entry, images(arena, slot, table))
        # When the program has ended the time for it is short.
        slowly = (self._cap.through(part, lambda: self.deserted) for part in parts)
        stored = [part for part, place in zip(slowly, table.places, strict=True) if place.stored]
        try:
            store.put(state.step, stored)
        except CheckpointError as error:
            self._note_fenced(error)
            self._failed(entry, error)
        except (OSError, MemoryError) as error:
            self._try_again(entry, store, store.told(state.step, error, sum(part.bytes for part in stored)))
        else:
            self._written(entry, store)

    def _store(self, epoch: int, world_size: int) -> Store:
        store = self._stores.get(epoch)
        if store is None:
            owner = self._owner or Owner(world_size, epoch, "", 1)
            token = owner.token if owner.epoch == epoch else ""
            store = Store(Writer(self.directory, self.rank, world_size, epoch), token, owner.keep)
            self._stores = {**self._stores, epoch: store}
        store.completion.resume_source = self.resume_source
        return store

    def _written(self, entry: Entry, store: Store) -> None:
        arena, slot, state = entry
        arena.settle(slot, state.seq)
        self._last_written = max(state.seq, self._last_written)
        self.problem, self.problem_at = "", 0.0
        self._retry_at, self._retry_s = 0.0, FIRST_RETRY_S
        self._pause, self._moved_at = FIRST_LOOK_S, time.monotonic()
        step = state.step
        handle = SaveHandle(step, lambda: store.completion.progress(step))
        begun = self._writing[1] if self._writing else time.monotonic()
        self._handles[step] = (state.epoch, handle, begun)
        self._tell(self, {"t": "written", "step": step, "epoch": state.epoch})
        store.completion.add(handle)

    def _try_again(self, entry: Entry, store: Store, error: CheckpointError) -> None:
        if self._gone_at is not None and time.monotonic() - self._gone_at > GIVE_UP_S:
            store.writer.fail(entry[2].step, str(error))
            self._failed(entry, error)
            return
        store.writer.take_back(entry[2].step)
        self._trouble(str(error))
        log.warning("%s; trying again in %.1f s", error, self._retry_s)
        told = {"t": "problem", "step": entry[2].step, "epoch": entry[2].epoch, "error": str(error), "hint": error.hint}
        self._tell(self, told)
        self._retry_later()

    def _retry_later(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _trouble(self, told: str) -> None:
        self.problem, self.problem_at = told, self.problem_at or time.time()

    def _note_fenced(self, error: CheckpointError) -> None:
        """A newer start has begun, before the write of a step or between it and its completion."""
        if isinstance(error, FencedError):
            self._fenced = True
            self._trouble(str(error))
            self._stay_if_fenced()

    def _failed(self, entry: Entry, error: CheckpointError) -> None:
        arena, slot, state = entry
        arena.settle(slot, state.seq)
        self._trouble(str(error))
        log.warning("%s", error)
        self._tell_failed(state.step, state.epoch, error)

    def _tell_failed(self, step: int, epoch: int, error: CheckpointError) -> None:
        told = {"t": "failed", "step": step, "epoch": epoch, "error": str(error), "hint": error.hint}
        self._tell(self, told)

    def _settle(self) -> None:
        """Complete what can be completed, and say so."""
        for store in self._stores.values():
            store.completion.settle()
        self._pause = min(2 * self._pause, LAST_LOOK_S)
        for step, (epoch, handle, begun) in list(self._handles.items()):
            if handle.reached:
                self._complete(step, epoch, begun)
            elif handle.error is not None:
                self._note_fenced(handle.error)
                del self._handles[step]
                self._tell_failed(step, epoch, handle.error)

    def _complete(self, step: int, epoch: int, begun: float) -> None:
        del self._handles[step]
        self.newest["storage"] = (step, epoch, time.time())
        self._pause, self._moved_at = FIRST_LOOK_S, time.monotonic()
        self._tell(self, {"t": "complete", "step": step, "epoch": epoch, "took": time.monotonic() - begun})
        for arena, slot, state in self.staged():
            if (state.epoch, state.step) < (epoch, step) and arena.settled(slot) < state.seq:
                arena.settle(slot, state.seq)
                self._overtaken(state, step, epoch)

    def _overtaken(self, state: SlotState, step: int, epoch: int) -> None:
        """What is staged of ``state`` will not be stored, as ``step`` of ``epoch`` is."""
        if state.epoch < epoch:
            told = f"step {state.step} of epoch {state.epoch} is fenced: epoch {epoch} has stored step {step} since"
            self._tell_failed(state.step, state.epoch, CheckpointError(told))
        elif self._due(state):
            self.skipped += 1
            self._tell(self, {"t": "skipped", "step": state.step, "epoch": state.epoch, "by": step})
