"""Durations and Slurm's time limits as people write them."""

from __future__ import annotations

import pytest

from transomd.forms import seconds, time_limit_seconds


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (90, 90.0),
        (1.5, 1.5),
        (0, 0.0),
        ("90", 90.0),
        ("0.5", 0.5),
        ("90s", 90.0),
        ("10m", 600.0),
        (" 1h30m ", 5400.0),
        ("1H30M", 5400.0),
        ("2d", 172800.0),
        ("1d2h3m4s", 93784.0),
    ],
)
def test_durations(written: object, expected: float) -> None:
    assert seconds(written) == expected


@pytest.mark.parametrize("written", ["", "soon", "-5", -5, "5x", "m", "10m1h", "1e3", "inf", float("nan"), True, "٣m"])
def test_what_is_no_duration_is_told_with_an_example(written: object) -> None:
    with pytest.raises(ValueError, match="must be a duration such as 90, 10m or 1h30m, got"):
        seconds(written)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("90", 90 * 60),
        ("90:30", 90 * 60 + 30),
        ("12:00:00", 12 * 3600),
        ("2-0", 2 * 86400),
        ("2-3:30", 2 * 86400 + 3 * 3600 + 30 * 60),
        ("1-02:03:04", 86400 + 2 * 3600 + 3 * 60 + 4),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_the_six_forms_of_a_time_limit(written: str, expected: int | None) -> None:
    assert time_limit_seconds(written) == expected


@pytest.mark.parametrize("written", ["", "1h", "1:2:3:4", "-1", "1-", "12:00:00 ", "0", "0:00", "1:000:00"])
def test_what_is_no_time_limit_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="got"):
        time_limit_seconds(written)
