"""Which staged steps go to storage, and which goes next: the rules, on values alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transomd.tce.memory.due import Orders, Owner, Progress, due, following, wanted
from transomd.tce.memory.slots import STAGED, SlotState
from transomd.tce.schedule import CHOSEN

EVERY_10 = Orders(owner=Owner(2, 1, "", 1, every=10))
BY_MEASURE = Orders(owner=Owner(2, 1, "", 1, every=CHOSEN), chosen=frozenset({4, 6}))


def gone(orders: Orders) -> Orders:
    return replace(orders, gone_at=1.0)


def staged(step: int, epoch: int = 1) -> SlotState:
    """A step, which is as many saves old as its number."""
    return SlotState(STAGED, step, step, epoch)


@pytest.mark.parametrize(
    ("orders", "state", "found"),
    [
        (Orders(), staged(7), True),
        (EVERY_10, staged(20), True),
        (EVERY_10, staged(21), False),
        (EVERY_10, staged(20, epoch=0), True),
        (replace(EVERY_10, resumed_step=21), staged(21), True),
        (BY_MEASURE, staged(4), True),
        (BY_MEASURE, staged(5), False),
        (BY_MEASURE, staged(4, epoch=0), False),
        (replace(BY_MEASURE, resumed_step=5), staged(5), True),
    ],
)
def test_storage_gets_what_is_due(orders: Orders, state: SlotState, found: bool) -> None:
    assert due(state, orders) is found


@pytest.mark.parametrize(
    ("orders", "progress", "found"),
    [
        (EVERY_10, Progress(), [20, 10]),
        (EVERY_10, Progress(written=10), [20]),
        (EVERY_10, Progress(written=20, begun=frozenset({(1, 10)})), [10]),
        (EVERY_10, Progress(begun=frozenset({(1, 15)})), [20, 10]),
        (gone(EVERY_10), Progress(written=20), [20, 15, 10]),
        (BY_MEASURE, Progress(), []),
        (BY_MEASURE, Progress(written=20, begun=frozenset({(1, 15)})), [15]),
        (BY_MEASURE, Progress(begun=frozenset({(0, 15)})), []),
    ],
)
def test_what_is_wanted_while_the_program_is_there_and_after(
    orders: Orders, progress: Progress, found: list[int]
) -> None:
    steps = [staged(step) for step in (20, 15, 10)]
    assert [state.step for state in steps if wanted(state, orders, progress)] == found


def test_what_another_epoch_has_begun_is_not_joined_by_measure() -> None:
    assert not wanted(staged(15, epoch=0), BY_MEASURE, Progress(begun=frozenset({(0, 15)})))


@pytest.mark.parametrize(
    ("steps", "orders", "progress", "found"),
    [
        ([], EVERY_10, Progress(), None),
        ([1], EVERY_10, Progress(), 1),
        ([4, 3, 2], EVERY_10, Progress(written=1), 2),
        ([5, 4, 3], EVERY_10, Progress(written=1), 5),
        ([3, 2], gone(EVERY_10), Progress(written=1), 3),
        ([5, 4, 3, 2], EVERY_10, Progress(written=1, begun=frozenset({(1, 4), (1, 3)})), 4),
    ],
)
def test_what_others_have_begun_comes_first_then_the_next_in_turn_then_the_newest(
    steps: list[int], orders: Orders, progress: Progress, found: int | None
) -> None:
    chosen = following([staged(step) for step in steps], orders, progress)
    assert (chosen.step if chosen else None) == found
