"""What a keeper answers to programs, agents and people. All in the keeper's control thread; nothing here waits."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from transomd.tce.memory.arena import Arena, rounded
from transomd.tce.memory.digests import Entry
from transomd.tce.memory.due import Owner
from transomd.tce.memory.landlord import Landlord, adopt, drop_outgrown
from transomd.tce.memory.tenant import SLOTS, Tenant
from transomd.tce.memory.wire import Line, Message
from transomd.tce.rate import STORAGE, Cap
from transomd.tce.replicate.copies import Copy
from transomd.tce.replicate.holdings import Holder, holdings, loadable
from transomd.tce.replicate.offer import told as digests_told
from transomd.tce.replicate.office import Office

_BACKLOG = 10000
Key = tuple[str, int]


@dataclass
class Guest:
    """A program at the other end of a line."""

    pid: int
    key: Key | None = None
    world_size: int = 0
    owns: bool = False
    held: list[Entry] = field(default_factory=list)

    def needs(self, key: Key, arenas: Sequence[Arena]) -> bool:
        """Whether it talks of this rank, or reads its memory: who loads reads that of several."""
        return self.key == key or any(arena is held for arena in arenas for held, _, _ in self.held)


class Desk:
    """All tenants of a node, and the programs that talk of them. ``wake`` lets the control thread look."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.lines: dict[Line, Guest] = {}
        self.served = False
        self._wake = wake
        self._tenants: dict[Key, Tenant] = {}
        self._cap = Cap.of(os.environ, STORAGE)
        self._landlord = Landlord(lambda: list(self._tenants.values()), lambda: self.office.copies)
        self.office = Office(lambda: list(self._tenants.values()), self._landlord.refusal, wake)
        self._leaving: set[Key] = set()
        self._news: deque[tuple[Tenant, Message]] = deque(maxlen=_BACKLOG)

    # --- coming and going ---------------------------------------------------------------------------------------

    def welcome(self, line: Line, pid: int) -> None:
        """A program has called."""
        self.lines[line] = Guest(pid)
        self.served = True

    def goodbye(self, line: Line) -> None:
        """A program is gone, or has closed its line."""
        guest = self.lines.pop(line)
        _let_go(guest)
        tenant = self._tenants.get(guest.key) if guest.key else None
        if tenant is not None and guest.owns:
            tenant.abandon()
        elif tenant is not None:
            tenant.visited()
        line.close()

    @property
    def waiting(self) -> bool:
        """Whether something may end without a word: a tenant that is to go, or one whose program is gone."""
        return bool(self._leaving) or any(
            tenant.deserted and not self._done(tenant) for tenant in self._tenants.values()
        )

    @property
    def idle(self) -> bool:
        """Whether everything is on the disk, or cannot be brought there."""
        return not self._news and all(self._done(tenant) for tenant in self._tenants.values())

    def _done(self, tenant: Tenant) -> bool:
        """Whether nothing is left to be done: if all ranks are here and have nothing more, none waits for another."""
        if tenant.idle:
            return True
        all_ = [other for other in self._tenants.values() if other.directory == tenant.directory]
        return len(all_) == tenant.world_size and all(other.deserted and other.waits_only for other in all_)

    def tidy(self, ending: bool) -> None:
        """Pass news on, and give back memory that nobody needs."""
        while self._news:
            tenant, message = self._news.popleft()
            for line, guest in self.lines.items():
                if guest.owns and guest.key is not None and self._tenants.get(guest.key) is tenant:
                    line.queue(message)
        self.office.pass_on(self.lines)
        for key, tenant in list(self._tenants.items()):
            tenant.pin(self.office.copies.keeps)
            if drop_outgrown(tenant):
                tenant.answer_for()
            needed = any(guest.needs(key, tenant.arenas) for guest in self.lines.values())
            if tenant.deserted and self._done(tenant) and not needed and (ending or key in self._leaving):
                self._leaving.discard(key)
                self._tenants.pop(key).close()

    def close(self) -> None:
        """Give everything back."""
        for tenant in self._tenants.values():
            tenant.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def answer(self, line: Line, message: Message) -> None:
        """Do what a program asks. Raises ValueError, KeyError or TypeError for what is no request."""
        asked = message["op"]
        if asked not in _REQUESTS:
            raise ValueError(f"unknown request {asked!r}")
        _REQUESTS[asked](self, line, self.lines[line], message)

    def status(self) -> Message:
        """For people and for the launcher."""
        ranks = [tenant.status() for tenant in self._tenants.values()]
        unstored = sorted(tenant.rank for tenant in self._tenants.values() if not self._done(tenant))
        told = {"pid": os.getpid(), "ranks": ranks, "unstored": unstored}
        return {**told, **self._landlord.status(), **self.office.status()}

    def _status(self, line: Line, guest: Guest, message: Message) -> None:
        line.queue({"id": message.get("id"), **self.status()})

    def _hello(self, line: Line, guest: Guest, message: Message) -> None:
        """Learn of which rank the program talks; what this node holds for it."""
        guest.key = str(message["directory"]), int(message["rank"])
        guest.world_size = int(message["world_size"])
        owned = any(other.owns and other.key == guest.key for other in self.lines.values() if other is not guest)
        held = holdings(self.office.holders(guest.key[0]))
        told = {
            "steps": [list(at) for at in loadable(held, guest.key[1], guest.world_size)],
            "staged": self._staged_steps(guest.key),
            "owned": owned,
            "held": [one.encode() for one in held],
        }
        line.queue({"id": message["id"], **told})

    def _staged(self, line: Line, guest: Guest, message: Message) -> None:
        tenant = self._tenant(guest)
        if guest.owns:
            measured = {str(name): float(value) for name, value in message.get("measured", {}).items()}
            tenant.choose(message.get("due", ()), int(message.get("every", 0)), measured)
            tenant.count(int(message["skipped"]), int(message.get("heard", 0)))
            tenant.answer_for(map(int, message.get("uncopied", ())))
        tenant.ring()

    def _resumed(self, line: Line, guest: Guest, message: Message) -> None:
        self._tenant(guest).resumed(Path(message["folder"]), int(message["step"]))

    def _ask_abroad(self, line: Line, guest: Guest, message: Message) -> None:
        self.office.ask(line, message, _key(guest), guest.world_size)

    def _peers(self, line: Line, guest: Guest, message: Message) -> None:
        self.office.meet(message)
        for tenant in self._tenants.values():
            self._tell(tenant, {"t": "partner", "none": self.office.no_partner})
        line.queue({"id": message.get("id")})

    def _keep(self, line: Line, guest: Guest, message: Message) -> None:
        self.office.keep(message)
        line.queue({"id": message.get("id")})

    def _bye(self, line: Line, guest: Guest, message: Message) -> None:
        self._leaving.add(_key(guest))
        self._tenant(guest).abandon()

    def _tenant(self, guest: Guest) -> Tenant:
        key = _key(guest)
        if key not in self._tenants:
            self._tenants[key] = Tenant(Path(key[0]), key[1], self._tell, self.office.ring, self._cap)
        return self._tenants[key]

    def _tell(self, tenant: Tenant, message: Message) -> None:
        """Called by a tenant's threads."""
        self._news.append((tenant, message))
        self._wake()

    def _arena(self, line: Line, guest: Guest, message: Message) -> None:
        """Give the rank an arena for states of so many bytes: the one that it has, one that it brings, or a new one."""
        needed, tenant, key = int(message["bytes"]), self._tenant(guest), _key(guest)
        self._leaving.discard(key)
        others = [each for each, other in self.lines.items() if other is not guest and other.owns and other.key == key]
        for other in others:
            # It may still write: what it has mapped stays its own, and is given to nobody else.
            self.lines[other].owns = False
            other.queue({"t": "lost"})
        brought, line.descriptors = line.descriptors, []
        adopt(tenant, brought)
        fits = bool(tenant.arenas) and not others and tenant.arenas[-1].slot_bytes >= needed
        # With copies on another node one slot more, so that what is copied stays here, too.
        most = SLOTS if self.office.no_partner else SLOTS + 1
        refusal = "" if fits else self._landlord.grow(tenant, rounded(needed), most)
        if refusal:
            line.queue({"id": message["id"], "refused": refusal})
            return
        guest.owns = True
        if "resumed" in message:
            folder, step = message["resumed"]
            tenant.resumed(Path(folder), int(step))
        tenant.take_over(_owner(guest, message))
        newest = max(state.seq for arena in tenant.arenas for state in arena.states())
        told = {"seq": newest, "skips": tenant.skips, "no_partner": self.office.no_partner}
        line.queue({"id": message["id"], **told}, [tenant.arenas[-1].descriptor])

    # --- what is staged -----------------------------------------------------------------------------------------

    def _staged_steps(self, key: Key) -> list[list[int]]:
        tenant = self._tenants.get(key)
        return [[state.epoch, state.step] for _, _, state in tenant.staged()] if tenant else []

    def _at(self, guest: Guest, epoch: int, step: int) -> list[tuple[Holder, Entry]]:
        """This node's slots of a step that hold something for the rank; one of each holder."""
        directory, rank = _key(guest)
        found = []
        for holder in self.office.holders(directory):
            for entry in (e for e in holder.staged() if (e[2].epoch, e[2].step) == (epoch, step)):
                with contextlib.suppress(ValueError):
                    if holder.rank == rank or any(rank in place.ranks for place in holder.table(entry).places):
                        found.append((holder, entry))
                        break
        return found

    def _hold(self, line: Line, guest: Guest, message: Message) -> None:
        """Keep a step from being written over while the rank loads it, and hand its memory out, with its digests."""
        told, descriptors = [], []
        for holder, entry in self._at(guest, int(message["epoch"]), int(message["step"])):
            arena, slot, state = entry
            if arena.acquire(slot, state.seq):
                guest.held.append(entry)
                known = digests_told(holder.digests(entry))
                is_copy = isinstance(holder, Copy)
                one = {"rank": holder.rank, "slot": slot, "state": astuple(state), "copy": is_copy, "digests": known}
                told.append(one)
                descriptors.append(arena.descriptor)
        line.queue({"id": message["id"], "slots": told}, descriptors)

    def _quarantine(self, line: Line, guest: Guest, message: Message) -> None:
        for holder in self.office.holders(_key(guest)[0]):
            # A copy of the same rank may well be good; whoever reads it next will see.
            if holder.rank == int(message["of_rank"]) and bool(message["copy"]) == isinstance(holder, Copy):
                for entry in holder.staged():
                    if (entry[2].epoch, entry[2].step) == (int(message["epoch"]), int(message["step"])):
                        holder.quarantine(entry)

    def _release(self, line: Line, guest: Guest, message: Message) -> None:
        _let_go(guest)


def _let_go(guest: Guest) -> None:
    """What the program has loaded may be written over."""
    for arena, slot, _ in guest.held:
        arena.release(slot)
    guest.held = []


def _owner(guest: Guest, message: Message) -> Owner:
    told = int(message["epoch"]), str(message["token"]), int(message["keep"]), int(message["every"])
    # A program of an earlier version has every step copied.
    return Owner(guest.world_size, *told, max(1, int(message.get("replica_every", 1))))


def _key(guest: Guest) -> Key:
    if guest.key is None:
        raise ValueError("hello comes first")
    return guest.key


_REQUESTS: Mapping[str, Callable[[Desk, Line, Guest, Message], None]] = {
    "status": Desk._status,
    "hello": Desk._hello,
    "arena": Desk._arena,
    "hold": Desk._hold,
    "release": Desk._release,
    "staged": Desk._staged,
    "quarantine": Desk._quarantine,
    "resumed": Desk._resumed,
    "abroad": Desk._ask_abroad,
    "fetch": Desk._ask_abroad,
    "peers": Desk._peers,
    "keep": Desk._keep,
    "bye": Desk._bye,
}
