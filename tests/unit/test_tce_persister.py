"""What brings staged steps to storage: a real thread and a real directory, without a program or a keeper around it."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tce_keepers import wait_for
from xxhash import xxh3_64_intdigest

from transomd.tce.catalogue import list_checkpoints
from transomd.tce.epochs import claim_epoch
from transomd.tce.manifest import rank_manifest_name
from transomd.tce.memory import persister, trouble
from transomd.tce.memory.arena import Arena
from transomd.tce.memory.due import FIRST_RETRY_S, LAST_RETRY_S, Owner, Retry
from transomd.tce.memory.slots import STAGED, WRITING, SlotState
from transomd.tce.memory.table import Table, encode
from transomd.tce.memory.tenant import Tenant
from transomd.tce.persist import Writer
from transomd.tce.rate import Cap


class Rank(Tenant):
    """A tenant with four slots, whose steps hold nothing but their table; ``told`` is what its program would hear."""

    def __init__(self, directory: Path) -> None:
        self.told: list[dict[str, Any]] = []
        super().__init__(directory, 0, lambda _, message: self.told.append(message), lambda: None, Cap(0))
        self.arenas = [Arena.create(4, 4096, "rank-0")]

    def stage(self, slot: int, step: int, seq: int, epoch: int = 1, world_size: int = 1) -> None:
        arena = self.arenas[-1]
        content = encode(Table(0, world_size, (), ()))
        arena.image(slot)[: len(content)] = content
        arena.set_state(slot, SlotState(STAGED, seq, step, epoch, 0, len(content), xxh3_64_intdigest(content)))

    def heard(self, kind: str) -> list[int]:
        """The steps of which the program has heard this."""
        return [message["step"] for message in list(self.told) if message["t"] == kind]

    def stored(self) -> list[tuple[int, int]]:
        return sorted((each.epoch, each.step) for each in list_checkpoints(self.directory) if each.complete)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "p" / "c")
    yield made
    made.close()


def owner(epoch: int = 1, every: int = 1, world_size: int = 1) -> Owner:
    return Owner(world_size, epoch, "", 9, every)


def test_a_step_is_written_and_completed_and_the_program_hears_of_it(rank: Rank) -> None:
    rank.stage(0, step=3, seq=1)
    rank.take_over(owner())
    assert wait_for(lambda: rank.heard("complete") == [3])
    assert [message["t"] for message in rank.told] == ["written", "complete"]
    assert rank.stored() == [(1, 3)]
    stages = rank.status()["stages"]
    assert {name: stages[name]["step"] for name in stages} == {"memory": 3, "storage": 3}
    rank.abandon()
    assert wait_for(lambda: rank.idle)


def test_what_is_not_due_goes_to_storage_when_the_program_is_gone(rank: Rank) -> None:
    rank.take_over(owner(every=10))
    rank.stage(0, step=10, seq=1)
    rank.stage(1, step=11, seq=2)
    rank.ring()
    assert wait_for(lambda: rank.heard("complete") == [10])
    assert wait_for(lambda: rank.waits_only)
    assert rank.stored() == [(1, 10)]
    rank.abandon()
    assert wait_for(lambda: rank.idle)
    assert rank.stored() == [(1, 10), (1, 11)]


def test_writing_is_tried_again_until_it_succeeds(rank: Rank) -> None:
    in_the_way = rank.directory.parent
    in_the_way.write_text("a file")
    rank.stage(0, step=1, seq=1)
    rank.take_over(owner())
    assert wait_for(lambda: len(rank.heard("problem")) > 1)
    first = rank.status()
    assert "step 1: rank 0 could not write" in first["problem"]
    rank.abandon()
    assert not rank.idle
    in_the_way.unlink()
    assert wait_for(lambda: rank.heard("complete") == [1])
    assert wait_for(lambda: rank.idle)
    assert rank.status()["problem"] == ""


def test_writing_is_given_up_some_time_after_the_program_is_gone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persister, "GIVE_UP_S", 0.0)
    rank.directory.parent.write_text("a file")
    rank.stage(0, step=1, seq=1)
    rank.take_over(owner())
    assert wait_for(lambda: rank.heard("problem") != [])
    assert rank.heard("failed") == []
    rank.abandon()
    assert wait_for(lambda: rank.heard("failed") == [1])
    assert wait_for(lambda: rank.idle)


def test_an_older_step_of_this_epoch_is_skipped_once_a_newer_one_is_stored(rank: Rank) -> None:
    rank.count(skipped=3, heard=0)
    rank.stage(0, step=5, seq=6)
    rank.stage(1, step=6, seq=7)
    rank.take_over(owner())
    assert wait_for(lambda: rank.heard("skipped") == [5])
    assert rank.stored() == [(1, 6)]
    assert rank.status()["skipped"] == 4
    assert [message["count"] for message in rank.told if message["t"] == "skipped"] == [1]
    rank.count(skipped=4, heard=0)
    assert rank.status()["skipped"] == 5, "the program has left out another one, and has not heard yet"
    rank.count(skipped=5, heard=1)
    assert rank.status()["skipped"] == 5, "now it has counted the same one"


def test_a_step_of_an_older_epoch_is_fenced_by_a_newer_one_that_is_stored(rank: Rank) -> None:
    rank.stage(0, step=9, seq=6)
    rank.stage(1, step=2, seq=7, epoch=2)
    rank.take_over(owner(epoch=2))
    assert wait_for(lambda: rank.heard("failed") == [9])
    (failed,) = (message for message in rank.told if message["t"] == "failed")
    assert failed["error"] == "step 9 of epoch 1 is fenced: epoch 2 has stored step 2 since"
    assert rank.stored() == [(2, 2)]


def test_what_is_fenced_is_not_kept_for_a_start_that_has_come(rank: Rank) -> None:
    """It took over while the step of the start before was being written."""
    rank.directory.mkdir(parents=True)
    claim_epoch(rank.directory, 2)
    rank.take_over(owner(epoch=2))
    rank.stage(0, step=1, seq=1, epoch=1)
    rank.abandon()
    assert wait_for(lambda: rank.heard("failed") == [1])
    assert wait_for(lambda: rank.idle)


def test_what_was_damaged_in_memory_fails_and_the_next_step_is_stored(rank: Rank) -> None:
    rank.stage(0, step=1, seq=1)
    rank.arenas[0].image(0)[5] ^= 1
    rank.take_over(owner())
    assert wait_for(lambda: rank.heard("failed") == [1])
    assert re.match("(the table of )?step 1 .*damaged", rank.status()["problem"])
    rank.stage(1, step=2, seq=2)
    rank.ring()
    assert wait_for(lambda: rank.heard("complete") == [2])
    assert rank.status()["problem"] == ""


def test_a_step_is_stored_whose_slot_the_program_marked_before_it_saw_that_it_was_in_use(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, release = Arena.acquire, Arena.release

    def marked(self: Arena, slot: int, seq: int) -> bool:
        acquired = acquire(self, slot, seq)
        self.set_state(slot, replace(self.state(slot), state=WRITING, table_bytes=0))
        return acquired

    def given_way(self: Arena, slot: int) -> None:
        rank.stage(slot, step=3, seq=1)
        release(self, slot)

    monkeypatch.setattr(Arena, "acquire", marked)
    monkeypatch.setattr(Arena, "release", given_way)
    rank.stage(0, step=3, seq=1)
    rank.take_over(owner())
    assert wait_for(lambda: rank.heard("complete") or rank.heard("failed"))
    assert rank.stored() == [(1, 3)]


def test_a_step_whose_completion_was_fenced_stays_for_a_later_start(rank: Rank, tmp_path: Path) -> None:
    """Its write was begun before the newer start; the other rank's share, and so its completion, came after it."""
    other = Writer(tmp_path / "other", 1, 2, 1)
    other.write(1, [])
    rank.stage(0, step=1, seq=1, world_size=2)
    rank.take_over(owner(world_size=2))
    assert wait_for(lambda: rank.heard("written") == [1])
    rank.abandon()
    claim_epoch(rank.directory, 2)
    share = rank_manifest_name(1)
    shutil.copy(other.folder(1) / share, Writer(rank.directory, 1, 2, 1).folder(1) / share)
    assert wait_for(lambda: rank.heard("failed") == [1])
    assert not wait_for(lambda: rank.idle, 0.2)
    assert "epoch 1 is fenced" in rank.status()["problem"]
    rank.visited()
    assert wait_for(lambda: rank.idle)


