"""What ``save`` returns: how far one checkpoint has come."""

from __future__ import annotations

import time
from collections.abc import Callable

from transomd.tce.errors import CheckpointError
from transomd.words import Stage

STAGES = tuple(stage.value for stage in Stage)
_FIRST_POLL, _LAST_POLL = 0.01, 0.5


class SaveHandle:
    """One save. ``step`` is its step, ``error`` why it failed (None: it did not), ``reached`` whether it is stored.

    ``seq`` says which of the rank's saves in memory it is: a step may be saved again.

    Stages: ``memory``: it is in memory that outlives the program (``in_memory``); ``replica``: another node holds
    this rank's share (``replicated``); ``storage``: every rank's files are on the disk and the step's manifest is too.
    ``problem`` is what keeps it from storage at the moment; ``never`` says of a stage why it is not to be reached.
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
        self.seq = 0
        self.reached = False
        self.in_memory = False
        self.replicated = False
        self.problem = ""
        self.never: dict[str, str] = {}
        self._completed = completed
        self._pause = pause

    def done(self, stage: str = "storage") -> bool:
        """Whether the stage is reached; False for stages that are not there, and for ``storage`` after a failure."""
        _check(stage)
        if stage == "storage" and self.error is not None:
            return False
        return self._reached(stage)

    def wait(self, stage: str = "storage", timeout: float | None = None) -> None:
        """Block until the stage is reached, at most ``timeout`` seconds (None: for ever).

        ``storage``: on every rank; the others: for this rank's share. ``memory`` is reached, or not, when ``save``
        returns. Raises CheckpointError if the stage cannot be reached any more, or TimeoutError.
        """
        _check(stage)
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = _FIRST_POLL
        while True:
            self._raise_if_never(stage)
            if self._reached(stage):
                return
            if deadline is not None and time.monotonic() + poll > deadline:
                why = self.problem or "not every rank has written"
                told = f"is not complete after {timeout} s: {why}"
                if stage == "replica":
                    told = f"is on no other node after {timeout} s; the keeper's status says why"
                raise TimeoutError(f"step {self.step} {told}")
            self._pause(poll)
            poll = min(2 * poll, _LAST_POLL)

    def _raise_if_never(self, stage: str) -> None:
        if stage == "storage":
            if self.error:
                raise self.error
        elif not self.in_memory:
            raise self.error or CheckpointError(
                f"stage {stage!r} is not there yet: save() wrote to storage only", hint="wait for 'storage'"
            )
        if self.never.get(stage):
            raise CheckpointError(f"step {self.step}: {self.never[stage]}", hint="wait for another stage")

    def _reached(self, stage: str) -> bool:
        if stage == "memory":
            return self.in_memory
        if stage == "storage":
            return self._stored()
        if not self.replicated and self.in_memory:
            self._completed()  # news of all stages comes the same way
        return self.replicated

    def _stored(self) -> bool:
        """Asked only until it was so: retention may have removed the checkpoint since."""
        if not self.reached:
            completed = self._completed()
            self.reached = self.reached or completed
        return self.reached


def _check(stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is none of {', '.join(STAGES)}")
