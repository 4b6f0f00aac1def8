"""Whose turn it is to call a keeper, which may let one wait: one thread at a time, and no save waits for another's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_LOOK_S = 0.005


class Turn:
    """For all threads of a program, and for what a signal's handler does amid a turn of its own thread."""

    def __init__(self) -> None:
        self._taken = threading.RLock()
        self._used = self._aside = False

    @contextlib.contextmanager
    def of_a_save(self) -> Iterator[None]:
        """Take the turn, after other saves. Raises OSError where somebody who is not to hold up a save has it.

        So it does amid a turn of this very thread, which would wait for itself.
        """
        while not self._taken.acquire(timeout=_LOOK_S):
            if self._aside:
                raise OSError("another keeper is being called")
        with self._use() as mine:
            if not mine:
                raise OSError("a keeper is being called")
            yield

    @contextlib.contextmanager
    def aside(self) -> Iterator[bool]:
        """For who is not to hold up a save, and does not wait for one: whether it has the turn."""
        if not self._taken.acquire(blocking=False):
            yield False
            return
        with self._use() as mine:
            if not mine:
                yield False
                return
            self._aside = True
            try:
                yield True
            finally:
                self._aside = False

    @contextlib.contextmanager
    def _use(self) -> Iterator[bool]:
        """Whether the turn, which was taken, was not in use by this thread; it is given back as often as taken."""
        try:
            if self._used:
                yield False
                return
            self._used = True
            try:
                yield True
            finally:
                self._used = False
        finally:
            self._taken.release()
