"""Which steps storage gets while memory holds them all: those that a number divides, or as often as it is worth it.

Ranks must store the same steps, and no save asks another rank. With ``auto`` each rank chooses for itself, from its own
measures, which differ a little. So it chooses a power of two, N, and storage gets the first step that is saved in each
window of N steps. A window of 2N begins where one of N begins: what the rank with the longest windows stores, every
rank stores, whenever each of them changes its mind. What a rank with shorter ones stores besides, the others join as
long as they have it in memory (see ``memory.due``). It is windows and not multiples, because a program may save at
steps that no such number divides.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from transomd.forms import seconds
from transomd.tce import interval
from transomd.tce.environment import at_least
from transomd.tce.errors import CheckpointError

log = logging.getLogger("transom.tce")

AUTO: Literal["auto"] = "auto"
CHOSEN = 0
"""Instead of a number of steps: the program's rank chooses it, and tells the keeper which steps are to be stored."""
NODE_MTTF = "TRANSOM_CHECKPOINT_NODE_MTTF"
_PACES, _COSTS = 8, 5
_SEEN = 64
_DUE = 16
"""More than there are slots in which such a step may still wait for storage."""


def every_of(told: int | Literal["auto"]) -> int:
    """The number of steps of an argument ``storage_every``; CHOSEN for ``auto``. CheckpointError for anything else."""
    if isinstance(told, str):
        if told != AUTO:
            raise CheckpointError(f"storage_every is {told!r} and must be a whole number of at least 1, or 'auto'")
        return CHOSEN
    return at_least(told, 1, "storage_every")


class Every(NamedTuple):
    """Which steps go on from memory: to storage, as of ``every_of``; to another node those that ``replica`` divides."""

    storage: int = 1
    replica: int = 1


EVERY_STEP = Every()


class Measured(NamedTuple):
    """What an interval follows from, in seconds: what a write and a step take, and how long the job works at a time."""

    write_s: float
    step_s: float
    mttf_s: float


class Fixed:
    """A stage gets the steps that ``every`` divides."""

    def __init__(self, every: int) -> None:
        self.rule = f"the steps that {every} divides"
        self._every = every

    def saves(self, step: int) -> None:
        """The program saves this step."""

    def took(self, busy_s: float) -> None:
        """The stage was busy so long with a step."""

    def due(self, step: int) -> bool:
        """Whether the stage is to get this step."""
        return step % self._every == 0

    def told(self) -> dict[str, Any]:
        """What the keeper must hear to know which steps are due."""
        return {}


class Auto:
    """As ``Fixed``, by measure: the interval that loses least to writing and to failures (see ``interval``).

    Every step until storage has completed one. ``every`` is the windows' length in steps, ``measured`` what it follows
    from (None: nothing is measured yet).
    """

    def __init__(self, mttf_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = 1
        self.measured: Measured | None = None
        self._mttf_s = mttf_s
        self._clock = clock
        self._last: tuple[int, float] | None = None
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._seen: deque[int] = deque(maxlen=_SEEN)
        self._due: deque[int] = deque(maxlen=_DUE)

    @property
    def rule(self) -> str:
        """What storage gets, for people."""
        return f"the first step that is saved in every {self.every} (chosen by measure)"

    def saves(self, step: int) -> None:
        """Note that the program saves this step, also where it is not staged; decides whether storage gets it."""
        if step in self._seen or step < 0:
            return
        now, last = self._clock(), self._last
        if last is not None and step > last[0]:
            self._paces.append((now - last[1]) / (step - last[0]))
        self._choose()
        self._last = step, now
        self._seen.append(step)
        if last is None or step // self.every != last[0] // self.every:
            self._due.append(step)

    def took(self, busy_s: float) -> None:
        """Storage was busy so long with a step, of all ranks."""
        self._costs.append(busy_s)

    def due(self, step: int) -> bool:
        """Whether storage is to get this step."""
        return step in self._due

    def told(self) -> dict[str, Any]:
        """What the keeper must hear to know which steps are due, and what it tells people."""
        measured = self.measured._asdict() if self.measured else {}
        return {"due": list(self._due), "every": self.every, "measured": measured}

    def _choose(self) -> None:
        if not self._paces or not self._costs:
            return
        pace, busy = max(statistics.median(self._paces), 1e-9), statistics.median(self._costs)
        self.measured = Measured(busy, pace, self._mttf_s)
        every = interval.settled(self.every, interval.interval_s(busy, self._mttf_s) / pace)
        if every != self.every:
            self.every = every
            log.info(
                "storage gets %s: a write takes %.2f s, a step %.2f s, and the job's MTTF is %.2f h",
                *(self.rule, busy, pace, self._mttf_s / 3600),
            )


def schedule_of(every: int, environ: Mapping[str, str] = os.environ) -> Fixed | Auto:
    """What ``every_of`` stands for. For CHOSEN, the environment tells the number of nodes and the MTTF of one."""
    return Auto(_mttf_s(environ)) if every == CHOSEN else Fixed(every)


def _mttf_s(environ: Mapping[str, str]) -> float:
    told = (environ.get(name, "") for name in ("NNODES", "GROUP_WORLD_SIZE", "SLURM_NNODES"))
    nodes = next((int(number) for number in told if number.isdecimal() and int(number)), 1)
    text = environ.get(NODE_MTTF, "")
    try:
        node_s = seconds(text) if text else interval.NODE_MTTF_S
    except ValueError as error:
        log.warning(
            "%s %s; the MTTF of a node is taken to be %.0f days", NODE_MTTF, error, interval.NODE_MTTF_S / 86400
        )
        node_s = interval.NODE_MTTF_S
    return interval.job_mttf_s(nodes, node_s or interval.NODE_MTTF_S)
