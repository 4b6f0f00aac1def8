"""Saves on file systems that are full, forbidden or read-only. Run by test_tce_storage.py as root, in own mounts.

Prints one line of JSON per scene.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.catalogue import list_checkpoints

MIB = 1 << 20
os.environ["TRANSOM_CHECKPOINT_MEMORY"] = "off"  # save() itself writes to storage here


def state_of(step: int, mib: int) -> dict[str, Any]:
    return {"t": torch.full((mib * MIB // 4,), float(step)), "step": step}


def error_of(save: Callable[[], Any]) -> str:
    try:
        save().wait(timeout=60)
    except CheckpointError as error:
        return f"{error} | {error.hint}"
    return ""


def full(directory: Path) -> dict[str, Any]:
    """16 MiB of space: 6 MiB fit, another 12 do not, and then 6 fit again."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", directory], check=True)
    engine = CheckpointEngine(directory, epoch=1, keep=1)
    engine.save(1, state_of(1, 6)).wait(timeout=60)
    errors = [error_of(lambda step=step: engine.save(step, state_of(step, 12))) for step in (2, 3)]  # type: ignore[misc]
    used = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    state = state_of(0, 6)
    step = CheckpointEngine(directory).load(state)
    right = bool(state["t"].eq(1).all())
    after = error_of(lambda: engine.save(4, state_of(4, 6)))
    return {"errors": errors, "used": used, "step": step, "right": right, "after": after, "failed": engine.failed}


def forbidden(directory: Path) -> dict[str, Any]:
    """A directory of somebody else, as an ordinary user."""
    CheckpointEngine(directory, epoch=1).save(1, state_of(1, 1)).wait(timeout=60)
    os.seteuid(65534)
    try:
        engine = CheckpointEngine(directory)
        error = error_of(lambda: engine.save(2, state_of(2, 1)))
        return {"error": error, "step": engine.load(state_of(0, 1)), "failed": engine.failed}
    finally:
        os.seteuid(0)


def read_only(directory: Path) -> dict[str, Any]:
    """A file system that turned read-only, as they do after errors."""
    CheckpointEngine(directory, epoch=1).save(1, state_of(1, 1)).wait(timeout=60)
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", directory], check=True)
    engine = CheckpointEngine(directory, epoch=2)
    error = error_of(lambda: engine.save(2, state_of(2, 1)))
    return {"error": error, "step": engine.load(state_of(0, 1)), "failed": engine.failed}


def many(directory: Path) -> dict[str, Any]:
    """100 saves of 1 MiB and a load after each tenth: the memory of the process before and after, in MiB."""
    engine = CheckpointEngine(directory, keep=1)
    sizes = []
    state = {"parts": [torch.zeros(MIB // 32) for _ in range(8)], "turned": torch.zeros(64, 64).t(), "log": {}}
    for step in range(100):
        state["parts"][step % 8].fill_(step)
        state["log"] = {str(step): (step, [step])}
        engine.save(step, state).wait(timeout=60)
        if step % 10 == 9:
            engine.load(state)
            sizes.append(resident())
    return {
        "sizes": sizes,
        "left": [c.step for c in list_checkpoints(directory)],
        "open": len(os.listdir("/proc/self/fd")),
    }


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> None:
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    base.chmod(0o755)
    for scene in (full, forbidden, read_only, many):
        directory = base / scene.__name__
        directory.mkdir()
        print(json.dumps({"scene": scene.__name__, **scene(directory)}), flush=True)


main()
