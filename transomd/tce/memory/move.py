"""Moving memory with a few threads. No torch.

With the kernel of ``stream.c`` where it was built, else with ``memmove``, which takes about 1.7 times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from transomd.tce.crew import together

LIBRARY = "stream.x86_64.so"
"""The kernel, beside this file. The second dot keeps Python from taking it for a module."""
_CHUNK = 8 << 20
_SHORT = 64 << 10
"""Bytes up to which a copy through the caches is the better one."""
Run = tuple[int, int, int]
"""Where to, where from, how many bytes."""


def move(runs: Iterable[Run]) -> None:
    """Copy all runs, which must not overlap; the memory must stay until this returns."""
    together([piece for run in runs for piece in _cut(run)], _copy)


def _copy(runs: Iterator[Run]) -> Iterable[None]:
    streamed = stream() or ctypes.memmove
    for to, source, size in runs:
        (streamed if size > _SHORT else ctypes.memmove)(to, source, size)
    return ()


@cache
def stream() -> Callable[[int, int, int], Any] | None:
    """The kernel that copies past the caches; None where it was not built, or not for this machine."""
    try:
        kernel = ctypes.CDLL(str(Path(__file__).with_name(LIBRARY))).transom_stream_copy
    except (OSError, AttributeError):
        return None
    kernel.argtypes, kernel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    copy: Callable[[int, int, int], Any] = kernel
    return copy


def _cut(run: Run) -> Iterable[Run]:
    to, source, size = run
    return ((to + at, source + at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK))
