"""What ``save`` returns: how far one checkpoint has come."""

from __future__ import annotations

import time
from collections.abc import Callable

from transomd.tce.errors import CheckpointError

STAGES = ("memory", "replica", "storage")
_FIRST_POLL, _LAST_POLL = 0.01, 0.5


class SaveHandle:
    """One save. ``step`` is its step, ``error`` why it failed (None: it did not), ``reached`` whether it is stored.

    Stages: ``memory``: it is in memory that outlives the program (``in_memory``); ``replica``, a copy on another node,
    is not there in this version; ``storage``: every rank's files are on the disk and the step's manifest is too.
    ``problem`` is what keeps it from storage at the moment.
    """

    def __init__(
        self,
        step: int,
        completed: Callable[[], bool],
        error: CheckpointError | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.step = step
        self.error = error
        self.reached = False
        self.in_memory = False
        self.problem = ""
        self._completed = completed
        self._pause = pause

    def done(self, stage: str = "storage") -> bool:
        """Whether the stage is reached; False for stages that are not there, and for ``storage`` after a failure."""
        _check(stage)
        if stage == "memory":
            return self.in_memory
        return stage == "storage" and self.error is None and self._stored()

    def wait(self, stage: str = "storage", timeout: float | None = None) -> None:
        """Block until the stage is reached on every rank, at most ``timeout`` seconds (None: for ever).

        ``memory`` is reached, or not, when ``save`` returns. Raises CheckpointError if the stage cannot be reached any
        more, or TimeoutError.
        """
        _check(stage)
        if stage == "memory" and self.in_memory:
            return
        if stage != "storage":
            raise self.error or CheckpointError(
                f"stage {stage!r} is not there yet: save() wrote to storage only"
                if stage == "memory"
                else f"stage {stage!r} is not there yet in this version of transom",
                hint="wait for 'storage'",
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = _FIRST_POLL
        while True:
            if self.error:
                raise self.error
            if self._stored():
                return
            if deadline is not None and time.monotonic() + poll > deadline:
                why = self.problem or "not every rank has written"
                raise TimeoutError(f"step {self.step} is not complete after {timeout} s: {why}")
            self._pause(poll)
            poll = min(2 * poll, _LAST_POLL)

    def _stored(self) -> bool:
        """Asked only until it was so: retention may have removed the checkpoint since."""
        if not self.reached:
            completed = self._completed()
            self.reached = self.reached or completed
        return self.reached


def _check(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is none of {', '.join(STAGES)}")
