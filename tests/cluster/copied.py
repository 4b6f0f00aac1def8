"""A program of several ranks that saves every step to memory, and to storage as its job says; its losses are exact.

Each rank has a state of its own, beside one that all have alike. Each step mixes them with the loss: the sum over all
ranks, in their order. The first start goes on until it is hurt; one that goes on from a checkpoint does THEN steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch

THEN, HELD, STEP_S = 15, 15, 0.4
NEVER = 1000
"""A step that no test waits for."""


def first_state(rank: int) -> torch.Tensor:
    """What a rank begins with."""
    return torch.linspace(0.1, 0.9, 1000, dtype=torch.float64) + rank


def mixed(state: torch.Tensor, loss: float) -> torch.Tensor:
    """A rank's state after a step."""
    return torch.cos(1.1 * state + loss)


def losses(world: int, steps: int) -> dict[int, str]:
    """The loss of every step of a run without failures."""
    states, shared, found = [first_state(rank) for rank in range(world)], first_state(-1), {}
    for step in range(1, steps + 1):
        loss = sum(float(state.sum() + shared.sum()) for state in states)
        found[step] = loss.hex()
        states, shared = [mixed(state, loss) for state in states], mixed(shared, loss)
    return found


def meeting(world: int) -> Callable[[float], Sequence[float]]:
    """A function by which every rank's number reaches every rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def meet(mine: float) -> Sequence[float]:
        everyones = [torch.zeros(1, dtype=torch.float64) for _ in range(world)]
        dist.all_gather(everyones, torch.tensor([mine], dtype=torch.float64))
        return [float(each) for each in everyones]

    return meet


def main() -> int:
    """Run one rank."""
    from transomd.tce import CheckpointEngine

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meet = meeting(world)
    every = os.environ["TRANSOM_CHECKPOINT_STORAGE_EVERY"]
    stored = 1 if every == "auto" else int(every)
    engine = CheckpointEngine.from_env(replicated=["shared"])
    state = {"x": first_state(rank), "shared": first_state(-1)}
    start = engine.load(state) or 0
    print(f"went on from {start}, {engine.resumed_from or 'nothing'}", flush=True)
    for step in range(start + 1, (start + THEN if start else NEVER) + 1):
        time.sleep(STEP_S)
        loss = sum(meet(float(state["x"].sum() + state["shared"].sum())))
        state = {key: mixed(value, loss) for key, value in state.items()}
        print(f"step {step} loss {loss.hex()}", flush=True)
        handle = engine.save(step, state)
        if step == stored:
            handle.wait("storage", timeout=60)
        if step == HELD:
            handle.wait("replica", timeout=60)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
