"""Whose turn it is to call a keeper, which may let one wait: one thread at a time, and no save waits for another's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_LOOK_S = 0.005


class Turn:
    """For all threads of a program."""

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._aside = False

    @contextlib.contextmanager
    def of_a_save(self) -> Iterator[None]:
        """Take the turn, after other saves. Raises OSError where somebody who is not to hold up a save has it."""
        while not self._taken.acquire(timeout=_LOOK_S):
            if self._aside:
                raise OSError("another keeper is being called")
        try:
            yield
        finally:
            self._taken.release()

    @contextlib.contextmanager
    def aside(self) -> Iterator[bool]:
        """For who is not to hold up a save, and does not wait for one: whether it has the turn."""
        if not self._taken.acquire(blocking=False):
            yield False
            return
        self._aside = True
        try:
            yield True
        finally:
            self._aside = False
            self._taken.release()
