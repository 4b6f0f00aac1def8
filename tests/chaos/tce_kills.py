"""Kills the program, the keeper or both at random points of save loops, and says what could be loaded then.

``python tests/chaos/tce_kills.py --seeds 1000``: one line of JSON per kill, and a summary; exit code 1 if anything was
lost or torn. The invariant: what is loaded is whole, and at least as new as the newest step that was acknowledged at a
stage that survived: ``memory`` when the keeper lived, ``storage`` whatever died.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import torch
from tce_keepers import keepers, own_place, wait_for

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints, verify

VICTIMS = ("program", "program", "program", "keeper", "both", "program then keeper")
_NOTE = struct.Struct("<qq")


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """Every element says which step it is of, so that a torn copy shows."""
    return {
        "shared": {str(i): torch.full((size,), float(step)) for i in range(6)},
        "turned": torch.full((8, 9), step, dtype=torch.int64).t(),
        "own": torch.full((100,), step * 100 + rank),
        "step": (step, rank),
    }


def loaded(directory: Path, rank: int, world_size: int, epoch: int, size: int) -> int:
    """The step that is loaded, -1 for none; AssertionError if any of it is of another step or rank."""
    engine = CheckpointEngine(directory, rank=rank, world_size=world_size, epoch=epoch, replicated=("shared",))
    state = state_of(0, 0, size)
    step = engine.load(state)
    if step is None:
        return -1
    assert state["step"] == (step, rank), state["step"]
    for tensor in (*state["shared"].values(), state["turned"]):
        assert bool(tensor.eq(step).all()), f"torn: {step}"
    assert bool(state["own"].eq(step * 100 + rank).all())
    return step


class Notes:
    """What a program has been promised, in a file that outlives it: newest step in memory, newest in storage."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(_NOTE.pack(-1, -1))

    def read(self) -> tuple[int, int]:
        memory, storage = _NOTE.unpack(self.path.read_bytes())
        return memory, storage

    def writer(self) -> Callable[[int, int], None]:
        descriptor = os.open(self.path, os.O_WRONLY)
        return lambda memory, storage: (os.pwrite(descriptor, _NOTE.pack(memory, storage), 0), None)[1]


def save_for_ever(directory: Path, rank: int, notes: list[Notes], size: int, pause: float) -> None:
    """Save steps 1, 2, 3 ...; note what each save promised, once it has returned.

    As in a training, no rank begins a step before all have done the one before.
    """
    world_size = len(notes)
    engine = CheckpointEngine(directory, rank=rank, world_size=world_size, epoch=1, replicated=("shared",))
    note = notes[rank].writer()
    handles: list[Any] = []
    memory = storage = -1
    for step in range(1, 100000):
        while min(other.read()[0] for other in notes) < step - 1 and step > 1:
            time.sleep(0.0002)
        handle = engine.save(step, state_of(step, rank, size))
        handles = [*handles[-5:], handle]
        memory = step if handle.done("memory") or handle.done("storage") else memory
        storage = max([storage, *(h.step for h in handles if h.done("storage"))])
        note(memory, storage)
        time.sleep(pause)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            traceback.print_exc()
            print(json.dumps({"crash": repr(error)}), flush=True)
            os._exit(1)
    return child


def one(seed: int, world_size: int) -> dict[str, Any]:
    """One kill; what was promised, what was loaded, and what is wrong with it ('': nothing)."""
    dice = random.Random(seed)
    size, pause = dice.choice([50, 3000, 60000]), dice.choice([0.0, 0.0, 0.002, 0.01])
    victim = dice.choice(VICTIMS)
    with own_place(killed=True) as directory:
        directory.mkdir()
        notes = [Notes(directory.parent / f"notes-{rank}") for rank in range(world_size)]
        programs = [
            forked(lambda rank=rank: save_for_ever(directory, rank, notes, size, pause))  # type: ignore[misc]
            for rank in range(world_size)
        ]
        enough = dice.randrange(0, 12)
        assert wait_for(lambda: min(note.read()[0] for note in notes) >= enough, 60), "the programs do not save"
        time.sleep(dice.uniform(0, 0.02))
        keeper = keepers(directory.parent)
        dice.shuffle(programs)
        if victim in ("keeper", "both"):
            kill(keeper)
        if victim == "keeper":
            time.sleep(dice.uniform(0, 0.05))
        kill(programs)
        if victim == "program then keeper":
            time.sleep(dice.uniform(0, 0.02))
            kill(keeper)
        for pid in programs:
            os.waitpid(pid, 0)
        told = {"seed": seed, "victim": victim, "size": size, **judged(directory, notes, victim, world_size, size)}
        kill(keepers(directory.parent) if told["wrong"] else [])
    return told


def judged(directory: Path, notes: list[Notes], victim: str, world_size: int, size: int) -> dict[str, Any]:
    memory = min(note.read()[0] for note in notes)
    storage = max(note.read()[1] for note in notes)
    if world_size > 1:
        # Without a process group ranks agree by what storage holds: all that was staged is brought there first.
        wait_for(lambda: not keepers(directory.parent), 90)
    steps: list[int] = []
    wrong = ""
    try:
        steps = [loaded(directory, rank, world_size, 2, size) for rank in range(world_size)]
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    least = memory if victim == "program" else storage
    wait_for(lambda: not keepers(directory.parent), 90)
    if not wrong and (len(set(steps)) != 1 or steps[0] < least):
        wrong = f"loaded {steps}, promised {least}"
    bad = [problem for c in list_checkpoints(directory) if c.complete for problem in verify(c.path)]
    return {"memory": memory, "storage": storage, "loaded": steps, "wrong": wrong or "; ".join(bad)}


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, wrong = time.monotonic(), 0
    for seed in range(options.first, options.first + options.seeds):
        told = one(seed, options.ranks)
        wrong += bool(told["wrong"])
        print(json.dumps(told), flush=True)
    took = time.monotonic() - begun
    print(json.dumps({"kills": options.seeds, "wrong": wrong, "seconds": round(took)}), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
