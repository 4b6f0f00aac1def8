"""The memory tier as the engine sees it: stages steps in this rank's arena, hears from the keeper what became of them.

Nothing here asks the store, and nothing waits for it, but ``close`` and the policy ``wait``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transomd.tce.errors import CheckpointError
from transomd.tce.handle import SaveHandle
from transomd.tce.manifest import parse_step_folder
from transomd.tce.memory.lease import Lease
from transomd.tce.memory.ledger import Ledger
from transomd.tce.memory.link import Link
from transomd.tce.memory.pool import Opened, Policy, Pool
from transomd.tce.memory.recall import Recall
from transomd.tce.memory.table import Table, encode
from transomd.tce.memory.turn import Turn
from transomd.tce.memory.wire import Message
from transomd.tce.schedule import Fixed, schedule_of
from transomd.tce.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from transomd.tce.payload import Payload

log = logging.getLogger("transom.tce")
_LOOK_S = 0.005
_WORD_S = 30.0
_PEERS_S = 10.0
_KEEPER_S = 60.0
"""How long the end waits for another keeper where one was lost; an agent starts one within ten seconds."""


class MemoryTier:
    """One rank's memory, from any thread: a ``Lease`` of it, a ``Pool`` of its slots, a ``Ledger`` of what they held.

    The lock is here, and what has to do with more than one of the three. Who calls a keeper has the turn, and not the
    lock. ``writer``: whose memory it is.
    """

    def __init__(self, store: Store, policy: Policy, link: Link | None) -> None:
        self.writer = store.writer
        self.ledger = Ledger(store.writer.epoch, schedule_of(store.every.storage), Fixed(store.every.replica))
        self._pool = Pool(store.writer.epoch, policy, self.ledger)
        self._lease = Lease(store, link)
        self._lock = threading.RLock()
        self._turn = Turn()
        self._replaced = self._leaving = self._closed = False

    @property
    def reason(self) -> str:
        """Why there is no memory, when there is none."""
        return self._lease.reason

    # --- saving -------------------------------------------------------------------------------------------------

    def stage(
        self, step: int, payloads: Sequence[tuple[Payload, bool]], needs: tuple[str, ...], handle: SaveHandle
    ) -> str:
        """Copy the state of ``step`` into a slot, and return ''; or return why there is no memory tier now.

        Raises NoRoom if the step is skipped, and nothing else.
        """
        # Here and not above: the tier is made without torch.
        from transomd.tce.memory.copy import fill, lay_out

        table = lay_out(payloads, self.writer.rank, self.writer.world_size, needs)
        try:
            opened = self.open(step, table)
            try:
                fill(opened.arena, opened.slot, table, payloads)
                self.publish(opened, step, table, handle)
            finally:
                self.drop(opened)
        except (OSError, MemoryError) as error:
            reason = str(error) or type(error).__name__  # a MemoryError says nothing
            self._lease.lack(reason)
            return reason
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
        with self._lock:
            self.ledger.schedule.saves(step)
            if self._secured(size):
                return self._pool.open(step)
        with self._turn.of_a_save():
            self._call(size)
        with self._lock:
            return self._pool.open(step) if self._secured(size) else None

    def publish(self, opened: Opened, step: int, table: Table, handle: SaveHandle | None) -> None:
        """Put in force what was copied. Raises OSError if the memory is not this rank's any more.

        ``handle`` None: nobody waits for what becomes of it.
        """
        with self._lock:
            self.ledger.schedule.saves(step)
            try:
                seq = self._pool.publish(opened, step, table)
            except BaseException:
                self.drop(opened)
                raise
            self._pool.drop(opened)
            if handle is not None:
                self.ledger.add(handle, seq)
            with contextlib.suppress(OSError):
                self._tell_staged()

    def drop(self, opened: Opened) -> None:
        """Give back a slot, unless it was published or given back."""
        with self._lock, contextlib.suppress(OSError):
            if self._pool.drop(opened):
                # Nothing new is there, but what was in the slot is gone.
                self._tell_staged()

    def adopt(self, step: int, epoch: int) -> bool:
        """Make this start's own what an earlier one staged for this rank; whether it is there. Raises OSError.

        Under its old epoch nobody may write it any more. Whoever reads it at the moment (another rank that loads, the
        keeper) may go on: its bytes do not change.
        """
        with self._lock:
            secured = self._secured(1)
        if not secured:
            with self._turn.of_a_save():
                self._call(1)
        with self._lock:
            if not self._pool.adopt(step, epoch):
                return False
            self._tell_staged()
            return True

    def _secured(self, size: int) -> bool:
        """See to it that this rank has slots of at least ``size`` bytes; False: a keeper is to be called first.

        Raises OSError.
        """
        if self._lease.forked:
            raise OSError("a forked process saves without the memory tier")
        self._listen()
        if not self._lease.connected:
            return False
        if not (self._lease.held and self._pool.has(size)):
            before = self._pool.arena
            brought = (before.descriptor,) if before is not None and not self._lease.held else ()
            self._take(*self._lease.ask(size, brought), size)
        return True

    def _take(self, answer: Message, descriptors: list[int], size: int) -> None:
        """Go on in the memory that a keeper gave, if it did. Raises OSError."""
        self._lease.granted(answer)
        self._pool.take(descriptors, int(answer["seq"]))
        if not self._pool.has(size):
            raise OSError("the keeper sent less memory than it was asked for")
        self._lease.hold()
        self._replaced = False
        self.ledger.heard = int(answer.get("skips", 0))  # what another keeper skipped is this one's no more
        self.ledger.no_partner = str(answer["no_partner"])

    def _call(self, size: int) -> None:
        """Call a keeper if the line is lost, and hand over what memory there is. Raises OSError. For whose turn it is.

        Not under the lock: it may let us wait.
        """
        with self._lock:
            if self._lease.connected:
                return
            if self._closed:
                raise OSError("the checkpoints are closed")
            before = self._pool.arena
            brought = (os.dup(before.descriptor),) if before is not None else ()
        try:
            link, answer, descriptors = self._lease.call(size, brought)
        finally:
            for descriptor in brought:
                os.close(descriptor)
        with self._lock:
            if self._closed:
                for descriptor in descriptors:
                    os.close(descriptor)
                link.close()
                raise OSError("the checkpoints were closed meanwhile")
            self._lease.take(link)
            self._take(answer, descriptors, size)

    def _tell_staged(self) -> None:
        self._lease.tell("staged", **self.ledger.staged())

    # --- loading ------------------------------------------------------------------------------------------------

    def holds(self, epoch: int) -> bool:
        """Whether a keeper that is there already has something of this rank and epoch."""
        memory = self.recall(abroad=False)
        if memory is None:
            return False
        memory.release()
        return any(there == epoch for there, _ in memory.staged)

    def recall(self, abroad: bool = True) -> Recall | None:
        """What this node's memory, and that of others, offers to load; None where no keeper is, or none answers.

        It is released when it was used. No save waits for it.
        """
        try:
            self._find()
            looked = self._lease.look()
        except OSError as error:
            log.warning("memory is not asked for checkpoints: %s", error)
            return None
        if looked is None:
            return None
        link, greeting = looked
        with self._lock:
            self._listen()
            memory = Recall(link, self.writer, greeting, bool(greeting["owned"]) and not self._lease.held)
        if abroad:
            memory.look_abroad()
        return memory

    def _find(self) -> None:
        """Have a line to a keeper that is there already. Raises OSError."""
        if not self._lease.connected:
            with self._turn.aside() as mine:
                looked = self._lease.look() if mine and not self._lease.connected else None
                if looked is not None:
                    with self._lock:
                        self._lease.take(looked[0])

    def wants(self, step: int) -> None:
        """Storage is to get ``step``, which was loaded, whatever steps it gets else; -1: none."""
        with self._lock:
            self.ledger.resumed = step

    def resumed(self, folder: Path, lacking: bool = False) -> None:
        """What was loaded from this folder is not removed; if storage is ``lacking`` it, it is to get it."""
        step = (parse_step_folder(folder.name) or (-1, -1))[0] if lacking else -1
        with self._lock, contextlib.suppress(OSError):
            self.wants(step)
            self._lease.resumed(str(folder), step)

    # --- hearing ------------------------------------------------------------------------------------------------

    def progress(self, step: int) -> bool:
        """Whether ``step`` is complete, as far as the keeper has told; without a keeper the store is asked.

        Neither is asked under the lock: no save and no load waits for this.
        """
        with self._lock:
            self._listen()
            lost = not self._lease.connected
        if lost:
            self._go_on_elsewhere()
        with self._lock:
            handle, lost = self.ledger.handles.get(step), not self._lease.connected
        with contextlib.suppress(OSError):
            if handle is not None and lost and self.writer.stored(step):
                with self._lock:
                    self.ledger.complete(step)
        return handle is not None and handle.reached

    def pause(self, seconds: float) -> None:
        """Wait for word from the keeper, at most so long."""
        self._lease.pause(seconds)

    def _go_on_elsewhere(self) -> None:
        """After the keeper was lost: another one takes over what stands in the arena, if one can be had now."""
        arena = self._pool.arena
        if arena is not None and not self._lease.forked and not self._replaced:
            with self._turn.aside() as mine, contextlib.suppress(OSError):
                if mine:
                    self._call(arena.slot_bytes)
                    with self._lock:
                        self._tell_staged()
                        if self._leaving:
                            self._lease.leave()

    def _listen(self) -> None:
        """Take in the keeper's news."""
        for told in self._lease.news():
            if told["t"] == "lost":
                self._superseded()
            elif not (told.get("gone") and self._pool.holds(told["step"], told["epoch"])):
                # Else the keeper has looked while a save marked a slot, which it then gave back.
                self.ledger.hear(told)

    def _superseded(self) -> None:
        self._replaced = True
        error = CheckpointError(f"{self.writer.directory}: another start of this program has taken over")
        for step in list(self.ledger.handles):
            self.ledger.fail(step, error)
        self.ledger.none_copied("another start of this program has taken over")

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout: float, leave: bool) -> None:
        """Wait until storage has what it is to get, and let go.

        With ``leave``, that includes the newest step, whatever the schedule, and the memory may be given back then.
        """
        if self._lease.forked:
            return
        end = time.monotonic() + timeout
        if self._wait(end) and leave:
            self._leave()
            self._wait(end)
        with self._lock:
            self._listen()
            if leave:
                self._leave()
            if self.ledger.unwritten:
                self._warn(timeout)
            self.ledger.none_copied("the program has closed its checkpoints")
            self._lease.hang_up()
            self._pool.close()
            self._closed = True

    def _wait(self, end: float) -> bool:
        """Wait until nothing more is to be told; whether it came to that."""
        alone = without = 0.0
        while waits := self._waits():
            now = time.monotonic()
            # Once this rank's share is there, the keeper goes on without us if other ranks take long.
            alone = 0.0 if self.ledger.unwritten else alone or now + _PEERS_S
            without = 0.0 if self._lease.connected else without or now + _KEEPER_S
            if now >= min([end, *filter(None, (alone, without))]):
                break
            # Without the lock: other threads may wait for what is to become of a step, too.
            self.pause(_LOOK_S)
        return not waits

    def _waits(self) -> bool:
        """Whether there is something that a keeper may still tell of; one that was lost is replaced for it.

        Without one, what is in memory alone would end with the program.
        """
        with self._lock:
            self._listen()
            waits, lost = bool(self.ledger.handles), not self._lease.connected
        if waits and lost:
            self._go_on_elsewhere()
        return waits

    def _leave(self) -> None:
        """Have storage get the newest step, too: this program saves nothing any more."""
        with self._lock, contextlib.suppress(OSError):
            if not self._leaving:
                self._leaving = True
                if not self._replaced:
                    self.ledger.ends()
                self._lease.leave()

    def _warn(self, timeout: float) -> None:
        steps = ", ".join(map(str, sorted(self.ledger.unwritten)))
        there = self._lease.connected
        goes_on = (
            "the keeper goes on" if there else "no keeper is there that could go on, and they end with this program"
        )
        told = "steps %s are not on the disk after at most %.0f s; %s. %s"
        log.warning(told, steps, timeout, goes_on, self.ledger.problem)

    def release(self) -> None:
        """Let go without waiting; what is staged is the keeper's."""
        if not self._lease.forked:
            self._lease.hang_up()
