"""What a start has loaded is kept, whichever keeper writes what it saves next."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tce_keepers import keeper_of, state_of, wait_for

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints

pytest_plugins = ("tce_places",)


def complete(directory: Path) -> list[tuple[int, int]]:
    return sorted((one.step, one.epoch) for one in list_checkpoints(directory) if one.complete)


def save(engine: CheckpointEngine, *steps: int) -> None:
    for step in steps:
        engine.save(step, state_of(step)).wait("storage", timeout=60)


def test_a_keeper_that_is_called_only_after_the_load_keeps_what_was_loaded(directory: Path) -> None:
    save(CheckpointEngine(directory, memory=False), 2)
    with CheckpointEngine(directory, keep=1) as engine:
        assert engine.load(state_of(0)) == 2
        save(engine, 3, 4)
        assert wait_for(lambda: complete(directory) == [(2, 1), (4, 2)]), complete(directory)


def test_a_keeper_that_takes_over_from_a_dead_one_keeps_what_was_loaded(directory: Path) -> None:
    save(CheckpointEngine(directory, memory=False), 2)
    with CheckpointEngine(directory, keep=1) as engine:
        assert engine.load(state_of(0)) == 2
        save(engine, 3)
        os.kill(keeper_of(directory), signal.SIGKILL)
        save(engine, 5, 6)
        assert wait_for(lambda: complete(directory) == [(2, 1), (6, 2)]), complete(directory)
