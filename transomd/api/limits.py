"""How much one sender may ask in a time, so that no one keeps the daemon from the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_KEYS = 10_000
"""Senders that are remembered; those who asked longest ago are forgotten first."""


class Buckets:
    """A token bucket for each sender: ``burst`` at once, ``rate`` a second on the average."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> bool:
        """Take one from a sender's bucket; False when it is empty."""
        now = self._clock()
        left, at = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        granted = left >= 1
        self._left[key] = (left - 1 if granted else left, now)
        if len(self._left) > MAX_KEYS:
            self._left.popitem(last=False)
        return granted
