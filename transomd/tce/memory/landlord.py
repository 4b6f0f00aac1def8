"""The memory that a keeper hands out to its tenants and takes back. In the control thread, but for what can be had."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from transomd.tce.memory import budget
from transomd.tce.memory.arena import Arena, close_aside, whole_size
from transomd.tce.memory.tenant import Tenant
from transomd.tce.replicate.copies import Copies

log = logging.getLogger("transom.tce.keeper")
LEAST_SLOTS = 2


class Landlord:
    """Gives the ``tenants`` of a node arenas, as far as its memory goes; ``copies`` of other nodes' take some, too."""

    def __init__(self, tenants: Callable[[], Sequence[Tenant]], copies: Callable[[], Copies]) -> None:
        self._tenants = tenants
        self._copies = copies

    def refusal(self, size: int) -> str:
        """Why so many more bytes cannot be had; '' if they can. From any thread."""
        return budget.look(os.environ).refusal(size + self._unfilled(), self._taken())

    def status(self) -> dict[str, Any]:
        """For people and for the launcher."""
        found = budget.look(os.environ)
        return {"limit": found.limit, "limit_source": found.source, "taken": self._taken()}

    def grow(self, tenant: Tenant, slot_bytes: int, most: int) -> str:
        """A new arena of at ``most`` so many slots, beside the one that has become too small; why not, if not."""
        refusal = ""
        for slots in range(most, LEAST_SLOTS - 1, -1):
            refusal = self.refusal(whole_size(slots, slot_bytes))
            if not refusal:
                name = f"rank-{tenant.rank}"
                try:
                    arena = Arena.create(slots, slot_bytes, name)
                except OSError as error:
                    return f"memory for {name}: {error}"
                log.info("%s of %s: %d slots of %d bytes", name, tenant.directory, slots, slot_bytes)
                tenant.arenas = [*tenant.arenas, arena]
                arena.fill()
                return ""
        return refusal

    def _taken(self) -> int:
        own = sum(arena.bytes for tenant in self._tenants() for arena in tenant.arenas)
        return own + self._copies().bytes

    def _unfilled(self) -> int:
        """What was handed out and does not show in the kernel's numbers yet; at most so much."""
        arenas = (arena for tenant in self._tenants() for arena in tenant.arenas)
        return sum(arena.bytes for arena in arenas if arena.filling) + self._copies().unfilled


def adopt(tenant: Tenant, brought: Sequence[int]) -> None:
    """Take the arena of a program whose keeper was lost; everything staged in it is looked at again."""
    for descriptor in brought:
        if tenant.arenas:
            os.close(descriptor)
            continue
        with contextlib.suppress(OSError, ValueError):
            arena = Arena(descriptor)
            arena.forget_uses()
            arena.fill()
            tenant.arenas = [arena]


def drop_outgrown(tenant: Tenant) -> bool:
    """Free arenas that became too small, once nothing in them is newest, in use or still to be stored; whether any."""
    before = tenant.arenas
    newest = next(iter(tenant.staged()), None)
    for arena in tenant.arenas[:-1]:
        open_ = any(arena.used(slot) or arena.settled(slot) < state.seq for slot, state in enumerate(arena.states()))
        if not open_ and newest is not None and newest[0] is not arena:
            tenant.arenas = [other for other in tenant.arenas if other is not arena]
            close_aside([arena])
    return tenant.arenas is not before
