"""Reading a launch's logs where their file system may be dead: with a deadline, never waited for, and told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from transomd.launch.aside import Aside
from transomd.launch.watch import LogWatch
from transomd.tee.progress import Stall

log = logging.getLogger("transom.launcher")

READ_S = 10.0
"""How long a look at the logs may take before the launch is watched without them."""
FINAL_S = 30.0
"""How long, twice, the end of the logs is waited for when a launch is over."""


class Sighted:
    """Seconds in which the logs could be read: what is not read meanwhile is no standing still of the program's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._blind_s = 0.0
        self._blind_since: float | None = None

    def __call__(self) -> float:
        """Return the time."""
        now = self._clock() if self._blind_since is None else self._blind_since
        return now - self._blind_s

    def blind(self, since: float) -> None:
        """Stand still, since an earlier moment of the other clock."""
        if self._blind_since is None:
            self._blind_since = since

    def sighted(self) -> None:
        """Go on."""
        if self._blind_since is not None:
            self._blind_s += self._clock() - self._blind_since
            self._blind_since = None


class Reading:
    """``trouble`` says since when the logs cannot be read, and why; empty while they can.

    ``clock`` gives seconds, ``sighted`` is made of it and what the ``logs`` go by.
    """

    def __init__(
        self,
        logs: LogWatch,
        clock: Callable[[], float],
        sighted: Sighted,
        *,
        within_s: float = READ_S,
        final_s: float = FINAL_S,
    ) -> None:
        self.logs = logs
        self.trouble = ""
        self._clock = clock
        self._sighted = sighted
        self._store = Aside(within_s)
        self._final_s = final_s
        self._read_at = clock()

    async def poll(self) -> bool:
        """Read what is new; return whether that was possible."""
        return await self._poll(final=False)

    def stalled(self) -> Stall | None:
        """Return how long nothing has moved, if that is too long, and the logs can be read."""
        return None if self.trouble else self.logs.stalled()

    async def finish(self) -> bool:
        """Read all that is left, also what has no end of line; return whether that was possible in time."""
        for _ in range(2):  # long logs are read to their end by a look that took too long itself
            await self._store.free(self._final_s)
            if await self._poll(final=True):
                return True
        return False

    async def _poll(self, *, final: bool) -> bool:
        try:
            await self._store.ask(self.logs.poll, time.time(), final)
        except OSError as error:
            self._blind(str(error))
            return False
        if self.logs.blind:
            self._blind(self.logs.blind)
            return False
        if self.trouble:
            log.info("the logs can be read again")
        self._sighted.sighted()
        self.trouble, self._read_at = "", self._clock()
        return True

    def _blind(self, why: str) -> None:
        self._sighted.blind(self._read_at)
        if not self.trouble:
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - (self._clock() - self._read_at)))
            self.trouble = f"its logs cannot be read since {since} ({why}): its agents alone tell how it is"
            log.warning("%s", self.trouble)
