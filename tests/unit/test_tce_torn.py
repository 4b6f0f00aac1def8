"""A power cut at any point of the saves, on a disk that loses, tears and reorders what was not synced."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tce_cuts import found
from tce_disk import Bytes, Names, Synced, after_power_cut


def test_the_model_loses_what_was_not_synced_and_nothing_else() -> None:
    ops = [
        Names(0, {"a": 1}),
        Bytes(1, 0, b"whole"),
        Synced(1),
        Names(0, {"b": 2}),
        Bytes(2, 0, b"torn"),
        Synced(0),
        Names(0, {"a": None, "c": 1}),
    ]
    assert after_power_cut(ops, lambda: True, random.Random(1)) == {"a": b"whole", "b": b""}
    assert after_power_cut(ops, lambda: False, random.Random(1)).keys() == {"b", "c"}


def test_after_a_power_cut_anywhere_a_whole_step_is_loaded_and_none_that_was_promised_is_lost(
    tmp_path: Path,
) -> None:
    count, wrong = found(1, 1, (1.0, 0.5), tmp_path / "1")
    assert not wrong
    assert count > 60


@pytest.mark.parametrize("seed", range(2, 6))
def test_no_rank_is_told_of_a_step_before_it_outlives_a_power_cut_whoever_completed_it(
    tmp_path: Path, seed: int
) -> None:
    """Two ranks, in orders that the dice choose; everything that was not synced is lost."""
    count, wrong = found(seed, 2, (1.0,), tmp_path / "2", promises_only=True)
    assert not wrong
    assert count >= 2


def test_the_same_where_two_of_three_ranks_hold_something_alike(tmp_path: Path) -> None:
    count, wrong = found(6, 3, (1.0,), tmp_path / "4", promises_only=True)
    assert not wrong
    assert count >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_the_same_at_every_point_of_two_ranks(tmp_path: Path, seed: int) -> None:
    count, wrong = found(seed, 2, (1.0, 0.0, 0.5, 0.1), tmp_path / "3")
    assert not wrong
    assert count > 200
