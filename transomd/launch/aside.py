"""Calls that may hang for ever, as on a dead file system, made in threads that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
NO_ANSWER = "the file system does not answer"


class Aside:
    """Makes one call at a time, each with a deadline (seconds); a thread that hangs keeps nothing alive."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._pending: asyncio.Future[Any] | None = None

    async def free(self, within_s: float) -> None:
        """Wait for an earlier call that has not come back, but not for ever."""
        if self._pending is not None and not self._pending.done():
            await asyncio.wait([self._pending], timeout=within_s)

    async def ask(self, call: Callable[..., T], *args: Any) -> T:
        """Return what the call returns or raise what it raises.

        Raises TimeoutError when it takes too long, and at once while an earlier call has not come back; OSError where
        no thread is to be had.
        """
        if self._pending is not None and not self._pending.done():
            raise TimeoutError(NO_ANSWER)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending = future

        def work() -> None:
            answer: T | None = None
            problem: Exception | None = None
            try:
                answer = call(*args)
            except Exception as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, answer, problem)

        try:
            threading.Thread(target=work, name="aside", daemon=True).start()
        except RuntimeError as error:
            # The program's threads count, too, where a user or a job may have so many. It is no fault of the call's.
            self._pending = None
            raise OSError(errno.EAGAIN, f"nothing can be asked: {error}") from error
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._within_s)
        except asyncio.TimeoutError:
            # On Python 3.10 that is no OSError yet, and without a word.
            raise TimeoutError(NO_ANSWER) from None


def _settle(future: asyncio.Future[Any], answer: Any, problem: Exception | None) -> None:
    if problem is None:
        future.set_result(answer)
    else:
        future.set_exception(problem)
        future.exception()  # nobody may be waiting any more, and that is no fault
