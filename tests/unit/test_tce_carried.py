"""What was loaded from the copy of another node, and storage lacks, is brought there by the start that loaded it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import Node, nodes, on, pair
from test_tce_replica import flip

from transomd.tce import CheckpointEngine
from transomd.tce.catalogue import list_checkpoints
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.carry import fill, lay_out, share
from transomd.tce.memory.table import Place

EVERY = 1000
"""Storage gets none of the steps that are saved here."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def engine_of(directory: Path, epoch: int, rank: int = 0, world_size: int = 1) -> CheckpointEngine:
    settings: dict[str, Any] = {"rank": rank, "world_size": world_size, "storage_every": EVERY}
    return CheckpointEngine(directory, epoch=epoch, replicated=["model"], **settings)


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {"model": torch.full((5000,), float(step)), "mine": torch.full((70,), float(rank)), "step": step}


def stored(directory: Path) -> list[tuple[int, int]]:
    return [(each.step, each.epoch) for each in list_checkpoints(directory) if each.complete]


def loaded(directory: Path, first: CheckpointEngine, node: Node, source: str, step: int) -> CheckpointEngine:
    """The next start, which fences the first one before that is gone; it loads a step on ``node``."""
    engine = engine_of(directory, 2)
    first._close(0, leave=False)
    node.status()  # whose keeper has noticed by now that the first one is gone
    state: dict[str, Any] = {"mine": torch.zeros(70)}  # less than was saved
    assert engine.load(state) == step
    assert source in engine.resumed_from
    return engine


def test_the_copy_of_a_lost_node_comes_to_storage_whole(directory: Path) -> None:
    with nodes(directory.parent, 3) as (n1, n2, n3):
        pair([n1, n2, n3], {"n1": "n2"})
        on(n1)
        engine = engine_of(directory, 1)
        engine.save(7, state_of(7, 0)).wait("replica", timeout=60)
        n1.kill()
        pair([n2, n3], {"n3": "n2"}, epoch=2)
        on(n3)
        second = loaded(directory, engine, n3, "copy of another node", 7)
        assert wait_for(lambda: stored(directory) == [(7, 2)]), n3.status()
        # Now the loss of both that hold it costs nothing.
        n2.kill()
        n3.kill()
        second.close(0)
        third = CheckpointEngine(directory, rank=0, world_size=1, epoch=3, memory=False)
        state: dict[str, Any] = {}
        assert third.load(state) == 7
        assert state["step"] == 7
        assert bool(state["model"].eq(7.0).all())
        third.close()


def test_a_damaged_own_slot_is_not_made_this_start_s_own_but_the_copy_is(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = engine_of(directory, 1)
        engine.save(7, state_of(7, 0)).wait("replica", timeout=60)
        flip(n1, 0, copy=False)
        pair([n1, n2], {"n1": "n2"}, epoch=2)
        second = loaded(directory, engine, n1, "copy of another node", 7)
        assert wait_for(lambda: stored(directory) == [(7, 2)]), n1.status()
        second.close(0)
        third = CheckpointEngine(directory, rank=0, world_size=1, epoch=3, memory=False)
        state: dict[str, Any] = {}
        assert third.load(state) == 7
        assert bool(state["model"].eq(7.0).all())
        third.close()


def test_a_step_of_its_own_memory_comes_to_storage_whatever_storage_gets(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,):
        on(n1)
        engine = engine_of(directory, 1)
        engine.save(7, state_of(7, 0))
        second = loaded(directory, engine, n1, "memory", 7)
        assert wait_for(lambda: stored(directory) == [(7, 2)]), n1.status()
        second.close(0)


def test_a_step_in_memory_that_was_outgrown_comes_to_storage_too(directory: Path) -> None:
    with nodes(directory.parent, 1) as (n1,):
        on(n1)
        engine = engine_of(directory, 1)
        engine.save(7, state_of(7, 0))
        assert engine._memory is not None
        assert engine._memory._secured(
            1 << 22
        )  # killed while it saves a larger state, for which it has got other memory
        second = loaded(directory, engine, n1, "memory", 7)
        assert wait_for(lambda: stored(directory) == [(7, 2)]), n1.status()
        second.close(0)


def place(name: str, ranks: tuple[int, ...], stored: bool) -> Place:
    return Place(name, ranks, (name,), (), 4096, 5000, 12288, 10, stored)


@pytest.mark.parametrize(
    ("rank", "before", "names"),
    [
        (0, (), {"own": True, "all": True, "some": True}),
        (2, (), {"own": True, "all": False, "some": False}),
        (2, (1,), {"own": True, "all": False, "some": False}),
        (2, (0, 1), {"own": True}),
    ],
)
def test_a_rank_carries_over_what_it_would_stage(rank: int, before: tuple[int, ...], names: dict[str, bool]) -> None:
    """Rank 2 has ranks 0 and 1 on its node, or rank 1 alone, or neither."""
    held = [
        (place("own", (rank,), False), memoryview(b"")),
        (place("all", (0, 2, 3), True), memoryview(b"")),
        (place("some", (0, 2), False), memoryview(b"")),
    ]
    parts = share(held, rank, before)
    assert {each.name: each.stored for each, _ in parts} == names


def test_parts_of_two_slots_are_laid_side_by_side_and_copied() -> None:
    first, second = (bytearray([number]) * 16384 for number in (1, 2))
    parts = share(
        [(place("own", (0,), True), memoryview(first)), (place("all", (0, 1), True), memoryview(second))], 0, ()
    )
    table = lay_out(parts, 0, 2, ("own", "all"))
    assert [(each.tensors_at, each.rest_at) for each in table.places] == [(0, 8192), (12288, 20480)]
    arena = Arena.create(2, 1 << 16, "carried")
    image = arena.image(0)
    fill(image, table, parts)
    assert bytes(image[:5000]) + bytes(image[8192:8202]) == bytes([1]) * 5010
    assert bytes(image[12288:17288]) + bytes(image[20480:20490]) == bytes([2]) * 5010
    image.release()
    arena.close()
