"""Kills processes that save checkpoints, and says after each kill what can be loaded. Run by test_tce_kill.py.

One process imports torch and forks the rest, as an import takes seconds. ``steps``: one rank is killed before, and
then after, each call that changes the file system. ``random``: two ranks save as fast as they can and are killed at
random times. One line of JSON per kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.manifest import MANIFEST

os.environ["TRANSOM_CHECKPOINT_MEMORY"] = "off"  # save() itself writes to storage here
CALLS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")


def state_of(step: int, rank: int) -> dict[str, Any]:
    """Every part says which step and rank it is of."""
    return {
        "shared": torch.full((2000,), float(step)),
        "own": torch.full((1000,), step * 100 + rank),
        "step": (step, rank),
    }


def loaded(directory: Path, rank: int, world_size: int, epoch: int) -> int:
    """The step that is loaded, -1 for none; AssertionError if any of it is of another step or rank."""
    engine = CheckpointEngine(directory, rank=rank, world_size=world_size, epoch=epoch, replicated=("shared",))
    state = state_of(0, 0)
    step = engine.load(state)
    if step is None:
        return -1
    wanted = state_of(step, rank)
    assert state["step"] == wanted["step"]
    assert state["own"].equal(wanted["own"])
    assert state["shared"].equal(wanted["shared"])
    return step


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a child; its wait status is to be collected by the caller."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(json.dumps({"crash": repr(error)}), flush=True)
            os._exit(1)
    return child


def kill_at(call: int, after: bool) -> None:
    """Let the process die by SIGKILL at its ``call``-th change of the file system."""
    count = 0

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def doing(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
            finally:
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        return doing

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def step_by_step(base: Path) -> None:
    """Steps 1 and 2 are there; step 3 is saved, which removes step 1; then a new start saves step 4."""
    call = 0
    finished = False
    while not finished:
        call += 1
        for after in (False, True):
            directory = base / f"{call}-{after}"
            prepared = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, keep=2, replicated=("shared",))
            for step in (1, 2):
                prepared.save(step, state_of(step, 0))

            _, status = os.waitpid(forked(partial(save_and_die, directory, call, after)), 0)
            finished = not os.WIFSIGNALED(status)
            step = loaded(directory, 0, 1, epoch=2)
            again = CheckpointEngine(directory, rank=0, world_size=1, epoch=2, keep=2, replicated=("shared",))
            again.save(4, state_of(4, 0)).wait(timeout=60)
            told = {"call": call, "after": after, "killed": not finished, "step": step}
            told |= {"next": loaded(directory, 0, 1, epoch=2), "left": left_over(directory)}
            print(json.dumps(told), flush=True)
            shutil.rmtree(directory)


def save_and_die(directory: Path, call: int, after: bool) -> None:
    """Save step 3, and die on the way."""
    engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, keep=2, replicated=("shared",))
    kill_at(call, after)
    engine.save(3, state_of(3, 0))


def left_over(directory: Path) -> list[str]:
    """Checkpoints that are not whole, and temporary files, but for a second name of a manifest: that is one file."""
    checkpoints = list_checkpoints(directory)
    manifests = [c.path / MANIFEST for c in checkpoints if c.complete]
    stray = [path for path in directory.rglob("*.tmp") if not any(path.samefile(known) for known in manifests)]
    return [c.path.name for c in checkpoints if not c.complete] + [path.name for path in stray]


def two_ranks(base: Path, seeds: int) -> None:
    """Both ranks save steps as fast as they can; both are killed, one somewhat later than the other."""
    for seed in range(seeds):
        dice = random.Random(seed)
        directory = base / f"r{seed}"
        ranks = [forked(partial(save_for_ever, directory, rank)) for rank in (0, 1)]
        dice.shuffle(ranks)
        wait_for(directory, dice.randrange(-1, 9))
        time.sleep(dice.uniform(0, 0.03))
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
            time.sleep(dice.choice([0, 0, dice.uniform(0, 0.02)]))
        for rank in ranks:
            os.waitpid(rank, 0)
        acknowledged = max(last_acknowledged(directory, rank) for rank in (0, 1))
        steps = [loaded(directory, rank, 2, epoch=2) for rank in (0, 1)]
        bad = [problem for c in list_checkpoints(directory) if c.complete for problem in verify(c.path)]
        print(json.dumps({"seed": seed, "acknowledged": acknowledged, "steps": steps, "bad": bad}), flush=True)
        shutil.rmtree(directory, ignore_errors=True)


def wait_for(directory: Path, step: int) -> None:
    """Wait until a rank saw ``step`` complete; not for a time, as the machine may be busy."""
    deadline = time.monotonic() + 60
    while max(last_acknowledged(directory, rank) for rank in (0, 1)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def save_for_ever(directory: Path, rank: int) -> None:
    """Save steps 1, 2, 3 ...; note each that was seen complete."""
    engine = CheckpointEngine(directory, rank=rank, world_size=2, epoch=1, replicated=("shared",))
    with open(directory / f"acknowledged-{rank}", "w") as file:
        for step in range(1, 10000):
            engine.save(step, state_of(step, rank)).wait(timeout=60)
            file.write(f"{step}\n")
            file.flush()


def last_acknowledged(directory: Path, rank: int) -> int:
    """The last step that a rank saw complete, -1 if none was."""
    path = directory / f"acknowledged-{rank}"
    lines = path.read_text().split("\n") if path.exists() else []
    return int(lines[-2]) if len(lines) > 1 else -1


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True)
    if sys.argv[1] == "steps":
        step_by_step(folder)
    else:
        two_ranks(folder, int(sys.argv[3]))
