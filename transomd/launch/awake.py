"""A clock that stands still while this process does, as when Slurm suspends the job. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable

ASLEEP_S = 5.0
"""A process that looks at this clock a few times a second, and has not for so long, was stopped."""


class Awake:
    """Seconds that this process was awake; what it waits for was stopped as well, and gets its time when it goes on.

    It must be called often (``asleep_s``) by whoever keeps it; ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, asleep_s: float = ASLEEP_S) -> None:
        self._clock = clock
        self._asleep_s = asleep_s
        self._last = clock()
        self._asleep = 0.0

    def __call__(self) -> float:
        """Return the time."""
        now = self._clock()
        if now - self._last > self._asleep_s:
            self._asleep += now - self._last
        self._last = now
        return now - self._asleep
