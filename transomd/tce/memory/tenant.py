"""What a keeper does for one rank: holds its arenas, and answers for them. Storage is the :mod:`persister`'s.

The keeper's control thread writes every field here, but for what ``replicated`` and ``quarantine`` note, each by one
operation that nothing interrupts; what is staged, and its digests, any thread may ask for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transomd.tce.memory.arena import Arena, close_aside, staged
from transomd.tce.memory.digests import Digester, Digests, Entry
from transomd.tce.memory.due import Owner, copied
from transomd.tce.memory.persister import Persister, Reached
from transomd.tce.memory.pins import Pins, Step
from transomd.tce.memory.slots import SlotState
from transomd.tce.memory.table import Table, decode
from transomd.tce.rate import Cap

SLOTS = 3
"""One that is written to storage, the newest whole one, and one to copy into."""
PEERS_S = 10.0
"""How long a rank whose program has ended waits for others to write their share. Whoever writes last completes the
step, so this only bridges a file system that shows files late."""
FENCED_S = 30.0
"""How long what a newer start keeps from storage stays in memory, for that start to load it."""


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
        self._bad: set[tuple[int, int]] = set()
        self._newest: Reached | None = None
        self._replicated: Reached | None = None
        self._uncopied: frozenset[int] = frozenset()
        self._every = 0
        self._measured: Mapping[str, float] = {}
        self._taken_at, self._moved_at = 0.0, time.monotonic()
        self._visited = False
        self._pins = Pins()
        self._tell = partial(tell, self)
        self._digester = Digester(self._to_digest, on_digests, self.quarantine)
        self._persister = Persister(directory, rank, self.staged, self._digester, self._tell, cap)

    # --- the program --------------------------------------------------------------------------------------------

    def take_over(self, owner: Owner) -> None:
        """A program is there, and writes as ``owner``."""
        before = self._persister.orders.owner
        if before is None or before.epoch != owner.epoch:
            self.choose((), 0, {})
            self._uncopied = frozenset()
        self._taken_at, self._visited = time.monotonic(), False
        self._persister.orders = replace(self._persister.orders, owner=owner, gone_at=None)
        self.ring()

    def choose(self, steps: Iterable[int], every: int, measured: Mapping[str, float]) -> None:
        """Of what the program has saved lately, storage is to get these steps.

        ``every`` tells people how often that is, and ``measured`` why (as ``schedule.Measured`` names it).
        """
        self._persister.orders = replace(self._persister.orders, chosen=frozenset(map(int, steps)))
        self._every, self._measured = every, measured

    def resumed(self, folder: Path, step: int) -> None:
        """The program has loaded what is in ``folder``: it stays, and storage is to get ``step`` (-1: it has it)."""
        self._persister.orders = replace(self._persister.orders, resume_source=folder, resumed_step=step)
        self.ring()

    def abandon(self) -> None:
        """The program is gone: what is only in memory goes to storage."""
        self._persister.orders = replace(self._persister.orders, gone_at=time.monotonic())
        self.ring()

    def visited(self) -> None:
        """Who has had a look at what is here is gone again: a later start, if the program is gone."""
        self._visited = self._visited or self.deserted

    @property
    def skips(self) -> int:
        """How many steps were skipped here, apart from those that the program itself left out."""
        return self._persister.skipped

    def count(self, skipped: int, heard: int) -> None:
        """The program has counted so many steps that storage will not get, so many ``skips`` among them."""
        self._persister.orders = replace(self._persister.orders, skipped=skipped, heard=heard)

    def ring(self) -> None:
        """Something was staged."""
        newest = next(iter(self.staged()), None)
        if newest is not None and (self._newest is None or self._newest[:2] != (newest[2].step, newest[2].epoch)):
            self._newest = Reached(newest[2].step, newest[2].epoch, time.time())
        self._moved_at = time.monotonic()
        self._persister.ring()
        self._digester.ring()

    @property
    def deserted(self) -> bool:
        """Whether the program is gone."""
        return self._persister.orders.gone_at is not None

    @property
    def world_size(self) -> int:
        """Ranks of the program (0: unknown)."""
        owner = self._persister.orders.owner
        return owner.world_size if owner else 0

    @property
    def replica_every(self) -> int:
        """Another node gets the steps that this divides."""
        owner = self._persister.orders.owner
        return owner.replica_every if owner else 1

    # --- what is left to be done --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be done, or can be."""
        if not self.waits_only:
            return False
        moved_at = max(self._moved_at, self._persister.moved_at)
        return not self._persister.unfinished or time.monotonic() - moved_at > PEERS_S

    @property
    def waits_only(self) -> bool:
        """Whether this rank has written all that it has, and at most waits for others to write theirs."""
        return not self._persister.busy and time.monotonic() >= self._stays_until()

    def _stays_until(self) -> float:
        """Until when what a newer start has fenced is kept for it, by the monotonic clock."""
        fenced_at, gone_at = self._persister.fenced_at, self._persister.orders.gone_at
        if gone_at is None or self._visited or fenced_at <= self._taken_at:
            return 0.0
        return max(fenced_at, gone_at) + FENCED_S

    # --- what is staged -----------------------------------------------------------------------------------------

    @property
    def quiet_for(self) -> float:
        """Seconds since the newest step was staged."""
        newest = self._newest
        return time.time() - newest.at if newest else 0.0

    def staged(self) -> list[Entry]:
        """Every good staged slot, newest first."""
        return [entry for entry in staged(list(self.arenas)) if (id(entry[0]), entry[2].seq) not in self._bad]

    def quarantine(self, entry: Entry) -> None:
        """What is staged there is damaged: it is neither loaded nor written any more. From any thread."""
        arena, _, state = entry
        if (id(arena), state.seq) not in self._bad:
            self._bad.add((id(arena), state.seq))
            self._persister.give_up(entry)
            self._tell_uncopied(state.step, state.epoch, "it was damaged in memory", seq=state.seq)

    def answer_for(self, uncopied: Iterable[int] | None = None) -> None:
        """Tell the program which of these steps, of whose copies it has not heard, are here no more (``gone``).

        None: of those that it has named last. What was copied was told before: a slot that is being copied is written
        over by nobody.
        """
        if uncopied is not None:
            self._uncopied = frozenset(uncopied)
        owner = self._persister.orders.owner
        epoch = owner.epoch if owner else 0
        here = {state.step for _, _, state in self.staged() if state.epoch == epoch}
        for step in self._uncopied - here:
            self._tell_uncopied(step, epoch, "newer saves took its place first", gone=True)

    def _tell_uncopied(self, step: int, epoch: int, why: str, **details: int) -> None:
        self._tell({"t": "uncopied", "step": step, "epoch": epoch, "why": why, **details})

    def table(self, entry: Entry) -> Table:
        """What a slot says of itself; ValueError if it is damaged."""
        return decode(entry[0].table(entry[1], entry[2]))

    def digests(self, entry: Entry) -> Digests:
        """The digests of a slot as far as they have been taken."""
        return self._digester.known(entry)

    def digested(self, entry: Entry) -> bool:
        """Whether the digests of a slot have been taken."""
        return self._digester.knows(entry)

    def _to_digest(self) -> Entry | None:
        """What another node is to have, then what is newest; not what is being written, which takes them by the way."""
        writing = self._persister.watch.writing
        wanted = [*self.for_partner()[:1], *self.staged()[:1]]
        new = (entry for entry in wanted if not self._digester.knows(entry))
        return next((entry for entry in new if writing is None or writing.step != entry[2].step), None)

    def for_partner(self) -> list[Entry]:
        """Every good staged slot of which another node is to have a copy, newest first. From any thread."""
        orders = self._persister.orders
        return [entry for entry in self.staged() if copied(entry[2], orders)]

    def replicated(self, state: SlotState) -> None:
        """Note that another node holds a copy of this save. From any thread."""
        self._replicated = Reached(state.step, state.epoch, time.time())
        self._tell({"t": "replicated", "step": state.step, "epoch": state.epoch, "seq": state.seq})

    def pin(self, keeps: Collection[Step]) -> None:
        """Keep from the program's saves the steps whose copies are kept, and the one that was copied last.

        Only where there is a slot more for it, and not what a later start may make its own.
        """
        wanted: list[Step] = []
        owner, copied = self._persister.orders.owner, self._replicated
        if owner is not None and not self.deserted and self.arenas and self.arenas[-1].slots > SLOTS:
            last = [(copied.epoch, copied.step)] if copied else []
            steps = [*sorted(keeps)[:1], *last, *sorted(keeps)[1:]]
            wanted = [each for each in dict.fromkeys(steps) if each[0] == owner.epoch]
        self._pins.update(self.arenas, wanted)

    # --- people, and the end ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For people and for the launcher: newest step of each stage and when it got there, and what is wrong."""
        persister, size = self._persister, self.bytes
        stages = {"memory": self._newest, "replica": self._replicated, "storage": persister.stored}
        trouble = persister.watch.trouble(size)
        return {
            "rank": self.rank,
            "directory": str(self.directory),
            "stages": {name: newest._asdict() for name, newest in stages.items() if newest},
            "bytes": size,
            "skipped": persister.orders.skipped + persister.skipped - persister.orders.heard,
            "every": self._every,
            "measured": self._measured,
            "replica_every": self.replica_every,
            "problem": trouble.told if trouble else "",
            "problem_since": trouble.since if trouble else 0.0,
        }

    @property
    def bytes(self) -> int:
        """Memory taken."""
        return sum(arena.bytes for arena in self.arenas)

    def close(self) -> None:
        """Give the memory back. Waits for nothing."""
        arenas, self.arenas = self.arenas, []
        close_aside(arenas, [self._persister.end(), self._digester.end()])
