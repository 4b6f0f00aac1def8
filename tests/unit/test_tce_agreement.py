"""Copies that are slower than the saves: there is always a step of which every rank has a copy."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from tce_keepers import own_place, wait_for
from tce_nodes import nodes, on, pair

from transomd.launch.agreeing import MARGIN_S, Pace, told_by
from transomd.tce import CheckpointEngine
from transomd.tce.memory.arena import Arena, staged
from transomd.tce.memory.slots import EMPTY, STAGED, WRITING, SlotState
from transomd.tce.memory.tenant import Tenant
from transomd.tce.replicate import sender
from transomd.tce.replicate.agreement import Step, Told, agree, aimed, missed, writable
from transomd.tce.replicate.sender import Sender
from transomd.tce.replicate.standing import LAST_RETRY_S, Standing


def told(keeps: set[Step], **copies: set[Step]) -> Told:
    return Told(frozenset(keeps), {int(rank[1:]): frozenset(steps) for rank, steps in copies.items()})


A, B, C, D = (1, 8), (1, 9), (1, 10), (2, 4)


@pytest.mark.parametrize(
    ("anchor", "said", "found"),
    [
        (None, [], (None, None)),
        (None, [told(set(), r0={A}), told(set(), r1={B})], (None, None)),
        (None, [told(set(), r0={A, B}), told(set(), r1={A})], (None, A)),
        (None, [told({A}, r0={A, B}), told(set(), r1={A})], (None, A)),
        (None, [told({A}, r0={A, B}), told({A}, r1={A})], (A, None)),
        (A, [told({A}, r0={A, B}), told({A}, r1={A, B})], (A, B)),
        (A, [told({A, B}, r0={A, B}), told({A}, r1={A, B})], (A, B)),
        (A, [told({A, B}, r0={A, B}), told({A, B}, r1={A, B})], (B, None)),
        # What one holder has lost again cannot take the anchor's place.
        (A, [told({A, B}, r0={A, B}), told({A}, r1={A, C})], (A, None)),
        # A lost holder: the anchor stays what it was until all have something newer.
        (A, [told({A}, r0={A})], (A, None)),
        (A, [told({A}, r0={A, D}), told(set(), r1={D})], (A, D)),
        (A, [told({A, D}, r0={A, D}), told({D}, r1={D})], (D, None)),
        # A rank's copies may lie on two nodes.
        (None, [told(set(), r0={A}), told(set(), r0={B}, r1={B})], (None, B)),
    ],
)
def test_the_anchor_moves_only_to_what_all_have_and_keep(
    anchor: Step | None, said: list[Told], found: tuple[Step | None, Step | None]
) -> None:
    assert agree(anchor, said, 2) == found


def slot(step: int, state: int = STAGED) -> SlotState:
    return SlotState(state, step, step, 1)


@pytest.mark.parametrize(
    ("slots", "keeps", "waited", "found"),
    [
        ([slot(0, EMPTY), slot(0, EMPTY)], set(), False, [0, 1]),
        ([slot(8), slot(0, EMPTY)], set(), False, [1]),
        ([slot(8), slot(9)], set(), False, [0]),
        ([slot(8), slot(9, WRITING)], {A}, False, [1]),
        ([slot(8), slot(9)], {A, B}, True, []),
        ([slot(8), slot(9)], {B}, False, [0]),
        ([slot(8), slot(9)], {A}, False, []),
        ([slot(8), slot(9)], {A}, True, [1]),
    ],
)
def test_what_is_kept_is_not_written_over(
    slots: list[SlotState], keeps: set[Step], waited: bool, found: list[int]
) -> None:
    whole = {at for at, state in enumerate(slots) if state.state == STAGED}
    assert writable(slots, whole, keeps, waited) == found


class Holder:
    """One rank's copies, two slots; takes newer steps at its own pace, as ``Sender`` offers them."""

    def __init__(self, rank: int, every: int) -> None:
        self.rank = rank
        self.every = every
        self.slots = [SlotState(), SlotState()]
        self.keeps: frozenset[Step] = frozenset()
        self.receiving: int | None = None
        self.last = 0
        self.aim = 1

    def steps(self) -> set[Step]:
        return {(state.epoch, state.step) for state in self.slots if state.state == STAGED}

    def turn(self, saved: int) -> None:
        """Finish what is being received, or begin with the first from the aim on of the last three that were saved."""
        if self.receiving is not None:
            self.slots[self.receiving] = slot(self.slots[self.receiving].step)
            self.receiving = None
            return
        last = [step for step in range(max(1, saved - 2), saved + 1) if step % self.every == 0]
        new = [step for step in last if step >= self.aim > self.last]
        whole = {at for at, state in enumerate(self.slots) if state.state == STAGED}
        newest = max((step for _, step in self.steps()), default=0)
        free = writable(self.slots, whole, self.keeps, newest < self.aim)
        if new and free:
            self.last, self.receiving = new[0], free[0]
            self.slots[free[0]] = slot(self.last, WRITING)


