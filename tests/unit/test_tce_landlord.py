"""The memory that a keeper hands out: as many slots as there is room for, and outgrown arenas given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_tce_persister import Rank, owner

from transomd.tce.memory.arena import Arena, whole_size
from transomd.tce.memory.budget import VARIABLE
from transomd.tce.memory.landlord import LEAST_SLOTS, Landlord, adopt, drop_outgrown
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.replicate.copies import Copies

SLOT = 1 << 20


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "c")
    yield made
    made.close()


def landlord(rank: Rank) -> Landlord:
    copies = Copies(lambda _: "")
    return Landlord(lambda: [rank], lambda: copies)


@pytest.mark.parametrize("slots", [4, 3, 2])
def test_a_rank_gets_as_many_slots_as_there_is_room_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setenv(VARIABLE, str(rank.bytes + whole_size(slots, SLOT)))
    lord = landlord(rank)
    assert lord.grow(rank, SLOT, most=4) == ""
    assert [arena.slots for arena in rank.arenas[1:]] == [slots]
    assert lord.status()["taken"] == lord.status()["limit"] == rank.bytes


def test_what_there_is_no_room_for_is_refused_with_the_reason(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(rank.bytes + whole_size(LEAST_SLOTS, SLOT) - 1))
    refusal = landlord(rank).grow(rank, SLOT, most=4)
    assert VARIABLE in refusal
    assert len(rank.arenas) == 1


def test_an_arena_that_a_program_brings_is_taken_once_and_what_is_none_never(rank: Rank) -> None:
    rank.arenas.pop().close()
    brought = Arena.create(2, 4096, "brought")
    brought.set_state(0, SlotState(STAGED, 1, 1, 1))
    assert brought.acquire(0, 1)
    first, second = os.dup(brought.descriptor), os.dup(brought.descriptor)
    no_arena = os.memfd_create("no-arena")
    os.ftruncate(no_arena, 8192)
    adopt(rank, [no_arena, first, second])
    (arena,) = rank.arenas
    assert arena.descriptor == first
    assert not arena.used(0), "whoever used it is gone"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(second)
    open_ = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not any("no-arena" in name for name in open_)
    brought.close()


def test_an_outgrown_arena_goes_once_nothing_in_it_is_needed(rank: Rank) -> None:
    rank.take_over(owner(every=10))
    rank.stage(0, step=1, seq=1)
    (old,) = rank.arenas
    rank.arenas = [old, Arena.create(2, 8192, "larger")]
    drop_outgrown(rank)
    assert old in rank.arenas, "the newest step is in it"
    rank.stage(0, step=2, seq=2)
    drop_outgrown(rank)
    assert old in rank.arenas, "its step is still to be stored"
    old.settle(0, 1)
    assert old.acquire(0, 1)
    drop_outgrown(rank)
    assert old in rank.arenas, "somebody reads it"
    old.release(0)
    drop_outgrown(rank)
    assert old not in rank.arenas
