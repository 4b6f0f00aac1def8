"""Copies what this node's ranks stage to the keeper of the node's partner, in a thread; it gives way to the saves."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from transomd.tce.memory.arena import Arena
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.memory.tenant import Tenant
from transomd.tce.rate import REPLICA, Cap
from transomd.tce.replicate import transfer
from transomd.tce.replicate.holdings import Step
from transomd.tce.replicate.peer import Peer
from transomd.tce.replicate.post import offer_of, quarantine_if_damaged

log = logging.getLogger("transom.tce.keeper")

AGAIN_S = 0.05
"""How soon what the partner may have by itself in a moment is offered again."""
LOOK_S = 2.0
"""How often it is seen whether the partner's keeper is still there: what a new one lacks is copied again."""
QUIET_S = 1.5
"""After so long without a save the newest is copied, too: the program may be waiting for it."""
WORD_S = 120.0
"""How long who has reached the aim is left without a new one before it goes on by itself: the launcher may be gone."""
INSIST_S = 10.0
"""How long it is left to the partner to have it by itself."""
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0
Key = tuple[str, int]
Entry = tuple[Arena, int, SlotState]
Address = tuple[str, tuple[str, int]]
"""A node and where its keeper listens."""


class Sender:
    """``begun`` tells which step of a directory another node copies at the moment."""

    def __init__(self, token: str, tenants: Callable[[], Sequence[Tenant]], begun: dict[str, Step]) -> None:
        self.problem = ""
        self._token = token
        self._cap = Cap.of(os.environ, REPLICA)
        self._tenants = tenants
        self._begun = begun
        self._aim: Step | None = None
        self._aimed_at = 0.0
        self._done_at = 0.0
        self._partner: Address | None = None
        self._peer: Peer | None = None
        self._peer_of: Address | None = None
        self._sent: dict[Key, tuple[int, int, int]] = {}
        self._put_off: dict[Key, tuple[SlotState, float]] = {}
        self._later: dict[Key, float] = {}
        self._refusals: dict[Key, tuple[tuple[int, int, int], float]] = {}
        self._pauses: dict[Key, float] = {}
        self._retry_s = FIRST_RETRY_S
        self._bell = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def partner(self) -> str:
        """The node that gets the copies; '' if none does."""
        partner = self._partner
        return partner[0] if partner else ""

    def turn_to(self, partner: Address | None) -> None:
        """Copy to this node from now on: what is newest goes there at once."""
        if partner != self._partner:
            self._partner = partner
            self._sent, self._put_off, self._later, self.problem = {}, {}, {}, ""
            self._refusals, self._pauses = {}, {}
        self.ring()

    def aim_at(self, step: Step | None) -> None:
        """Copy of each rank the first step that is saved from there on, and then none until told anew (None: any)."""
        if step != self._aim:
            self._aim, self._aimed_at = step, time.monotonic()
            self.ring()

    def ring(self) -> None:
        """There may be something to copy."""
        self._bell.set()

    def _run(self) -> None:
        while True:
            self._bell.wait(self._wait_s())
            self._bell.clear()
            try:
                while self._one():
                    pass
                self._retry_s = FIRST_RETRY_S
            except Exception as error:  # the thread must live; what is wrong stands in status
                self._trouble(f"copies do not reach {self.partner}: {error}", error)

    def _trouble(self, told: str, error: Exception) -> None:
        if told != self.problem:
            log.warning("%s", told, exc_info=not isinstance(error, OSError))
        self.problem = told
        self._hang_up()
        end = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self._later = dict.fromkeys(self._keys(), end)

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        ends = [*self._later.values(), *(end for _, end in self._refusals.values())]
        waits = [max(0.001, end - now) for end in ends]
        return min([*waits, LOOK_S] if self._peer or self._aim else waits, default=None)

    def _keys(self) -> list[Key]:
        return [(str(tenant.directory), tenant.rank) for tenant in self._tenants()]

    def _one(self) -> bool:
        """Copy one slot; False if there is none to copy now."""
        partner = self._partner
        if partner is None:
            self._hang_up()
            return False
        if self._peer is not None and self._peer.gone:
            self._hang_up()
            self._sent = {}
        for tenant in self._tenants():
            key = str(tenant.directory), tenant.rank
            if self._later.get(key, 0.0) > time.monotonic():
                continue
            self._later.pop(key, None)
            if self._choose(tenant, key) is None:
                continue
            peer = self._connected(partner)
            # Chosen once more: the program may have saved while we called.
            entry = self._choose(tenant, key)
            if entry is not None and entry[0].acquire(entry[1], entry[2].seq):
                try:
                    self._copy(tenant, key, entry, partner, peer)
                finally:
                    entry[0].release(entry[1])
                return True
        return False

    def _choose(self, tenant: Tenant, key: Key) -> Entry | None:
        """What to copy next of a rank: nothing older than what was copied.

        Ranks that copy different steps would share none. So the first one from the aim on; without an aim what another
        node has begun to copy; of several that wait, the one whose number is roundest, which all ranks see alike.
        """
        last = max(self._sent.get(key, (-1, -1, -1)), self._refused_until_now(key))
        new = [entry for entry in tenant.staged() if entry[2].order > last]
        ready = [entry for entry in new if tenant.digested(entry) and not crowded(entry[0], entry[1])]
        aim = self._aim
        if aim is not None and aim[0] == max((entry[2].epoch for entry in ready), default=-1):
            if tenant.quiet_for > QUIET_S:
                return max(ready, key=lambda entry: entry[2].order, default=None)
            if last[:2] < aim:
                due = [entry for entry in ready if (entry[2].epoch, entry[2].step) >= aim]
                return min(due, key=lambda entry: entry[2].order, default=None)
            if time.monotonic() - max(self._aimed_at, self._done_at) < WORD_S:
                return None
        begun = self._begun.get(key[0])
        return max(ready, key=lambda entry: _rank_of(entry[2], begun), default=None)

    def _refused_until_now(self, key: Key) -> tuple[int, int, int]:
        """What the partner did not take a moment ago: that, and what is older, is not offered before its time."""
        order, end = self._refusals.get(key, ((-1, -1, -1), 0.0))
        if end > time.monotonic():
            return order
        self._refusals.pop(key, None)
        return -1, -1, -1

    def _copy(self, tenant: Tenant, key: Key, entry: Entry, partner: Address, peer: Peer) -> None:
        arena, slot, state = entry
        since = self._put_off.get(key, (None, 0.0))
        began = since[1] if since[0] == state else time.monotonic()
        insist = time.monotonic() - began > INSIST_S
        offer = offer_of(key[0], tenant, entry)

        def wanted() -> bool:
            # A partner that was lost may leave us waiting for its answer.
            return crowded(arena, slot) or partner != self._partner

        result, why = transfer.send(peer, offer, arena, slot, wanted, insist, self._cap)
        if partner != self._partner:
            return
        if result == transfer.DONE:
            self._sent[key], self._done_at = state.order, time.monotonic()
            for there in (self._put_off, self._refusals, self._pauses):
                there.pop(key, None)
            self.problem = ""
            tenant.replicated(state.step, state.epoch)
        elif result == transfer.LATER:
            self._put_off[key] = state, began
            self._later[key] = time.monotonic() + AGAIN_S
        else:
            self._refused(tenant, key, entry, why)

    def _refused(self, tenant: Tenant, key: Key, entry: Entry, why: str) -> None:
        """What stood in its way may change (no room, a copy that is being read), so it is offered again, ever later."""
        if quarantine_if_damaged(tenant, entry):
            return
        state = entry[2]
        told = f"{self.partner} does not take the copy of step {state.step} of rank {tenant.rank}: {why}"
        if told != self.problem:
            log.warning("%s", told)
        self.problem = told
        pause = self._pauses.get(key, FIRST_RETRY_S)
        self._pauses[key] = min(2 * pause, LAST_RETRY_S)
        self._refusals[key] = state.order, time.monotonic() + pause

    def _connected(self, partner: Address) -> Peer:
        if self._peer is None or self._peer_of != partner:
            self._hang_up()
            self._peer, self._peer_of = Peer.dial(partner[1], self._token), partner
        return self._peer

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None


def crowded(arena: Arena, slot: int) -> bool:
    """Whether the program has no other slot to copy into than this one, which is not the newest any more."""
    states = arena.states()
    newest = max((state.order for state in states if state.state == STAGED), default=None)
    if states[slot].order == newest:
        return False
    return all(
        other == slot or arena.used(other) or (state.state == STAGED and state.order == newest)
        for other, state in enumerate(states)
    )


def _rank_of(state: SlotState, begun: Step | None) -> tuple[int, bool, int, int]:
    step = state.step
    return state.epoch, (state.epoch, step) == begun, step & -step if step else 1 << 62, state.seq
