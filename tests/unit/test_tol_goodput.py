"""Where a job's time went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transom_sql.records import Launch

from transomd.tol.goodput import Goodput, goodput


def launch(epoch: int, first: int | None, last: int | None, began: float, step_s: float = 1.0) -> Launch:
    """A launch whose first step began at ``began`` and whose steps took ``step_s`` each."""
    told: dict[str, float | None] = {"first_step_at": None, "last_step_at": None}
    if first is not None and last is not None:
        told = {"first_step_at": began + step_s, "last_step_at": began + step_s * (last - first + 1)}
    return Launch(
        job_id=1,
        epoch=epoch,
        attempt=1,
        nodes=("n1",),
        started_at=began - 0.5,
        first_step=first,
        last_step=last,
        **told,  # type: ignore[arg-type]
    )


def test_without_a_failure_all_steps_are_productive() -> None:
    found = goodput([launch(1, 1, 60, 10.0)], 0.0, 75.0)
    assert found == Goodput(productive_s=60.0, starting_s=10.0, ending_s=5.0, kept_steps=60)
    assert found.share == pytest.approx(0.8)


def test_steps_that_are_computed_twice_count_once() -> None:
    found = goodput([launch(1, 1, 37, 10.0), launch(2, 31, 60, 60.0)], 0.0, 92.0)
    assert (found.kept_steps, found.redone_steps) == (60, 7)
    assert found == Goodput(
        productive_s=60.0,
        redone_s=7.0,
        starting_s=10.0,
        stopped_s=13.0,
        ending_s=2.0,
        kept_steps=60,
        redone_steps=7,
    )


def test_going_back_behind_an_earlier_restart_loses_the_steps_of_both_launches() -> None:
    found = goodput([launch(1, 1, 30, 0.5), launch(2, 21, 40, 50.0), launch(3, 11, 50, 90.0)], 0.0, 130.0)
    assert (found.kept_steps, found.redone_steps) == (10 + 0 + 40, 20 + 20)
    assert found.productive_s == pytest.approx(50.0)


def test_a_launch_that_came_to_no_step_is_time_that_was_stopped() -> None:
    found = goodput([launch(1, 1, 10, 5.0), launch(2, None, None, 20.0), launch(3, 11, 20, 30.0)], 0.0, 40.0)
    assert (found.kept_steps, found.redone_steps, found.stopped_s) == (20, 0, 15.0)


def test_a_job_that_never_came_to_a_step_was_starting_all_the_time() -> None:
    assert goodput([launch(1, None, None, 3.0)], 0.0, 20.0) == Goodput(starting_s=20.0)
    assert goodput([], 0.0, 0.0).share == 0.0


def test_a_single_step_has_no_known_length() -> None:
    only = launch(1, 1, 1, 5.0, step_s=2.0)
    assert goodput([only], 0.0, 10.0) == Goodput(starting_s=7.0, ending_s=3.0, kept_steps=1)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 100), st.floats(0, 5)),
        max_size=6,
    ),
    st.floats(0, 300),
)
def test_every_second_is_in_one_bucket(shapes: list[tuple[int, int, float, float]], ended: float) -> None:
    launches = [launch(n, first, first + more, began, took) for n, (first, more, began, took) in enumerate(shapes)]
    found = goodput(launches, 0.0, ended)
    buckets = (found.productive_s, found.redone_s, found.starting_s, found.stopped_s, found.ending_s)
    assert all(seconds >= -1e-6 for seconds in buckets)
    assert found.wall_s == pytest.approx(ended, abs=1e-6)
    assert 0.0 <= found.share <= 1.0 + 1e-9
    assert found.kept_steps + found.redone_steps == sum(more + 1 for _, more, _, _ in shapes)
