"""A few threads for one piece of work: a single one reaches only a part of what a node's memory can do. No torch."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

MOST_THREADS = 4
Item = TypeVar("Item")
Found = TypeVar("Found")


def together(items: Iterable[Item], work: Callable[[Iterator[Item]], Iterable[Found]]) -> list[Found]:
    """What ``work`` gives, run by this thread and by helpers at the same time, each taking of the items what is left.

    Other threads of the program go on meanwhile. Helpers that the scheduler leaves waiting are not waited for, unless
    they have begun. Raises what ``work`` raises.
    """
    todo = deque(items)
    helpers: list[Future[list[Found]]] = []
    try:
        # At the end of the interpreter no thread is to be had any more.
        with contextlib.suppress(RuntimeError):
            for _ in range(min(len(todo), threads()) - 1):
                helpers.append(_pool(os.getpid()).submit(lambda: list(work(taken(todo)))))
        found = list(work(taken(todo)))
    finally:
        todo.clear()  # where the work was broken off, by Ctrl-C perhaps
        begun = [helper for helper in helpers if not helper.cancel()]
        _wait(begun)
    return [*found, *(each for helper in begun for each in helper.result())]


def _wait(helpers: list[Future[list[Found]]]) -> None:
    """Wait, whatever comes: they use memory that is the caller's."""
    try:
        wait(helpers)
    except BaseException:
        _wait(helpers)
        raise


def taken(todo: deque[Item]) -> Iterator[Item]:
    """What is left to do, for one of several threads that share it."""
    while True:
        try:
            yield todo.popleft()
        except IndexError:
            return


def threads() -> int:
    """How many threads work: at most 4, and no more than this rank's share of the processors it may run on."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(1, min(MOST_THREADS, share))


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The helpers of this process: those of the process it was forked from do not live here."""
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix=f"transom-{pid}")
