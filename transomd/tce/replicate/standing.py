"""What a sender knows of its partner: how far the copies of each rank have come there, and what keeps them from it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from transomd.tce.memory.slots import SlotState
from transomd.tce.replicate.offer import Key

log = logging.getLogger("transom.tce.keeper")

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0
Order = tuple[int, int, int]
"""Of slots, as ``SlotState.order``."""
NOTHING: Order = (-1, -1, -1)
Address = tuple[str, tuple[str, int]]
"""A node and where its keeper listens."""


@dataclass
class Standing:
    """Of one rank. Times are of the monotonic clock, 0.0 for none.

    ``sent`` was copied last. Nothing is offered before ``not_before``; ``refused``, and what is older, not before
    ``refused_until``, and the next refusal or failure counts for ``pause_s``. ``put_off`` has been left to the partner
    since ``put_off_at``. ``problem``: what keeps this rank's copies from the partner, where others' may reach it.
    """

    sent: Order = NOTHING
    not_before: float = 0.0
    refused: Order = NOTHING
    refused_until: float = 0.0
    pause_s: float = FIRST_RETRY_S
    put_off: SlotState | None = None
    put_off_at: float = 0.0
    problem: str = ""

    def held_back(self, now: float) -> bool:
        """Whether nothing is offered yet."""
        if self.not_before > now:
            return True
        self.not_before = 0.0
        return False

    def offered(self, now: float) -> Order:
        """The newest slot that is not to be offered again now; nor is what is older."""
        if self.refused_until <= now:
            self.refused, self.refused_until = NOTHING, 0.0
        return max(self.sent, self.refused)

    def refuse(self, order: Order, now: float) -> None:
        """Offer it again after a pause, ever later."""
        self.refused, self.refused_until = order, now + self._pause()

    def fail(self, now: float) -> None:
        """Offer nothing for a while, ever longer."""
        self.not_before = now + self._pause()

    def _pause(self) -> float:
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LAST_RETRY_S)
        return pause_s

    def tell(self, problem: str, error: Exception | None = None) -> None:
        """Note what is wrong; the log gets it once, with the trace of an ``error`` that is none of the connection's."""
        _log_new(problem, self.problem, error)
        self.problem = problem

    def left_since(self, state: SlotState, now: float) -> float:
        """Since when this is left to the partner, which may have it by itself."""
        return self.put_off_at if self.put_off == state else now

    def leave(self, state: SlotState, since: float, until: float) -> None:
        """Leave it to the partner for a moment."""
        self.put_off, self.put_off_at, self.not_before = state, since, until

    @property
    def look_at(self) -> float:
        """When there may be something to offer though nothing new is saved."""
        return self.not_before or self.refused_until


@dataclass(eq=False)
class Partner:
    """One that was turned to: what is known of it goes with it. ``problem``: what keeps all copies from it."""

    address: Address
    ranks: defaultdict[Key, Standing] = field(default_factory=lambda: defaultdict(Standing))
    problem: str = ""
    retry_s: float = FIRST_RETRY_S

    @property
    def node(self) -> str:
        """Its name."""
        return self.address[0]

    def problem_of(self, ranks: Iterable[Key]) -> str:
        """What keeps copies of any of these ranks from it; '' if nothing does."""
        standings = [self.ranks[key] for key in ranks if key in self.ranks]
        return self.problem or next((each.problem for each in standings if each.problem), "")

    def unreached(self, ranks: Iterable[Key], now: float, error: Exception) -> None:
        """It does not answer: nothing is offered of any of these ranks for a while, ever longer."""
        problem = f"copies do not reach {self.node}: {error}"
        _log_new(problem, self.problem, error)
        self.problem = problem
        for key in ranks:
            self.ranks[key].not_before = now + self.retry_s
        self.retry_s = min(2 * self.retry_s, LAST_RETRY_S)

    def reached(self) -> None:
        """It has answered a call."""
        self.problem, self.retry_s = "", FIRST_RETRY_S

    def gone(self) -> None:
        """Its keeper is not the one that was called before, and may have nothing."""
        for standing in self.ranks.values():
            standing.sent = NOTHING


def _log_new(problem: str, before: str, error: Exception | None) -> None:
    if problem != before:
        log.warning("%s", problem, exc_info=None if isinstance(error, OSError) else error)
