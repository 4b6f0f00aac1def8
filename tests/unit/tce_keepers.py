"""For tests of the memory tier: keepers in a place of their own, and that nothing of them is left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transom_slurm.sandbox import processes

from transomd.tce.memory.arena import Arena
from transomd.tce.memory.tenant import FENCED_S
from transomd.tce.memory.tier import MemoryTier

ENOUGH_S, SOON_S = 60.0, 25.0
"""Enough for whatever is to come, on a machine that pauses; soon, for what waits for nothing that stands still."""
VARIABLES = (
    *(f"TRANSOM_{name}" for name in ("CHECKPOINT_DIR", "EPOCH", "RESUME_STEP", "CHECKPOINT_KEEP", "AGENT")),
    "TRANSOM_CHECKPOINT_MEMORY",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_MEM_PER_NODE"),
)


@contextmanager
def own_place(killed: bool = False) -> Iterator[Path]:
    """A folder in memory for checkpoints, beside one where keepers listen; at the end no keeper may be there.

    ``killed``: keepers are killed, so that an empty socket may be left, which the next keeper removes.
    """
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    before = {name: os.environ.pop(name, None) for name in (*VARIABLES, "XDG_RUNTIME_DIR")}
    folder = Path(tempfile.mkdtemp(prefix="tcem-", dir=base))
    try:
        os.environ["XDG_RUNTIME_DIR"] = str(folder / "r")
        (folder / "r").mkdir(mode=0o700)
        yield folder / "c"
        gone = wait_for(lambda: not (keepers(folder) or (not killed and list((folder / "r").iterdir()))), FENCED_S + 60)
        assert gone, f"left over: {keepers(folder)} {list((folder / 'r').iterdir())}"
    finally:
        for pid in keepers(folder):
            os.kill(pid, 9)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop("XDG_RUNTIME_DIR", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def state_of(step: int) -> dict[str, Any]:
    """What a program may save: all of it is of that step."""
    return {"x": torch.full((5000,), float(step)), "step": step}


def keepers(folder: Path) -> list[int]:
    """Processes of the keepers that listen below ``folder``."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            dead = stat_of(Path(f"/proc/{name}"))[0] in "ZX"
        except OSError:
            continue
        if not dead and b"transomd.tce.keeper" in command and any(str(folder).encode() in part for part in command):
            found.append(int(name))
    return found


def keeper_of(directory: Path) -> int:
    """The one keeper of the checkpoints in ``directory``."""
    (pid,) = keepers(directory.parent)
    return pid


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until it stands still."""
    processes.stop([pid])


def stat_of(process: Path) -> list[str]:
    """What /proc/PID/stat, or that of a thread, says from the state on."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def arena_of(memory: MemoryTier | None) -> Arena:
    """The memory that a program has now, to look into or to damage."""
    assert memory is not None
    arena = memory._pool.arena
    assert arena is not None
    return arena


def newest_slot(arena: Arena) -> int:
    """Where the newest step is."""
    return max(range(arena.slots), key=lambda slot: arena.state(slot).order)


def wait_for(true: Callable[[], Any], seconds: float = ENOUGH_S) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
