"""Whether a job still advances, by the step numbers in its logs or that it reports. Pure: the clock is passed in."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from transomd.tee.types import Chunk

DEFAULT_PATTERN = (
    r"(?i)(?<![a-z_])(?<!from )(?:global[_ ]?step|step|iter(?:ation)?)\b[\"']?\s{0,4}[:=#]?\s{0,6}"
    r"(?P<step>\d{1,12})(?!\d|\.\d|\s?m?s\b)"
)
"""Finds ``step 12``, ``step=12``, ``iteration 12/1000``, ``global_step: 12``, ``"step": 12``; no step times, and not
what a program says when it loads a checkpoint: ``resumed from step 12``."""

_RECENT = 64
_ENOUGH = 5


@dataclass(frozen=True, slots=True)
class Stall:
    """No step for ``seconds``, where ``limit`` seconds were allowed."""

    seconds: float
    limit: float
    step: int | None = None


class Progress:
    """Follows the step numbers of one launch.

    The limit is ``factor`` times what a slow recent step took (the 90th percentile, so that checkpoints and evaluations
    count), never under ``floor_s``; until ``_ENOUGH`` steps were seen, and after :meth:`restarted`, it is ``first_s``.
    ``pattern`` needs a group, named ``step`` or the first. Raises ValueError for one without.
    """

    def __init__(
        self,
        pattern: str = DEFAULT_PATTERN,
        *,
        now: float,
        factor: float = 10.0,
        floor_s: float = 120.0,
        first_s: float = 1800.0,
    ) -> None:
        self._pattern = re.compile(pattern.encode())
        if not self._pattern.groups:
            raise ValueError(f"progress pattern {pattern!r} has no group for the step number")
        self._group: str | int = "step" if "step" in self._pattern.groupindex else 1
        self._factor, self._floor, self._first = factor, floor_s, first_s
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._steps: dict[int | None, int] = {}
        self._best: int | None = None
        self._moved_at = now
        self.first: int | None = None
        """The first step number that was read in this launch."""

    @property
    def step(self) -> int | None:
        """The highest step that any rank is at, or None."""
        return max(self._steps.values(), default=None)

    @property
    def steps(self) -> dict[int | None, int]:
        """The last step of each rank; under None that of files which belong to no rank."""
        return dict(self._steps)

    def feed(self, chunk: Chunk, now: float) -> None:
        """Read the newest step number in ``chunk``, which was read at ``now``."""
        found = [m[self._group] for m in self._pattern.finditer(chunk.data)]
        steps = [int(digits) for digits in found if digits and digits.isdigit()]
        if steps:
            self.first = steps[0] if self.first is None else self.first
            self.note(chunk.rank, steps[-1], now)

    def note(self, rank: int | None, step: int, now: float) -> None:
        """Take a rank's step number. Any change is progress; how long a step takes is learned from the highest."""
        if self._steps.get(rank) == step:
            return
        self._steps[rank] = step
        if self._best is not None and self._best < step <= self._best + 1000:
            self._times.append((now - self._moved_at) / (step - self._best))
        if self._best is None or step > self._best:
            self._best = step
        self._moved_at = now

    def restarted(self, now: float) -> None:
        """Begin a new launch: steps start anew and the first one may take long again; step times stay learned."""
        self._steps.clear()
        self._best = self.first = None
        self._moved_at = now

    def limit(self) -> float:
        """How long the next step may take, in seconds."""
        if self._best is None or len(self._times) < _ENOUGH:
            return max(self._first, self._floor)
        slow = sorted(self._times)[int(len(self._times) * 0.9)]
        return max(self._floor, self._factor * slow)

    def stalled(self, now: float) -> Stall | None:
        """Return how long nothing has moved, if that is too long."""
        waited, limit = now - self._moved_at, self.limit()
        return Stall(waited, limit, self.step) if waited > limit else None