@contextmanager
def hanging(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store hangs for who looks at what the other rank has written of step 1."""
    monkeypatch.setattr(trouble, "STUCK_S", 0.1)
    rank.stage(0, step=1, seq=1, world_size=2)
    rank.take_over(owner(world_size=2))
    assert wait_for(lambda: rank.heard("written") == [1])
    assert wait_for(lambda: rank.waits_only), "it still writes"
    pipe = Writer(rank.directory, 1, 2, 1).folder(1) / rank_manifest_name(1)
    os.mkfifo(pipe)
    assert wait_for(lambda: "looking into the directory has taken" in rank.status()["problem"])
    yield
    os.close(os.open(pipe, os.O_WRONLY))


def test_whoever_closes_waits_for_no_thread_and_the_memory_is_given_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the keeper's control thread, and the store may hang."""
    waited, join = [], threading.Thread.join

    def noted(self: threading.Thread, timeout: float | None = None) -> None:
        waited.append(threading.current_thread())
        join(self, timeout)

    with hanging(rank, monkeypatch):
        (arena,) = rank.arenas
        arena.fill()
        monkeypatch.setattr(threading.Thread, "join", noted)
        rank.close()
        assert threading.current_thread() not in waited
        assert rank.bytes == 0
        assert wait_for(lambda: arena.descriptor < 0)
        assert waited


def test_slots_are_settled_by_the_one_thread_only_whoever_finds_them_damaged(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that settle at the same time, one could undo what the other did."""
    settling, settle = set(), Arena.settle

    def noted(self: Arena, slot: int, seq: int) -> None:
        settling.add(threading.current_thread())
        settle(self, slot, seq)

    monkeypatch.setattr(Arena, "settle", noted)
    (arena,) = rank.arenas
    rank.take_over(owner(every=10))
    for slot, step in enumerate((10, 11, 12)):
        rank.stage(slot, step, seq=step)
    rank.ring()
    assert wait_for(lambda: rank.heard("complete") == [10])
    rank.quarantine(rank.staged()[0])
    assert [state.step for _, _, state in rank.staged()] == [11, 10]
    assert "step 12 of epoch 1 was damaged in memory" in rank.status()["problem"]
    assert wait_for(lambda: arena.settled(2) == 12)
    assert len(settling) == 1
    assert threading.current_thread() not in settling
    assert wait_for(lambda: rank.heard("failed") == [12])
    rank.abandon()
    assert wait_for(lambda: rank.idle)
    assert rank.stored() == [(1, 10), (1, 11)]


def test_the_pause_between_tries_grows_to_a_limit() -> None:
    retry = Retry()
    pauses = []
    for _ in range(10):
        later = retry.later(100.0)
        pauses.append(later.at - 100.0)
        retry = later
    assert pauses[:3] == pytest.approx([FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S])
    assert pauses[-1] == LAST_RETRY_S


def test_who_takes_over_says_how_many_are_kept_also_where_the_epoch_is_the_same(rank: Rank) -> None:
    rank.take_over(Owner(1, 1, "", 1 << 62))
    for seq in range(1, 4):
        rank.stage(seq - 1, step=seq, seq=seq)
        rank.ring()
        assert wait_for(lambda seq=seq: seq in rank.heard("complete"))
    rank.take_over(Owner(1, 1, "", 2))
    rank.stage(3, step=4, seq=4)
    rank.ring()
    assert wait_for(lambda: rank.stored() == [(1, 3), (1, 4)])


def test_a_look_while_the_program_is_there_is_none_of_a_later_start(rank: Rank) -> None:
    rank.take_over(owner())
    rank.visited()
    rank.abandon()
    rank._persister.fenced_at = time.monotonic()
    assert wait_for(lambda: not rank._persister.busy)
    assert not rank.waits_only, "a later start has not seen yet what it has fenced"
    rank.visited()
    assert wait_for(lambda: rank.waits_only)
