"""Progress: which numbers are steps, and how long a step may take."""

from __future__ import annotations

import pytest

from transomd.tee.progress import DEFAULT_PATTERN, Progress, Stall
from transomd.tee.types import Chunk


def feed(progress: Progress, line: str, now: float, rank: int | None = 0) -> None:
    progress.feed(Chunk(file=f"rank-{rank}.log", data=line.encode() + b"\n", rank=rank), now)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12", 12),
        ("step=12 loss=3.1", 12),
        ("Step: 12/1000", 12),
        ("iteration 12/1000 | lm loss: 2.1", 12),
        ("iteration       12/    1000 |", 12),
        ("global_step: 12", 12),
        ("global step 12", 12),
        ("[step 12] loss 1", 12),
        ("Iter 12", 12),
        ('{"step": 12, "loss": 3}', 12),
        ("[rank0]: step 12", 12),
        ("step 3 x\nstep 12", 12),
        ("step 12\rstep 13", 13),
        ("step time 0.5", None),
        ("step time: 12", None),
        ("step 0.35 s", None),
        ("step 350ms", None),
        ("max_steps=1000", None),
        ("total steps: 1000", None),
        ("footstep 12", None),
        ("loss 12", None),
    ],
)
def test_what_counts_as_a_step(line: str, step: int | None) -> None:
    progress = Progress(now=0)
    feed(progress, line, 1)
    assert progress.step == step


def test_each_rank_is_counted() -> None:
    progress = Progress(now=0)
    feed(progress, "step 5", 1, rank=0)
    feed(progress, "step 3", 1, rank=1)
    assert (progress.steps, progress.step) == ({0: 5, 1: 3}, 5)


def test_a_pattern_of_ones_own() -> None:
    progress = Progress(r"batch (\d+)", now=0)
    feed(progress, "step 5 batch 8", 1)
    assert progress.step == 8


def test_a_pattern_without_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no group"):
        Progress(r"step \d+", now=0)


def test_the_default_pattern_names_its_group() -> None:
    assert "(?P<step>" in DEFAULT_PATTERN


def steps(progress: Progress, count: int, each: float, start: float = 0.0) -> float:
    now = start
    for step in range(count):
        now = start + step * each
        progress.note(0, step, now)
    return now


def test_the_first_step_may_take_long() -> None:
    progress = Progress(now=0, first_s=600, floor_s=5)
    assert progress.stalled(600) is None
    assert progress.stalled(601) == Stall(601, 600, None)


def test_the_limit_is_learned_from_the_steps() -> None:
    progress = Progress(now=0, factor=10, floor_s=5, first_s=600)
    now = steps(progress, 50, 2.0)
    assert progress.limit() == 20
    assert progress.stalled(now + 20) is None
    assert progress.stalled(now + 21) == Stall(21, 20, 49)


def test_the_limit_is_never_under_the_floor() -> None:
    progress = Progress(now=0, floor_s=30)
    now = steps(progress, 50, 0.01)
    assert progress.limit() == 30
    assert progress.stalled(now + 29) is None


def test_regular_long_steps_are_learned_too() -> None:
    progress = Progress(now=0, factor=4, floor_s=1)
    now = 0.0
    for step in range(60):
        now += 20.0 if step % 5 == 0 else 1.0
        progress.note(0, step, now)
    assert progress.stalled(now + 60) is None


def test_numbers_that_do_not_change_are_no_progress() -> None:
    progress = Progress(now=0, floor_s=10)
    now = steps(progress, 20, 1.0)
    progress.note(0, 19, now + 100)
    stall = progress.stalled(now + 101)
    assert stall is not None
    assert stall.seconds == 101


def test_any_rank_that_moves_is_progress() -> None:
    progress = Progress(now=0, floor_s=10)
    now = steps(progress, 20, 1.0)
    progress.note(3, 4, now + 9)
    assert progress.stalled(now + 15) is None


def test_after_a_restart_the_first_step_may_take_long_again_and_numbers_may_be_lower() -> None:
    progress = Progress(now=0, floor_s=10, first_s=600)
    now = steps(progress, 50, 1.0)
    progress.restarted(now)
    assert progress.step is None
    assert progress.stalled(now + 500) is None
    progress.note(0, 30, now + 500)
    assert progress.stalled(now + 511) is not None


def test_the_first_step_is_the_first_that_was_done_not_the_checkpoint_that_was_loaded() -> None:
    progress = Progress(now=0)
    progress.feed(Chunk(file="r", data=b"resumed from step 30\n", rank=0), 1)
    assert (progress.first, progress.step) == (None, None)
    progress.feed(Chunk(file="r", data=b"step 31 loss 2.1\nstep 32 loss 2.0\n", rank=0), 2)
    progress.feed(Chunk(file="r", data=b"step 33 loss 2.0\n", rank=0), 3)
    assert (progress.first, progress.step) == (31, 33)
