"""Saves through DCP and is killed at some point, again and again: ``dcp_killed.py DIR ROUNDS SEED``.

After each kill the newest checkpoint must be whole and at least as new as the last save that returned. The children
are forked from one process that has imported torch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from transomd.tce.dcp import TransomStorageWriter, load_newest


def save_for_ever(place: Path, epoch: int, told: int) -> None:
    """Save step after step; each that is complete is told through the pipe."""
    writer = TransomStorageWriter(place, epoch=epoch, keep=2)
    for step in range(epoch * 1000, (epoch + 1) * 1000):
        state = {"w": torch.full((5000,), float(step)), "x": torch.full((3, 3), step), "step": step}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step))
        os.write(told, step.to_bytes(8, "little"))


def killed_once(place: Path, epoch: int, wait_s: float) -> int:
    """Start a child and kill it ``wait_s`` after its first save; returns the last step that was told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        save_for_ever(place, epoch, writer)
        os._exit(1)
    os.close(writer)
    first = os.read(reader, 8)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    rest = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    return int.from_bytes((first + rest)[-8:], "little")


def main() -> int:
    """Kill, load, compare."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    place, rounds, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    for epoch in range(1, rounds + 1):
        told = killed_once(place, epoch, chance.uniform(0, 0.05))
        state = {"w": torch.zeros(5000), "x": torch.zeros(3, 3, dtype=torch.int64), "step": 0}
        step = load_newest(state, place)
        held = {int(value) for value in (*state["w"].unique(), *state["x"].unique(), state["step"])}
        if step is None or step < told or held != {step}:
            print(f"round {epoch}: told {told}, loaded {step}, which holds {sorted(held)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
