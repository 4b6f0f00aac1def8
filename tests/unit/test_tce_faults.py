"""Bits that flip anywhere in a slot of memory, and limits on the size of files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tce_keepers import arena_of, newest_slot, own_place
from test_tce_memory import complete, loaded, program, state_of

from transomd.tce import CheckpointEngine
from transomd.tce.memory.arena import PAGE, Arena
from transomd.tce.memory.table import decode


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def region(arena: Arena, slot: int, what: str) -> range:
    """Where in the arena's memory this lies."""
    data, state = arena.offset(slot), arena.state(slot)
    place = decode(arena.table(slot, state)).places[0]
    starts = {
        "state": ((1 + slot) * PAGE, PAGE),
        "tensor": (data + place.tensors_at + place.records[0].offset, place.records[0].bytes),
        "rest": (data + place.rest_at, place.rest_bytes),
        "table": (data + state.table_offset, state.table_bytes),
    }
    start, size = starts[what]
    return range(start, start + size)


@pytest.mark.parametrize("what", ["state", "tensor", "rest", "table"])
def test_a_flipped_bit_anywhere_in_a_slot_costs_no_step_that_storage_has(directory: Path, what: str) -> None:
    """Whatever is hit, the newest step is loaded, exactly; and the program saves on."""
    dice = random.Random(what)
    engine = CheckpointEngine(directory, epoch=1)
    for step in range(1, 6):
        engine.save(step, state_of(step)).wait(timeout=60)
        arena = arena_of(engine._memory)
        at = dice.choice(region(arena, newest_slot(arena), what))
        arena.memory[at] ^= 1 << dice.randrange(8)
        assert loaded(directory) == step, f"byte {at}"
    engine.save(9, state_of(9)).wait(timeout=60)
    assert loaded(directory) == 9
    engine.close()


@pytest.mark.parametrize("what", ["state", "tensor", "rest", "table"])
def test_what_is_damaged_in_memory_and_nowhere_else_gives_way_to_the_step_before(directory: Path, what: str) -> None:
    engine = CheckpointEngine(directory, epoch=1)
    for step in (1, 2):
        engine.save(step, state_of(step)).wait(timeout=60)
    arena = arena_of(engine._memory)
    hit = region(arena, newest_slot(arena), what)
    for manifest in directory.glob("step-*/manifest.json"):
        manifest.unlink()
    # Of the state both copies: each alone is replaced by the other.
    for at in (hit[0], hit[PAGE // 2]) if what == "state" else (hit[len(hit) // 2],):
        arena.memory[at] ^= 1
    assert loaded(directory) == 1
    engine.save(3, state_of(3)).wait(timeout=60)
    assert loaded(directory) == 3
    engine.close()


def test_a_limit_on_the_size_of_files_stops_no_program_and_is_named(directory: Path) -> None:
    """RLIMIT_FSIZE, which the keeper has too: neither memory nor storage can hold the state."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
        handle = engine.save(1, state_of(1, size=100_000))
        print(handle.error, "|", handle.error.hint)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        engine.save(2, state_of(2, size=100_000)).wait(timeout=60)
        print("failed", engine.failed)
        engine.close()
    """
    process = program(code, directory)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "rank 0 could not write its checkpoint" in out
    assert "File too large" in out
    assert "ulimit -f" in out
    assert "failed 1" in out
    assert complete(directory) == [2]
    assert not list(directory.rglob("*.tmp"))
