"""One rank of a gloo group that plays scene after scene, as importing torch takes seconds. Run by test_tce_ranks.py.

Each scene uses a directory of its own and prints, on rank 0, one line of JSON with what every rank saw.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from transomd.tce import CheckpointEngine, CheckpointError
from transomd.tce.catalogue import list_checkpoints

ROOT = Path(sys.argv[1])
os.environ["TRANSOM_CHECKPOINT_MEMORY"] = "off"  # save() itself writes to storage here


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def state_of(step: int) -> dict[str, Any]:
    return {"model": torch.full((50,), float(step)), "mine": torch.full((3,), 100 * step + dist.get_rank())}


def engine_in(directory: Path, **settings: Any) -> CheckpointEngine:
    return CheckpointEngine(directory, replicated=("model",), **settings)


def saved(directory: Path, *steps: int) -> CheckpointEngine:
    engine = engine_in(directory)
    for step in steps:
        engine.save(step, state_of(step)).wait(timeout=60)
    dist.barrier()
    return engine


def load(directory: Path, **settings: Any) -> dict[str, Any]:
    """What this rank got: step, whether the values are right, or the error."""
    state = state_of(0)
    try:
        step = engine_in(directory, **settings).load(state)
    except CheckpointError as error:
        return {"error": str(error)}
    wanted = state_of(step or 0)
    return {"step": step, "right": all(state[key].equal(wanted[key]) for key in wanted)}


def only_on(rank: int) -> bool:
    """Whether this is that rank; the others wait until it has done what it does."""
    return dist.get_rank() == rank


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def newest(directory: Path) -> Path:
    return next(c.path for c in list_checkpoints(directory) if c.complete)


def everything_is_fine(directory: Path) -> Any:
    engine = saved(directory, 1, 2)
    return {**load(directory), "epoch": engine.epoch}


def one_rank_has_a_damaged_file(directory: Path) -> Any:
    saved(directory, 1, 2)
    if only_on(1):
        spoil(newest(directory) / "rank-00001.safetensors")
    dist.barrier()
    return load(directory)


def one_rank_does_not_see_the_newest(directory: Path) -> Any:
    saved(directory / "0", 1, 2)
    if only_on(1):
        (directory / "1").mkdir()
        (directory / "1" / f"step-{1:09d}.epoch-000001").symlink_to(directory / "0" / f"step-{1:09d}.epoch-000001")
    dist.barrier()
    return load(directory / str(dist.get_rank()))


def one_rank_sees_nothing(directory: Path) -> Any:
    saved(directory / "0", 1)
    return load(directory / str(dist.get_rank()))


def all_are_damaged(directory: Path) -> Any:
    saved(directory, 1)
    if only_on(0):
        spoil(newest(directory) / "replica-00000.pt")
    dist.barrier()
    return load(directory)


def a_start_after_a_start(directory: Path) -> Any:
    first = saved(directory, 1)
    second = engine_in(directory)
    step = second.load(state_of(0))
    second.save(2, state_of(2)).wait(timeout=60)
    dist.barrier()
    late = first.save(2, state_of(2))
    return {"epochs": [first.epoch, second.epoch], "step": step, "late": str(late.error), "right": load(directory)}


def from_the_environment(directory: Path) -> Any:
    os.environ["TRANSOM_CHECKPOINT_DIR"] = str(directory)
    os.environ["TRANSOM_EPOCH"] = "7"
    with CheckpointEngine.from_env(replicated=True) as engine:
        engine.save(5, {"model": torch.ones(3)}).wait(timeout=60)
    found = list_checkpoints(directory)[0]
    return {"place": [engine.rank, engine.world_size], "found": [found.step, found.epoch, found.ranks, found.complete]}


SCENES = (
    everything_is_fine,
    one_rank_has_a_damaged_file,
    one_rank_does_not_see_the_newest,
    one_rank_sees_nothing,
    all_are_damaged,
    a_start_after_a_start,
    from_the_environment,
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = Told()
    logging.getLogger("transom.tce").addHandler(told)
    for scene in SCENES:
        told.lines.clear()
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, {"saw": scene(ROOT / scene.__name__), "told": list(told.lines)})
        if only_on(0):
            print(json.dumps({"scene": scene.__name__, "ranks": answers}), flush=True)
    dist.destroy_process_group()


main()
