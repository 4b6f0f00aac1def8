"""Power cuts at every point of a training's saves: what loads of every disk that may be left. See tce_disk.py."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tce_disk import Disk, Op, Promised, Tree, Turns, after_power_cut, lay_out

from transomd.tce import CheckpointEngine
from transomd.tce.handle import SaveHandle

LATER = 90
"""The epoch that loads after the power cut."""
Judge = Callable[[int, Path, bool], str]
"""Says what is wrong with a disk: the step that was promised, where it is laid out, whether to go on from it."""


LAST = (1, 2)
"""Of three ranks, those that hold something alike."""


def state_of(step: int, rank: int) -> dict[str, Any]:
    """Every element says its place and its step."""
    shared, own = torch.arange(1500) + 10_000 * step, torch.arange(300) + 10_000 * step + rank
    return {"shared": shared, "pair": shared + (rank in LAST), "own": own, "step": (step, rank)}


def engine_of(root: Path, rank: int, ranks: int, epoch: int) -> CheckpointEngine:
    """``save`` itself writes, by the same code as the keeper does."""
    declared = {"shared": range(ranks), **({"pair": LAST} if ranks == 3 and rank in LAST else {})}
    settings: dict[str, Any] = {"keep": 2, "replicated": declared, "memory": False}
    return CheckpointEngine(root / "c", rank=rank, world_size=ranks, epoch=epoch, **settings)


def trained(root: Path, seed: int, ranks: int, starts: tuple[int, ...] = (2, 1)) -> list[Op]:
    """What the saves of a program do to the disk, and what it was told, in one of the orders that may be.

    ``starts``: how many steps each start of the program saves.
    """
    dice, me = random.Random(seed), threading.local()
    turns = [Turns(dice, ranks)]
    disk = Disk(root, lambda: turns[0].step(me.rank))
    first = 1
    with disk.recording():
        for epoch, steps in enumerate(starts, 1):
            turns[0] = Turns(dice, ranks)
            work = partial(_save, disk, turns[0], me, ranks, epoch, range(first, first + steps))
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            first += steps
    return disk.ops


def _save(disk: Disk, turns: Turns, me: Any, ranks: int, epoch: int, steps: range, rank: int) -> None:
    me.rank = rank
    root = Path(disk.root)
    try:
        engine = engine_of(root, rank, ranks, epoch)
        handles: list[SaveHandle] = []
        for step in steps:
            handles.append(engine.save(step, state_of(step, rank)))
            for _ in range(3):
                turns.step(rank)
                _note(disk, handles)
        while any(handle.error is None for handle in handles):
            turns.step(rank)
            _note(disk, handles)
    finally:
        turns.leave()


def _note(disk: Disk, handles: list[SaveHandle]) -> None:
    for handle in [each for each in handles if each.done("storage")]:
        disk.promised(handle.step)
        handles.remove(handle)


def cuts(ops: list[Op], dice: random.Random, shares: Sequence[float]) -> Iterator[tuple[Tree, int, int]]:
    """Disks that may be left, none twice, each with the step that was promised and the cut.

    After every operation, for each of ``shares``: so much is lost of what was not synced.
    """
    seen: set[int] = set()
    promised = -1
    for end in range(1, len(ops) + 1):
        last = ops[end - 1]
        promised = max(promised, last.step) if isinstance(last, Promised) else promised
        for share in shares:
            tree = after_power_cut(ops[:end], lambda share=share: dice.random() < share, dice)  # type: ignore[misc]
            known = hash((promised, tuple(tree.items())))
            if known not in seen:
                seen.add(known)
                yield tree, promised, end


def found(
    seed: int, ranks: int, shares: Sequence[float], folder: Path, promises_only: bool = False
) -> tuple[int, list[str]]:
    """How many disks were looked at in one run, and what is wrong with what loads of them.

    ``promises_only``: only those that are left just after a program was told that a step is stored.
    """
    (folder / "disk").mkdir(parents=True)
    ops = trained(folder / "disk", seed, ranks)
    return looked_at(ops, seed, shares, folder, partial(judged, ranks), 0.2, promises_only)


def looked_at(
    ops: list[Op],
    seed: int,
    shares: Sequence[float],
    folder: Path,
    judge: Judge,
    going_on: float,
    promises_only: bool = False,
) -> tuple[int, list[str]]:
    """See ``found``. Disks are laid out below ``folder``, which is removed; such a share of them is gone on from."""
    dice = random.Random(seed)
    count, wrong = 0, []
    for tree, promised, end in cuts(ops, dice, shares):
        if promises_only and not isinstance(ops[end - 1], Promised):
            continue
        count += 1
        left = folder / "left"
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir()
        lay_out(tree, left)
        told = judge(promised, left, dice.random() < going_on)
        wrong += [f"after {end} of {len(ops)}: {told}"] if told else []
    shutil.rmtree(folder)
    return count, wrong


def judged(ranks: int, promised: int, folder: Path, go_on: bool) -> str:
    """What is wrong with what loads of a disk: '' if it is one whole step, not older than was promised.

    ``go_on``: also whether the next start can save and load.
    """
    try:
        steps = {_load(folder, rank, ranks, LATER) for rank in range(ranks)}
        if len(steps) != 1 or min(steps) < promised:
            return f"loaded {steps}, promised {promised}"
        if go_on:
            engines = [engine_of(folder, rank, ranks, LATER) for rank in range(ranks)]
            handles = [engine.save(99, state_of(99, engine.rank)) for engine in engines]
            if not all(handle.done("storage") for handle in handles):
                return f"the next start cannot save: {[handle.error for handle in handles]}"
            return (
                "" if {_load(folder, rank, ranks, LATER + 1) for rank in range(ranks)} == {99} else "99 is not loaded"
            )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _load(folder: Path, rank: int, ranks: int, epoch: int) -> int:
    state: dict[str, Any] = {}
    step = engine_of(folder, rank, ranks, epoch).load(state)
    if step is None:
        return -1
    wanted = state_of(step, rank)
    assert state["step"] == wanted["step"]
    assert all(torch.equal(state[key], wanted[key]) for key in ("shared", "pair", "own")), f"step {step} is torn"
    return step
