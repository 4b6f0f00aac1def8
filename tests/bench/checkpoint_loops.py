"""What saves cost a training loop, and what staging in memory spares the store. Used by ``checkpoint.py``."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from checkpoint_rank import state_of

from transomd.tce import CheckpointEngine

Row = tuple[str, str, str]
STEP_S = 0.2


class Work:
    """A step of training that takes STEP_S on this machine when it is idle: a fixed number of products."""

    def __init__(self) -> None:
        self._matrix = torch.rand(512, 512)
        self._products = 1
        begun = time.perf_counter()
        self.step(products=50)
        self._products = max(1, round(50 * STEP_S / (time.perf_counter() - begun)))

    def step(self, products: int | None = None) -> None:
        for _ in range(products or self._products):
            self._matrix = self._matrix @ self._matrix
            self._matrix /= self._matrix.max()


def slower(folder: Path, gib: float, steps: int, every: int, storage_every: int, repeats: int) -> Iterator[float]:
    """How much slower a loop of ``steps`` is that saves each ``every`` steps, again and again beside one that does not.

    The engine is there both times; storage has caught up before each.
    """
    state, work = state_of(gib, 300), Work()
    with CheckpointEngine(folder, rank=0, world_size=1, keep=1, storage_every=storage_every) as engine:
        numbers = count(1)

        def loop(saving: bool) -> float:
            begun, handle = time.perf_counter(), None
            for step in range(steps):
                work.step()
                if saving and step % every == every // 2:
                    number = next(numbers)
                    handle = engine.save(number, {"model": state, "step": number})
            seconds = time.perf_counter() - begun
            if handle is not None and handle.step % storage_every == 0:
                handle.wait("storage", timeout=120)
            return seconds

        loop(saving=True)  # what the first save costs is in the other table
        for repeat in range(repeats):
            # By turns, so that a machine that grows slower or faster meanwhile favours neither.
            first = bool(repeat % 2)
            seconds = {saving: loop(saving) for saving in (first, not first)}
            yield seconds[True] / seconds[False] - 1
    shutil.rmtree(folder)


def loop_rows(folder: Path, repeats: int, quick: bool) -> list[Row]:
    """The rows of the training loop."""

    def row(told: str, gib: float, steps: int, every: int, storage_every: int, must: str) -> Row:
        found = list(slower(folder / "loop", gib, steps, every, storage_every, repeats))
        return (f"loop, 200 ms steps, {told}: slower by", _percent(found), must)

    gib, large = (0.01, "10 MiB") if quick else (1.0, "1 GiB")
    return [
        row("100 MiB saved every step, to storage every 5th", 100 / 1024, 20, 1, 5, "< 5 %"),
        row("100 MiB saved every 10 s, each to storage", 100 / 1024, 50, 50, 1, "< 1 %"),
        row(f"{large} saved every 10 s, each to storage", gib, 50, 50, 1, ""),
    ]


def spared(folder: Path, steps: int = 40) -> list[Row]:
    """Bytes and time on the store: every step on it, and every step in memory with every 10th on the store.

    Both lose at most one step when a process dies (or a node, where another one holds a copy of the memory).
    """
    found = []
    for storage_every in (1, 10):
        state, seconds = state_of(20 / 1024, 100), 0.0
        own = folder / f"every-{storage_every}"
        with CheckpointEngine(own, rank=0, world_size=1, keep=steps, storage_every=storage_every) as engine:
            for step in range(1, steps + 1):
                handle = engine.save(step, {"model": state, "step": step})
                assert handle.done("memory"), "a step is not in memory"
                begun = time.perf_counter()
                if step % storage_every == 0:
                    handle.wait("storage", timeout=120)
                    seconds += time.perf_counter() - begun
        found.append((sum(path.stat().st_size for path in own.rglob("*") if path.is_file()), seconds))
        shutil.rmtree(own)
    (all_bytes, all_s), (some_bytes, some_s) = found
    return [
        (
            "bytes on the store, every step in memory and every 10th on the store: less by",
            _less(some_bytes, all_bytes),
            ">= 60 %",
        ),
        ("time on the store, likewise: less by", _less(some_s, all_s), ">= 60 %"),
    ]


def _percent(values: list[float]) -> str:
    return (
        f"{100 * statistics.median(values):.1f} % ({100 * min(values):.1f} to {100 * max(values):.1f}, n {len(values)})"
    )


def _less(some: float, all_: float) -> str:
    return f"{100 * (1 - some / all_):.0f} %"
