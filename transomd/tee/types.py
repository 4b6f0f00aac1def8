"""What TEE works on: pieces of evidence go in, one verdict comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transomd.words import Action, Blame, Confidence, FailureClass, Role

MAX_TEXT = 500
"""Characters of a line that are kept; job output is hostile input."""


LATEST = 1e11
"""Unix seconds that no clock will show; a time at or beyond it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation that bears on a failure.

    ``source`` is one of ``log kernel slurm exit heartbeat progress probe process``; ``signature`` is an id from the
    catalogue, or a built-in one (``HEARTBEAT-LOST``, ``NO-PROGRESS``, ``EXIT``, ``SLURM-NODE-DOWN``, ``PROBE-...``).
    ``node`` and ``rank`` are where it was *printed or seen*; ``peer_nodes`` and ``peer_ranks`` are those it *names*.
    ``at`` is Unix seconds on the head node's clock as far as it is known. ``forgeable`` is what a user could have
    written: it may restart or exclude for that user's job, but never drains a node by itself.
    """

    source: str
    signature: str
    text: str
    role: Role
    failure_class: FailureClass = FailureClass.UNKNOWN
    blame: Blame = Blame.UNKNOWN
    action: Action = Action.RESTART
    at: float | None = None
    node: str = ""
    rank: int | None = None
    peer_nodes: tuple[str, ...] = ()
    peer_ranks: tuple[int, ...] = ()
    file: str = ""
    line: int | None = None
    count: int = 1
    forgeable: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :func:`transomd.tee.wire.read_evidence` reads."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes that came to one file: whole lines, but for the very last one and for lines longer than a chunk.

    ``node`` and ``rank`` say who writes the file, where that is known. ``fresh`` is set on the first chunk of a file
    that is new, or that was truncated or replaced: its lines count from 1.
    """

    file: str
    data: bytes
    node: str = ""
    rank: int | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What failed, whose fault it is and what to do. ``nodes`` are those blamed: with blame ``unknown`` there are none,
    while ``ranks`` may then still name those to look at. ``drainable`` nodes are those of ``nodes`` that evidence which
    no user can forge confirms. ``evidence`` begins with the piece that decided.
    """

    failure_class: FailureClass
    blame: Blame
    action: Action
    confidence: Confidence
    summary: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    drainable: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = field(default=())

    @classmethod
    def unknown(
        cls,
        summary: str,
        evidence: Sequence[Evidence] = (),
        ranks: tuple[int, ...] = (),
        failure_class: FailureClass = FailureClass.UNKNOWN,
        confidence: Confidence = Confidence.LOW,
    ) -> Verdict:
        """Blame nobody and start again in place: what is behind the failure is not known."""
        return cls(
            failure_class=failure_class,
            blame=Blame.UNKNOWN,
            action=Action.RESTART,
            confidence=confidence,
            summary=summary,
            ranks=ranks,
            evidence=tuple(evidence),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that :func:`transomd.tee.wire.read_verdict` reads."""
        data = {key: getattr(self, key) for key in self.__slots__ if key != "evidence"}
        return {**data, "evidence": [item.to_json() for item in self.evidence]}
