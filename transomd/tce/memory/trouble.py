"""What keeps a rank's steps from storage, for people: what was complained of, and what takes longer than it has to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from transomd.tce.rate import Cap

STUCK_S = 5.0
"""How long one write may take before status calls the store slow."""


class Trouble(NamedTuple):
    """What is wrong, for people, and since when something is (Unix seconds)."""

    told: str
    since: float


class Write(NamedTuple):
    """A step that is being written, and when that began (monotonic)."""

    step: int
    begun: float


class Watch:
    """What the thread that writes is at, which that thread alone says; anybody may ``complain``, and ask.

    There is no lock: every field is replaced as a whole. ``cap`` bounds how fast it may write.
    """

    def __init__(self, cap: Cap) -> None:
        self.writing: Write | None = None
        self._cap = cap
        self._complaint: Trouble | None = None
        self._looking_since: float | None = None

    def complain(self, told: str) -> None:
        """Something is wrong, until a step is written again."""
        before = self._complaint
        self._complaint = Trouble(told, before.since if before else time.time())

    def trouble(self, size: int) -> Trouble | None:
        """What is wrong; that includes a write of ``size`` bytes, or a look, that takes much longer than it has to."""
        complaint, writing, looking_since = self._complaint, self.writing, self._looking_since
        if complaint is not None:
            return complaint
        if writing is not None:
            return _stuck(f"writing step {writing.step}", writing.begun, STUCK_S + self._cap.seconds(size))
        return _stuck("looking into the directory", looking_since, STUCK_S) if looking_since is not None else None

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """The thread looks into the directory."""
        self._looking_since = time.monotonic()
        try:
            yield
        finally:
            self._looking_since = None

    @contextlib.contextmanager
    def write(self, step: int) -> Iterator[Write]:
        """The thread writes a step, and then looks on."""
        self.writing = Write(step, time.monotonic())
        try:
            yield self.writing
        finally:
            self._looking_since, self.writing = time.monotonic(), None

    def wrote(self) -> None:
        """A step is written: whatever was complained of is over."""
        self._complaint = None


def _stuck(what: str, since: float, may_take: float) -> Trouble | None:
    took = time.monotonic() - since
    return Trouble(f"{what} has taken {took:.0f} s so far", time.time() - took) if took > may_take else None
