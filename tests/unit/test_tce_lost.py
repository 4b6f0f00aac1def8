"""What is in memory alone is not lost with a keeper that is lost before the program ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import keeper_of, keepers, own_place, stop, wait_for

from transomd.tce import CheckpointEngine

NEVER = 1_000_000
"""Storage gets no step while the program is there."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place(killed=True) as folder:
        yield folder


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((5000,), float(step))}


def engine_of(directory: Path, epoch: int = 1, every: int = 1) -> CheckpointEngine:
    return CheckpointEngine(directory, rank=0, world_size=1, epoch=epoch, storage_every=every)


def lose_keeper(directory: Path) -> None:
    """Kill it, and wait until none of its threads holds its lines open any more."""
    pid = keeper_of(directory)
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: pid not in keepers(directory.parent) and len(threads(pid)) <= 1, 60)


def threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


@pytest.mark.parametrize("every", [1, NEVER])
def test_what_a_keeper_that_was_lost_before_the_end_had_not_stored_comes_to_storage(
    directory: Path, every: int
) -> None:
    engine = engine_of(directory, every=every)
    engine.save(1, state_of(1)).wait("memory")
    stop(keeper_of(directory))
    engine.save(2, state_of(2)).wait("memory")
    lose_keeper(directory)
    engine.close(60)
    second = engine_of(directory, epoch=2)
    assert second.load({}) == 2
    second.close(60)


def test_a_start_that_was_replaced_takes_no_memory_from_who_replaced_it(directory: Path) -> None:
    engine = engine_of(directory, every=NEVER)
    saved = engine.save(1, state_of(1))
    second = engine_of(directory, epoch=2, every=NEVER)
    second.save(2, state_of(2))
    assert wait_for(lambda: not saved.done("replica") and bool(saved.never.get("replica")), 60)
    memory = engine._memory
    assert memory is not None
    assert wait_for(lambda: not memory.progress(1) and not memory._lease.held, 60)
    lose_keeper(directory)
    engine.close(60)
    assert keepers(directory.parent) == []
    second.close(60)
