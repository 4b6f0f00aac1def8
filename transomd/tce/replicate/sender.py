"""Copies what this node's ranks stage to the keeper of the node's partner, in a thread; it gives way to the saves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from transomd.tce.memory.arena import Arena
from transomd.tce.memory.digests import Entry
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.memory.tenant import Tenant
from transomd.tce.rate import REPLICA, Cap
from transomd.tce.replicate import transfer
from transomd.tce.replicate.holdings import Step
from transomd.tce.replicate.offer import Key
from transomd.tce.replicate.peer import GaveWay, Peer
from transomd.tce.replicate.post import offer_of, quarantine_if_damaged
from transomd.tce.replicate.standing import FIRST_RETRY_S, Address, Partner, Standing
from transomd.tce.replicate.streams import WIDE, Streams

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


class Unreached(OSError):
    """The partner does not answer, whatever is to be copied there."""


class Sender:
    """``begun`` tells which step of a directory another node copies at the moment."""

    def __init__(self, token: str, tenants: Callable[[], Sequence[Tenant]], begun: dict[str, Step]) -> None:
        self._token = token
        self._cap = Cap.of(os.environ, REPLICA)
        self._tenants = tenants
        self._begun = begun
        self._aim: Step | None = None
        self._aimed_at = 0.0
        self._done_at = 0.0
        self._partner: Partner | None = None
        self._streams: Streams | None = None
        self._streams_to: Partner | None = None
        self._bell = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def partner(self) -> str:
        """The node that gets the copies; '' if none does."""
        partner = self._partner
        return partner.node if partner else ""

    @property
    def problem(self) -> str:
        """What keeps copies from the partner; '' if nothing does."""
        partner = self._partner
        return partner.problem_of(map(_key, self._tenants())) if partner else ""

    def turn_to(self, address: Address | None) -> None:
        """Copy to this node from now on: what is newest goes there at once."""
        if address != (self._partner.address if self._partner else None):
            self._partner = Partner(address) if address else None
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
            partner = self._partner
            try:
                while self._one(partner):
                    pass
            except Exception as error:  # the thread must live; what is wrong stands in status
                self._hang_up()
                if partner is not None and partner is self._partner:
                    partner.unreached(map(_key, self._tenants()), time.monotonic(), error)

    def _wait_s(self) -> float | None:
        """How long until there may be something to copy without a ring; None: for ever."""
        partner, now = self._partner, time.monotonic()
        if partner is None:
            return None
        # Nobody looks at what is due for a rank that is not here any more: it is not waited for.
        due = [at for tenant in self._tenants() if (at := partner.ranks[_key(tenant)].look_at)]
        waits = [max(0.001, at - now) for at in due]
        return min([*waits, LOOK_S] if self._streams or self._aim else waits, default=None)

    def _one(self, partner: Partner | None) -> bool:
        """Copy one slot; False if there is none to copy now."""
        if partner is None or partner is not self._partner:
            self._hang_up()
            return False
        if self._streams is not None and self._streams.first.gone:
            self._hang_up()
            partner.gone()
        # Those with which something is wrong come last: each may take long to fail.
        tenants = sorted(self._tenants(), key=lambda tenant: bool(partner.ranks[_key(tenant)].problem))
        return any(self._one_of(tenant, partner) for tenant in tenants)

    def _one_of(self, tenant: Tenant, partner: Partner) -> bool:
        """Copy one slot of a rank; False if there is none to copy now. What fails then holds back this rank alone.

        Raises Unreached.
        """
        standing = partner.ranks[_key(tenant)]
        try:
            entry = None if standing.held_back(time.monotonic()) else self._choose(tenant, standing)
            if entry is None:
                return False
            streams = self._connected(partner, entry[2].table_offset)
            # Chosen once more: the program may have saved while we called.
            entry = self._choose(tenant, standing)
            if entry is None or not entry[0].acquire(entry[1], entry[2].seq):
                return False
            try:
                self._copy(tenant, entry, partner, streams)
            finally:
                entry[0].release(entry[1])
        except Unreached:
            raise
        except Exception as error:  # what is wrong stands in status
            self._failed(tenant, partner, error)
        return True

    def _failed(self, tenant: Tenant, partner: Partner, error: Exception) -> None:
        """How far the talk had come is not known: what is next goes over another connection."""
        self._hang_up()
        if partner is not self._partner:
            return
        standing, now = partner.ranks[_key(tenant)], time.monotonic()
        standing.tell(f"copies of rank {tenant.rank} do not reach {partner.node}: {error}", error)
        if isinstance(error, GaveWay):
            standing.not_before = now + FIRST_RETRY_S  # nothing is wrong there
        else:
            standing.fail(now)

    def _choose(self, tenant: Tenant, standing: Standing) -> Entry | None:
        """What to copy next of a rank, of what the program wants copied: nothing older than what was copied.

        Ranks that copy different steps would share none. So the first one from the aim on; without an aim what another
        node has begun to copy; of several that wait, the one whose number is roundest, which all ranks see alike.
        """
        last = standing.offered(time.monotonic())
        new = [entry for entry in tenant.for_partner() if entry[2].order > last]
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
        begun = self._begun.get(str(tenant.directory))
        return max(ready, key=lambda entry: _rank_of(entry[2], begun), default=None)

    def _copy(self, tenant: Tenant, entry: Entry, partner: Partner, streams: Streams) -> None:
        arena, slot, state = entry
        key = _key(tenant)
        standing = partner.ranks[key]
        since = standing.left_since(state, time.monotonic())
        insist = time.monotonic() - since > INSIST_S
        try:
            offer = offer_of(key[0], tenant, entry)
        except ConnectionError:
            if quarantine_if_damaged(tenant, entry):
                return  # else it would be chosen for ever, and nothing after it
            raise

        def wanted() -> bool:
            # A partner that was lost may leave us waiting for its answer.
            return crowded(arena, slot) or partner is not self._partner

        result, why = transfer.send(streams, offer, arena, slot, wanted, insist, self._cap)
        if partner is not self._partner:
            return
        if result == transfer.DONE:
            partner.ranks[key] = Standing(sent=state.order)
            self._done_at = time.monotonic()
            tenant.replicated(state)
        elif result == transfer.LATER:
            standing.leave(state, since, time.monotonic() + AGAIN_S)
        elif not quarantine_if_damaged(tenant, entry):
            # What stood in its way may change: no room, a copy that is being read.
            standing.tell(f"{partner.node} does not take the copy of step {state.step} of rank {tenant.rank}: {why}")
            standing.refuse(state.order, time.monotonic())

    def _connected(self, partner: Partner, size: int) -> Streams:
        """Connections for a step of ``size`` bytes. No slot is held meanwhile: the partner may let us wait.

        Raises Unreached where there is none, and OSError where there are not as many as there could be.
        """
        if self._streams is None or self._streams_to is not partner:
            self._hang_up()
            self._streams, self._streams_to = self._reach(partner), partner
        if size >= WIDE and not self._cap.rate:
            self._streams.lead()
            self._streams.widen(lambda: self._call(partner))
        return self._streams

    def _reach(self, partner: Partner) -> Streams:
        try:
            streams = Streams(self._call(partner))
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):  # nobody listens there: what that keeper held is gone
                partner.gone()
            raise Unreached(error) from error
        partner.reached()
        return streams

    def _call(self, partner: Partner) -> Peer:
        return Peer.dial(partner.address[1], self._token)

    def _hang_up(self) -> None:
        if self._streams is not None:
            self._streams.close()
            self._streams = None


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


def _key(tenant: Tenant) -> Key:
    return str(tenant.directory), tenant.rank


def _rank_of(state: SlotState, begun: Step | None) -> tuple[int, bool, int, int]:
    step = state.step
    return state.epoch, (state.epoch, step) == begun, step & -step if step else 1 << 62, state.seq