@pytest.mark.parametrize(("ticks_a_save", "every"), [(2, 1), (5, 1), (40, 1), (2, 8), (5, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_holders_of_any_pace_and_words_that_come_late_leave_a_common_step_always(
    seed: int, ticks_a_save: int, every: int
) -> None:
    chance = random.Random(seed)
    holders = [Holder(rank, every) for rank in range(4)]
    heard: dict[int, Told] = {}
    anchor: Step | None = None
    anchors: set[Step] = set()
    aim, ahead = 1, 1
    for tick in range(1, 2000):
        saved = tick // ticks_a_save
        for holder in holders:
            if chance.random() < 0.4:
                holder.turn(saved)
            if chance.random() < 0.3:
                heard[holder.rank] = Told(holder.keeps, {holder.rank: frozenset(holder.steps())})
        anchor, beyond = agree(anchor, heard.values(), len(holders))
        reached = anchor is not None and anchor[1] >= aim
        if reached or missed((1, aim), heard.values(), len(holders)):
            ahead = max(1, ahead // 2) if reached else 2 * ahead
            _, aim = aimed((1, saved), ahead, every)
        for holder in holders:
            if chance.random() < 0.3:
                holder.keeps, holder.aim = frozenset(step for step in (anchor, beyond) if step), aim
        if anchor is not None:
            anchors.add(anchor)
            assert set.intersection(*(holder.steps() for holder in holders)), tick
    assert len(anchors) >= 15


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([told(set(), r0={B}), told(set(), r1={A})], False),
        ([told(set(), r0={B}), told(set(), r1={A, B})], False),
        ([told(set(), r0={B}), told(set(), r1={A, C})], True),
        ([told(set(), r0={B}, r1={B}), told(set(), r1={C})], False),
    ],
)
def test_an_aim_is_missed_once_all_have_copied_and_not_the_same(said: list[Told], found: bool) -> None:
    assert missed(B, said, 2) is found


def test_the_aim_is_so_far_ahead_that_all_hear_of_it_before_they_save_it() -> None:
    pace = Pace()
    assert pace.ahead == 1
    for at in range(4):
        pace.see((1, 10 * at), float(at))
    assert pace.ahead == 1 + 10 * MARGIN_S
    pace.learn(reached=False)
    assert pace.ahead == 1 + 20 * MARGIN_S
    pace.learn(reached=True)
    assert 1 + 10 * MARGIN_S < pace.ahead < 1 + 20 * MARGIN_S
    for _ in range(20):
        pace.learn(reached=True)
    assert pace.ahead == 1 + 10 * MARGIN_S
    pace.see((2, 7), 9.0)
    assert pace.ahead == 1


@pytest.fixture
def directory() -> Iterator[Path]:
    with own_place() as folder:
        yield folder


def test_a_keeper_gives_up_no_copy_that_it_was_told_to_keep(directory: Path) -> None:
    with nodes(directory.parent, 2) as (n1, n2):
        pair([n1, n2], {"n1": "n2"})
        on(n1)
        engine = CheckpointEngine(directory, rank=0, world_size=1, epoch=1, storage_every=1000)
        state = {"x": torch.zeros(5000)}
        for step in (1, 2):
            engine.save(step, state).wait("replica", timeout=60)
        n2.ask(op="keep", steps=[[1, 1], [1, 2]], aim=None)
        handle = engine.save(3, state)
        assert wait_for(lambda: n1.status()["ranks"][0]["stages"]["memory"]["step"] == 3)
        assert not wait_for(lambda: handle.done("replica"), 1.0)
        assert n2.copies() == [2, 1]
        assert n1.status()["replica_problem"] == ""
        n2.ask(op="keep", steps=[[1, 2]], aim=None)
        handle.wait("replica", timeout=60)
        assert n2.copies() == [3, 2]
        said = told_by(n2.status(), str(directory))
        assert (said.keeps, said.copies[0]) == ({(1, 2)}, {(1, 2), (1, 3)})
        engine.close(0)


class OneRank:
    """Stands for a tenant with whole, digested steps in its slots."""

    directory, rank, quiet_for = Path("there"), 0, 0.0

    def __init__(self, *steps: int) -> None:
        self.arena = Arena.create(4, 4096, "one-rank")
        for slot, step in enumerate(steps):
            self.arena.set_state(slot, SlotState(STAGED, step, step, 1))

    def staged(self) -> list[tuple[Arena, int, SlotState]]:
        return staged([self.arena])

    for_partner = staged

    def digested(self, entry: tuple[Arena, int, SlotState]) -> bool:
        return True


def chosen(copier: Sender, rank: OneRank, standing: Standing) -> int | None:
    found = copier._choose(cast(Tenant, rank), standing)
    return None if found is None else found[2].step


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    """Else a keeper whose partner was lost would look a thousand times a second once its program has ended."""
    rank = OneRank(1)
    there = [rank]
    copier = Sender("", lambda: cast(list[Tenant], there), {})
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    copier.turn_to(("n2", address))
    assert wait_for(lambda: copier.problem.startswith("copies do not reach n2"))
    assert wait_for(lambda: copier._wait_s() is not None)
    there.clear()
    assert wait_for(lambda: copier._wait_s() is None, 2 * LAST_RETRY_S)
    rank.arena.close()


def test_each_rank_goes_on_by_itself_where_no_word_comes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, copier, standing = OneRank(4, 5, 6), Sender("", tuple, {}), Standing()
    copier.aim_at((1, 5))
    assert chosen(copier, rank, standing) == 5, "the first from the aim on"
    standing.sent = (1, 5, 5)
    assert chosen(copier, rank, standing) is None, "the next aim is waited for"
    monkeypatch.setattr(sender, "WORD_S", 0.0)
    assert chosen(copier, rank, standing) == 6
    rank.arena.close()
