"""The memory tier as the engine sees it: stages steps in this rank's arena, hears from the keeper what became of them.

Nothing here asks the store, and nothing waits for it, but ``close`` and the policy ``wait``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from xxhash import xxh3_64_intdigest

from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.manifest import parse_step_folder
from transomd.tce.memory import carry
from transomd.tce.memory.arena import PAGE, Arena
from transomd.tce.memory.ledger import Ledger, NoRoom
from transomd.tce.memory.link import Link, call
from transomd.tce.memory.recall import Recall
from transomd.tce.memory.slots import STAGED, WRITING, SlotState
from transomd.tce.memory.table import Table, encode
from transomd.tce.schedule import schedule_of
from transomd.tce.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from transomd.tce.payload import Payload
    from transomd.tce.restore import Found

log = logging.getLogger("transom.tce")
Policy = Literal["latest", "wait"]
AGAIN_S = 15.0
"""How soon a keeper that could not be had is asked for again."""
_LOOK_S = 0.005
_WORDS = re.compile(r"[a-z]{4,}")
_WORD_S = 30.0
_PEERS_S = 10.0


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


class MemoryTier:
    """One rank's arena and its line to the keeper. ``reason`` says why there is none, when there is none."""

    def __init__(self, store: Store, policy: Policy, link: Link | None) -> None:
        self.reason = ""
        self.ledger = Ledger(store.writer.epoch, schedule_of(store.every))
        self._store = store
        self._policy = policy
        self._link = link
        self._arena: Arena | None = None
        self._ours = False
        self._opened: list[Opened] = []
        self._seq = 0
        self._again_at = 0.0
        self._lock = threading.RLock()
        self._pid = os.getpid()

    # --- saving -------------------------------------------------------------------------------------------------

    def stage(
        self, step: int, payloads: Sequence[tuple[Payload, bool]], needs: tuple[str, ...], handle: SaveHandle
    ) -> str:
        """Copy the state of ``step`` into a slot, and return ''; or return why there is no memory tier now.

        Raises NoRoom if the step is skipped, and nothing else.
        """
        # Here and not above: the tier is made without torch.
        from transomd.tce.memory.copy import fill, lay_out

        table = lay_out(payloads, self._store.writer.rank, self._store.writer.world_size, needs)
        try:
            opened = self.open(step, table)
            try:
                fill(opened.arena, opened.slot, table, payloads)
                self.publish(opened, step, table, handle)
            finally:
                self.drop(opened)
        except (OSError, MemoryError) as error:
            return self._without(str(error))
        return ""

    def open(self, step: int, table: Table, room: int = 0) -> Opened:
        """A slot for the files of ``table`` and ``room`` bytes more, the caller's until it is published or dropped.

        Raises OSError, MemoryError, or NoRoom if the step is skipped. By the policy it waits for a slot; meanwhile
        other threads publish what they have opened.
        """
        began = told = time.monotonic()
        while (opened := self._try_to_open(step, table.end + room + len(encode(table)))) is None:
            time.sleep(_LOOK_S)
            if time.monotonic() - told > _WORD_S:
                told = time.monotonic()
                log.warning("step %d has waited %.0f s for storage. %s", step, told - began, self.ledger.problem)
        return opened

    def _try_to_open(self, step: int, size: int) -> Opened | None:
        """A slot of at least ``size`` bytes, marked WRITING: never one in use, never the newest."""
        with self._lock:
            self.ledger.schedule.saves(step)
            arena = self._arena_for(size)
            slot = self._choose(arena)
            if slot is None and self._policy == "latest":
                raise self.ledger.no_room(step, arena.slots)
            if slot is None or not self._mark(arena, slot, step):
                return None
            arena.await_pages(slot)
            opened = Opened(arena, slot)
            self._opened = [*self._opened, opened]
            return opened

    def publish(self, opened: Opened, step: int, table: Table, handle: SaveHandle) -> None:
        """Put in force what was copied. Raises OSError if the memory is not this rank's any more."""
        with self._lock:
            self.ledger.schedule.saves(step)
            try:
                self._publish(opened, step, table)
            finally:
                self.drop(opened)
            self.ledger.add(handle)
            self._tell_staged()

    def drop(self, opened: Opened) -> None:
        """Give back a slot that is not going to be published."""
        with self._lock:
            self._opened = [other for other in self._opened if other is not opened]
            self._close_unless_open(opened.arena)

    def _publish(self, opened: Opened, step: int, table: Table) -> None:
        """Put in force what was copied into a slot, without a handle. Raises OSError."""
        arena, slot, content = opened.arena, opened.slot, encode(table)
        if arena is not self._arena:
            raise OSError("the memory of this rank was replaced meanwhile")
        arena.image(slot)[table.end : table.end + len(content)] = content
        self._seq += 1
        digest = xxh3_64_intdigest(content)
        epoch = self._store.writer.epoch
        arena.set_state(slot, SlotState(STAGED, self._seq, step, epoch, table.end, len(content), digest))

    def _tell_staged(self) -> None:
        with contextlib.suppress(OSError):
            self._tell("staged", **self.ledger.staged())

    def _arena_for(self, size: int) -> Arena:
        """This rank's arena, with slots of at least ``size`` bytes. Raises OSError."""
        if os.getpid() != self._pid:
            raise OSError("a forked process saves without the memory tier")
        self._listen()
        if self._link is None:
            self._attach()
        if self._arena is None or not self._ours or self._arena.slot_bytes < size:
            self._ask_for_arena(size)
        assert self._arena is not None
        return self._arena

    def _attach(self) -> None:
        """Call the keeper. Raises OSError, and at once for a while after that."""
        if time.monotonic() < self._again_at:
            raise OSError(self.reason)
        self._again_at = time.monotonic() + AGAIN_S
        writer = self._store.writer
        self._link = call(writer.directory, writer.rank, writer.world_size, start=True)

    def _ask_for_arena(self, size: int) -> None:
        assert self._link is not None
        mine = (self._arena.descriptor,) if self._arena is not None and not self._ours else ()
        store = self._store
        answer, descriptors = self._link.ask(
            "arena", mine, bytes=size, epoch=store.writer.epoch, token=store.token, keep=store.keep, every=store.every
        )
        if "refused" in answer:
            self._again_at = time.monotonic() + AGAIN_S
            raise OSError(f"no memory for a copy: {answer['refused']}")
        self._take(descriptors)
        self._seq = max(self._seq, int(answer["seq"]))
        self.ledger.heard = int(answer.get("skips", 0))  # what another keeper skipped is this one's no more
        self.ledger.no_partner = str(answer["no_partner"])

    def _take(self, descriptors: list[int]) -> None:
        if self._arena is not None and descriptors and os.path.sameopenfile(self._arena.descriptor, descriptors[0]):
            # Another keeper hands back what it got from here: what is open in it stays so.
            os.close(descriptors[0])
        else:
            try:
                arena = Arena(descriptors[0])
            except (ValueError, IndexError) as error:
                raise OSError(f"the keeper sent no arena: {error}") from error
            before, self._arena = self._arena, arena
            self._close_unless_open(before)
            arena.follow()
        self._ours = True
        if self.reason:
            log.warning("checkpoints are copied into memory again")
        self.reason, self._again_at = "", 0.0

    def _close_unless_open(self, arena: Arena | None) -> None:
        """Unmap an arena that has been replaced, once nobody copies into it any more."""
        if arena is not None and arena is not self._arena and not any(o.arena is arena for o in self._opened):
            arena.close()

    def _choose(self, arena: Arena) -> int | None:
        """The slot whose loss matters least."""
        states = arena.states()
        newest = max((state.order for state in states if state.state == STAGED), default=None)
        free = [
            (state.state == STAGED, state.seq > arena.settled(slot) and self.ledger.due(state.step), state.order, slot)
            for slot, state in enumerate(states)
            if not (arena.used(slot) or self._is_open(arena, slot) or (state.state == STAGED and state.order == newest))
        ]
        if not free:
            return None
        whole, wanted, _, slot = min(free)
        return None if whole and wanted and self._policy == "wait" else slot

    def _is_open(self, arena: Arena, slot: int) -> bool:
        return any(opened.arena is arena and opened.slot == slot for opened in self._opened)

    def _mark(self, arena: Arena, slot: int, step: int) -> bool:
        """Take the slot, unless the keeper begins to use it at this very moment."""
        before = arena.state(slot)
        arena.set_state(slot, SlotState(WRITING, before.seq, step, self._store.writer.epoch))
        if arena.used(slot):
            arena.set_state(slot, before)
            return False
        if before.state == STAGED and before.seq > arena.settled(slot) and before.epoch == self._store.writer.epoch:
            self.ledger.skip(before.step, step)
        return True

    def _without(self, reason: str) -> str:
        """Note why there is no memory tier, with one warning for one reason, whose numbers may differ each time."""
        if _WORDS.findall(reason) != _WORDS.findall(self.reason):
            log.warning("%s; save() writes to storage and waits for it until that has changed", reason)
        self.reason = reason
        return reason

    # --- loading ------------------------------------------------------------------------------------------------

    def holds(self, epoch: int) -> bool:
        """Whether a keeper that is there already has something of this rank and epoch."""
        memory = self.recall(abroad=False)
        return memory is not None and any(there == epoch for there, _ in memory.staged)

    def recall(self, abroad: bool = True) -> Recall | None:
        """What this node's memory, and that of others, offers to load; None where no keeper is, or none answers."""
        with self._lock:
            try:
                writer = self._store.writer
                self._link = self._link or call(writer.directory, writer.rank, writer.world_size, start=False)
                memory = None if self._link is None else Recall(self._link, writer)
                if memory is not None and abroad:
                    memory.look_abroad()
                return memory
            except OSError as error:
                log.warning("memory is not asked for checkpoints: %s", error)
                if self._link is not None:
                    self._link.close()
                self._link = None
                return None

    def resumed(self, found: Found) -> None:
        """What was loaded is not removed; if storage lacks it, it is to get it."""
        with self._lock, contextlib.suppress(OSError):
            self._tell("resumed", folder=str(found.folder), step=self._wanted(found))

    def _wanted(self, found: Found) -> int:
        """The loaded step if storage lacks it, and is to get it whatever steps it gets else; -1 if it has it."""
        self.ledger.resumed = found.manifest.step if found.memory_only else -1
        return self.ledger.resumed

    def carry_over(self, found: Found, recall: Recall, first_of_node: bool) -> None:
        """Make this start's own what memory alone gave, while ``recall`` holds it, so that this epoch stores it.

        It is copied from another place than the rank's memory, and from memory that had become too small.
        """
        step, epoch = found.manifest.step, found.manifest.epoch
        with self._lock:
            self._wanted(found)
        try:
            if recall.own(epoch, step) and self.adopt(step, epoch):
                return
            parts = carry.share(recall.held(), self._store.writer.rank, first_of_node)
            self.restage(step, parts, tuple(place.name for place, _ in recall.held()))
        except (OSError, MemoryError, NoRoom) as error:
            log.warning("step %d, which was loaded, is not brought to storage: %s", step, error)

    def restage(self, step: int, parts: carry.Share, needs: tuple[str, ...]) -> None:
        """Stage under this epoch, byte by byte, what an earlier start staged. Raises OSError, MemoryError or NoRoom."""
        writer = self._store.writer
        table = carry.lay_out(parts, writer.rank, writer.world_size, needs)
        opened = self.open(step, table)
        try:
            carry.fill(opened.arena.image(opened.slot), table, parts)
            with self._lock:
                self._publish(opened, step, table)
                self._tell_staged()
        finally:
            self.drop(opened)

    def spare(self, folder: Path, lacking: bool = False) -> None:
        """What was loaded from this folder is not removed; if storage is ``lacking`` it, it is to get it."""
        step = (parse_step_folder(folder.name) or (-1, -1))[0] if lacking else -1
        with self._lock, contextlib.suppress(OSError):
            self.ledger.resumed = step
            self._tell("resumed", folder=str(folder), step=step)

    def adopt(self, step: int, epoch: int) -> bool:
        """Make this start's own what an earlier one staged for this rank; whether it is there. Raises OSError.

        Under its old epoch nobody may write it any more. Whoever reads it at the moment (another rank that loads, the
        keeper) may go on: its bytes do not change.
        """
        with self._lock:
            arena = self._arena_for(1)
            for slot, state in enumerate(arena.states()):
                if state.state == STAGED and (state.step, state.epoch) == (step, epoch):
                    self._seq += 1
                    arena.set_state(slot, replace(state, epoch=self._store.writer.epoch, seq=self._seq))
                    self._tell("staged", **self.ledger.staged())
                    return True
            return False

    # --- hearing ------------------------------------------------------------------------------------------------

    def progress(self, step: int) -> bool:
        """Whether ``step`` is complete, as far as the keeper has told; without a keeper the store is asked."""
        with self._lock:
            self._listen()
            if self._link is None:
                with contextlib.suppress(OSError):
                    self._attach_again()
            handle = self.ledger.handles.get(step)
            with contextlib.suppress(OSError):
                if handle is not None and self._link is None and self._store.writer.stored(step):
                    self.ledger.complete(step)
            return handle is not None and handle.reached

    def pause(self, seconds: float) -> None:
        """Wait for word from the keeper, at most so long."""
        link = self._link
        if link is None:
            time.sleep(seconds)
        else:
            with contextlib.suppress(ValueError):  # another thread has hung up meanwhile
                link.wait(seconds)

    def _attach_again(self) -> None:
        """After the keeper was lost: another one takes over what stands in the arena."""
        if self._arena is not None and os.getpid() == self._pid:
            self._attach()
            self._ask_for_arena(self._arena.slot_bytes)
            self._tell("staged", **self.ledger.staged())

    def _tell(self, op: str, **details: object) -> None:
        if self._link is not None:
            try:
                self._link.tell(op, **details)
            except OSError as error:
                self._lost(error)
                raise

    def _listen(self) -> None:
        """Take in the keeper's news."""
        if self._link is None or os.getpid() != self._pid:
            return
        lost: OSError | None = None
        try:
            self._link.listen()
        except OSError as error:
            lost = error
        while self._link.news:
            told = self._link.news.popleft()
            if told["t"] == "lost":
                self._superseded()
            else:
                self.ledger.hear(told)
        if lost is not None:
            self._lost(lost)

    def _superseded(self) -> None:
        self._ours = False
        error = CheckpointError(f"{self._store.directory}: another start of this program has taken over")
        for step in list(self.ledger.handles):
            self.ledger.fail(step, error)

    def _lost(self, error: OSError) -> None:
        """The keeper is gone: the arena stays mapped here, and the next keeper gets it."""
        if self._link is not None:
            self._link.close()
            log.warning("the keeper was lost (%s); what is in memory stays there", error)
        self._link, self._ours = None, False
        self.reason = "the keeper was lost"

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout: float, leave: bool) -> None:
        """Wait until what is staged is on the disk, and let go; with ``leave``, the memory may be given back then."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._drain(timeout)
            if self._link is not None:
                with contextlib.suppress(OSError):
                    if leave and self._ours:
                        self._tell("bye")
                if self._link is not None:
                    self._link.close()
            self._link = None
            if self._arena is not None:
                self._arena.close()
            self._arena = None

    def _drain(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        others_end: float | None = None
        while self.ledger.handles and self._link is not None and time.monotonic() < end:
            self._listen()
            if not self.ledger.unwritten:
                # This rank's share is there; the keeper goes on without us if other ranks take long.
                others_end = others_end or time.monotonic() + _PEERS_S
                if time.monotonic() > others_end:
                    break
            self.pause(_LOOK_S)
        self._listen()
        if self.ledger.unwritten:
            steps = ", ".join(map(str, sorted(self.ledger.unwritten)))
            log.warning(
                "steps %s are not on the disk after %.0f s; the keeper goes on. %s", steps, timeout, self.ledger.problem
            )

    def release(self) -> None:
        """Let go without waiting; what is staged is the keeper's."""
        if os.getpid() == self._pid and self._link is not None:
            self._link.close()
            self._link = None
