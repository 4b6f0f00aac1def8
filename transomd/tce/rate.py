"""Caps on bytes per second: what a node's keeper writes to storage, and sends to its partner. None by default."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from transomd.forms import parse_size
from transomd.tce.image import FileImage, PartImage, Piece

log = logging.getLogger("transom.tce.keeper")

STORAGE = "TRANSOM_CHECKPOINT_STORAGE_RATE"
REPLICA = "TRANSOM_CHECKPOINT_REPLICA_RATE"
CHUNK = 16 << 20
BURST_S = 0.25
"""Of how many seconds what was not used may be made up for."""
NAP_S = 0.1
"""How often a wait is broken off to see whether it is still to be."""


@dataclass
class TokenBucket:
    """Lets ``rate`` bytes a second pass, after a pause at most ``burst`` at once. Pure: ``now`` is anybody's clock.

    What is taken beyond what is there is owed, so that a piece may be larger than ``burst``.
    """

    rate: float
    burst: float
    level: float = 0.0
    at: float | None = None

    def take(self, count: int, now: float) -> float:
        """Take ``count`` bytes; how many seconds from ``now`` on they are to wait."""
        passed = 0.0 if self.at is None else max(0.0, now - self.at)
        self.level = min(self.burst, self.level + passed * self.rate) - count
        self.at = now
        return max(0.0, -self.level / self.rate)


class Cap:
    """A bucket that several threads share, or none at all (``rate`` 0)."""

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock = clock
        self._sleep = sleep
        self._bucket = TokenBucket(rate, rate * BURST_S) if rate > 0 else None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, environ: Mapping[str, str], name: str) -> Cap:
        """The cap in a variable (``500M``: bytes per second); none where it is unset. What is no size is told."""
        text = environ.get(name, "")
        rate = parse_size(text)
        if text and rate is None:
            log.warning("%s is %r, which is no number of bytes such as 500M; there is no cap", name, text)
        return cls(rate or 0)

    def wait(self, count: int, lifted: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``count`` bytes more may pass; at once where there is no cap, or it is ``lifted``."""
        if self._bucket is None or lifted():
            return
        with self._lock:
            until = self._clock() + self._bucket.take(count, self._clock())
        while (left := until - self._clock()) > 0 and not lifted():
            self._sleep(min(left, NAP_S))

    def seconds(self, count: int) -> float:
        """How long so many bytes take at least."""
        return count / self.rate if self.rate > 0 else 0.0

    def through(self, part: PartImage, lifted: Callable[[], bool]) -> PartImage:
        """The part, whose bytes pass as they may."""
        if self._bucket is None:
            return part
        return replace(part, files=tuple(self._file(file, lifted) for file in part.files))

    def portions(self, content: memoryview, lifted: Callable[[], bool]) -> Iterable[memoryview]:
        """The bytes, as they may pass, in portions so small that whoever waits for them sees some come all the time."""
        if self._bucket is None:
            return [content]
        return self._slowly([content], max(1, int(self.rate * BURST_S)), lifted)

    def _file(self, file: FileImage, lifted: Callable[[], bool]) -> FileImage:
        pieces = file.pieces if file.whole is None else lambda: [file.whole or b""]
        # Digests are taken piece by piece.
        size = CHUNK if file.known is not None else file.bytes + 1
        return replace(file, pieces=lambda: self._slowly(pieces(), size, lifted), whole=None)

    def _slowly(self, pieces: Iterable[Piece], size: int, lifted: Callable[[], bool]) -> Iterator[memoryview]:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, max(1, len(view)), size):
                chunk = view[start : start + size]
                self.wait(len(chunk), lifted)
                yield chunk
