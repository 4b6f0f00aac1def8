"""The checkpoint folder as the launcher sees it; a dead file system holds up nothing."""

from __future__ import annotations

import logging
import os

from transomd.api.wire import MAX_CHECKPOINTS
from transomd.launch.aside import Aside
from transomd.tce.catalogue import list_checkpoints, newest_epoch

log = logging.getLogger("transom.launcher")

LOOK_S = 5.0
"""How long a look at the checkpoint folder may take before it is given up; on a dead file system it takes for ever."""


class CheckpointFolder:
    """What was found at the last look that succeeded.

    ``newest`` is the newest whole checkpoint's step, epoch and time; ``listed`` has step and epoch of as many of them
    as a report may carry, newest first; ``newest_epoch`` counts also what is not whole. ``real`` is the folder as
    keepers call it, without links on the way.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.real = os.path.abspath(path)
        self.newest: tuple[int, int, float] | None = None
        self.listed: list[list[int]] = []
        self.newest_epoch = 0
        self._store = Aside(LOOK_S)

    async def look(self) -> None:
        """Look for whole checkpoints; what cannot be read leaves what was known."""
        try:
            found = await self._store.ask(list_checkpoints, self.path)
        except OSError as error:
            _unreadable(error)
            return
        whole = [c for c in found if c.complete]
        self.listed = [[c.step, c.epoch] for c in whole[:MAX_CHECKPOINTS]]
        if whole:
            self.newest = (whole[0].step, whole[0].epoch, whole[0].created)

    async def look_for_epochs(self) -> None:
        """Look for the newest epoch that wrote anything here: an earlier job's fences ours unless ours are newer."""
        try:
            found = await self._store.ask(newest_epoch, self.path)
            self.newest_epoch = found or 0
            self.real = await self._store.ask(os.path.realpath, self.path)
        except OSError as error:
            _unreadable(error)


def _unreadable(error: OSError) -> None:
    log.warning("the checkpoint folder cannot be read: %s", error)
