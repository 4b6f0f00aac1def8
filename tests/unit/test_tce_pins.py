"""What is copied stays in the rank's own memory, too, and never takes the last slot from the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import nodes, on, pair

from transomd.tce import CheckpointEngine
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.pins import Pins, leaves_room
from transomd.tce.memory.slots import STAGED, WRITING, SlotState


def slot(step: int, state: int = STAGED) -> SlotState:
    return SlotState(state, step, step, 1)


@pytest.mark.parametrize(
    ("states", "used", "pinned", "found"),
    [
        ([slot(1), slot(2), slot(3)], set(), {0}, True),
        ([slot(1), slot(2), slot(3)], set(), {0, 1}, False),
        ([slot(1), slot(2), slot(3)], {1}, {0}, False),
        ([slot(1), slot(2), slot(3, WRITING)], set(), {0, 1}, True),
        ([slot(1), slot(2), slot(3), slot(4)], set(), {0, 1}, True),
        ([slot(1), slot(2), slot(3), slot(4)], {2}, {0, 1}, False),
        ([slot(1), slot(2), slot(3), slot(4)], {2}, {0, 3}, True),
    ],
)
def test_a_slot_to_copy_into_is_left(states: list[SlotState], used: set[int], pinned: set[int], found: bool) -> None:
    assert leaves_room(states, used, pinned) is found


def test_pins_follow_what_is_wanted_and_give_way_by_what_matters_least() -> None:
    arena = Arena.create(4, 1 << 12, "pins")
    for number in range(4):
        arena.set_state(number, slot(number + 1))
    pins = Pins()
    pins.update([arena], [(1, 1), (1, 2), (1, 9)])
    assert [arena.used(number) for number in range(4)] == [True, True, False, False]
    assert arena.acquire(2, 3)  # storage begins to write another step: one of the pins gives way
    pins.update([arena], [(1, 1), (1, 2)])
    assert [arena.used(number) for number in range(4)] == [True, False, True, False]
    arena.release(2)
    pins.update([arena], [(1, 2)])
    assert [arena.used(number) for number in range(4)] == [False, True, False, False]
    pins.update([arena], [])
    assert not any(arena.used(number) for number in range(4))
    arena.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def test_what_is_kept_elsewhere_stays_in_own_memory_while_the_program_saves_on(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=1000)
        state = {"x": torch.zeros(5000)}
        engine.save(1, state).wait("replica", timeout=60)
        n1.ask(op="keep", steps=[[1, 1]], aim=None)
        for step in range(2, 12):
            assert engine.save(step, state).done("memory"), step
        assert engine.skipped == 0
        with CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=1000) as other:
            assert other._memory is not None
            memory = other._memory.recall(abroad=False)
            assert memory is not None
            assert (1, 1) in memory.staged
            assert (1, 11) in memory.staged
            memory.release()
        engine.save(12, state).wait("replica", timeout=60)
        n1.ask(op="keep", steps=[[1, 12]], aim=None)
        for step in range(13, 19):
            engine.save(step, state)
        # While another step is being copied there may be no slot left for an instant.
        assert wait_for(lambda: engine.save(19, state).done("memory"))
        assert wait_for(lambda: n1.status()["ranks"][0]["stages"]["memory"]["step"] == 19)
        engine.close(0)
