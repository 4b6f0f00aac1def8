"""A program whose second and last save only its keeper brings to storage: it ends at once, and says nothing.

One rank. It saves step 1, waits until storage has it and until the file that it is told of is there, saves step 2.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from transomd.tce import CheckpointEngine


def main(told: Path) -> None:
    """Run, or go on."""
    engine = CheckpointEngine.from_env()
    state = {"x": torch.zeros(1000)}
    step = engine.load(state) or 0
    if step < 1:
        engine.save(1, state).wait("storage", timeout=60)
        print("step 1 of 2", flush=True)
        while not told.exists():
            time.sleep(0.05)
    if step < 2:
        engine.save(2, {"x": torch.ones(1000)})
    print("step 2 of 2", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
