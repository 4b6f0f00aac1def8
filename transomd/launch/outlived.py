"""Which exceptions a program has made up for: it printed them, and went on with its steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from transomd.tee.types import Evidence
from transomd.words import Blame, FailureClass, Role

LOOKS = 3
"""In so many looks the program must have moved since: steps that were under way come to their end in the first."""

_Key = tuple[str, str, int | None]


@dataclass(frozen=True, slots=True)
class _Raised:
    """What is remembered of an exception: how often it came, at which move, and when, if it came again after all."""

    count: int
    move: int
    again_at: float | None = None


class Outlived:
    """Remembers at which move each exception came; a move is a look at the logs in which the lowest rank had moved."""

    def __init__(self) -> None:
        self._moves = 0
        self._step: int | None = None
        self._raised: dict[_Key, _Raised] = {}

    def move(self, steps: Mapping[int | None, int]) -> None:
        """Take the last step of each rank, as long as no rank has ended badly."""
        if not steps:
            return
        step = steps[min(steps, key=lambda rank: -1 if rank is None else rank)]
        self._moves += step != self._step
        self._step = step

    def note(self, evidence: Iterable[Evidence], now: float) -> None:
        """Take everything that was found so far; call it after :meth:`move`."""
        for one in evidence:
            known = self._raised.get(_key(one))
            if not _fault(one) or (known and known.count == one.count):
                continue
            again_at = now if known and (self._over(known) or known.again_at is not None) else None
            self._raised[_key(one)] = _Raised(one.count, self._moves, again_at)

    def told(self, one: Evidence) -> Evidence:
        """Return evidence for what it is: none of a cause, where the program went on afterwards."""
        raised = self._raised.get(_key(one))
        if raised is None:
            return one
        if self._over(raised):
            return replace(one, role=Role.CONTEXT)
        return one if raised.again_at is None else replace(one, at=raised.again_at)

    def _over(self, raised: _Raised) -> bool:
        return self._moves - raised.move >= LOOKS


def _fault(one: Evidence) -> bool:
    """Whether this is said to end a program. Numbers that went wrong stay wrong while it goes on."""
    blamed = one.blame in (Blame.PROGRAM, Blame.NETWORK) and one.failure_class is not FailureClass.NUMERIC
    return one.source == "log" and one.role is Role.ROOT and blamed


def _key(one: Evidence) -> _Key:
    return one.file, one.signature, one.line
