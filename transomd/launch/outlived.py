"""Which exceptions a program has made up for: it printed them, and went on with its steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from transomd.tee.types import Evidence
from transomd.words import Blame, FailureClass, Role

LOOKS = 3
"""In so many looks the program must have moved since: steps that were under way come to their end in the first."""

LINGERS_S = 30.0
"""How long a rank may take to end after its last words, for its threads, its children, or what it has to send first."""

_TORCHRUN = "TE-"
"""With this the signatures begin of what torchrun says itself, into the log that its ranks share."""

_Key = tuple[str, str, int | None]
Ended = Mapping[tuple[str, int | None], float]
"""When a rank ended, by its node and its number; without a number: all that the node has."""


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

    def told(self, evidence: Iterable[Evidence], ended: Ended) -> list[Evidence]:
        """Return evidence for what it is: none of a cause, where the program went on afterwards.

        But the last words of a rank that ``ended`` by itself soon after them are: others may go on without it.
        """
        found = [self._timed(one) for one in evidence]
        last = {one.file: one for one in sorted(filter(_word, found), key=_order)}
        return [
            replace(one, role=Role.CONTEXT)
            if self._over(self._raised.get(_key(one))) and not (one is last.get(one.file) and _ended_by(one, ended))
            else one
            for one in found
        ]

    def _timed(self, one: Evidence) -> Evidence:
        """Return evidence with the time at which it came again after all."""
        raised = self._raised.get(_key(one))
        return one if raised is None or raised.again_at is None else replace(one, at=raised.again_at)

    def _over(self, raised: _Raised | None) -> bool:
        return raised is not None and self._moves - raised.move >= LOOKS


def _fault(one: Evidence) -> bool:
    """Whether this is said to end a program. Numbers that went wrong stay wrong while it goes on."""
    blamed = one.blame in (Blame.PROGRAM, Blame.NETWORK) and one.failure_class is not FailureClass.NUMERIC
    return one.source == "log" and one.role is Role.ROOT and blamed


def _word(one: Evidence) -> bool:
    """Whether this is what a rank itself says of its end."""
    return one.at is not None and one.role is not Role.CONTEXT and not one.signature.startswith(_TORCHRUN)


def _key(one: Evidence) -> _Key:
    return one.file, one.signature, one.line


def _ended_by(one: Evidence, ended: Ended) -> bool:
    """Whether the rank that printed this ended by itself soon after."""
    at = ended.get((one.node, one.rank), ended.get((one.node, None)))
    return at is not None and one.at is not None and at - one.at <= LINGERS_S


def _order(one: Evidence) -> tuple[float, int]:
    return one.at or 0.0, one.line or 0
