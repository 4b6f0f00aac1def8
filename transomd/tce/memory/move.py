"""Moving memory with a few threads: a single one reaches only a part of what a node's memory can do. No torch.

With the kernel of ``stream.c`` where it was built, else with ``memmove``, which takes half as long again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

MOST_THREADS = 4
_CHUNK = 8 << 20
_SHORT = 64 << 10
"""Bytes up to which a copy through the caches is the better one."""
Run = tuple[int, int, int]
"""Where to, where from, how many bytes."""


def move(runs: Iterable[Run]) -> None:
    """Copy all runs, which must not overlap; the memory must stay until this returns.

    Other threads of the program go on meanwhile. Threads that the scheduler leaves waiting are not waited for.
    """
    todo = deque(piece for run in runs for piece in _cut(run))
    helpers = []
    if len(todo) > 1 and threads() > 1:
        # At the end of the interpreter no thread is to be had any more.
        with contextlib.suppress(RuntimeError):
            helpers = [_pool(os.getpid()).submit(_work, todo) for _ in range(threads() - 1)]
    _work(todo)
    for helper in helpers:
        if not helper.cancel():
            helper.result()


def threads() -> int:
    """How many threads copy: at most 4, and no more than this rank's share of the processors it may run on."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return max(1, min(MOST_THREADS, share))


def _work(todo: deque[Run]) -> None:
    streamed = stream() or ctypes.memmove
    while True:
        try:
            to, source, size = todo.popleft()
        except IndexError:
            return
        (streamed if size > _SHORT else ctypes.memmove)(to, source, size)


@cache
def stream() -> Callable[[int, int, int], Any] | None:
    """The kernel that copies past the caches; None where it was not built, or not for this machine."""
    try:
        kernel = ctypes.CDLL(str(Path(__file__).with_name("stream.so"))).transom_stream_copy
    except (OSError, AttributeError):
        return None
    kernel.argtypes, kernel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    copy: Callable[[int, int, int], Any] = kernel
    return copy


def _cut(run: Run) -> Iterable[Run]:
    to, source, size = run
    return ((to + at, source + at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK))


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The helpers of this process: those of the process it was forked from do not live here."""
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix=f"transom-move-{pid}")
