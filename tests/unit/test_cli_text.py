"""Text for a terminal: nothing in it steers the terminal, and it fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transom_cli.text import ago, clip, hosts, log_line, plain, safe, size, span, table, wrapped
from transom_slurm.nodesets import expand, fold

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9b31m\u202ec\u200bd\ud800\x00"


def test_nothing_steers_the_terminal() -> None:
    told = safe(HOSTILE + "\n\tnext")
    assert told == "a\\x1b[2J\\x1b]0;title\\x07b\\x9b31m\\u202ec\\u200bd\\ud800\\x00\n\tnext"
    assert told.encode()
    assert "\n" not in plain(HOSTILE + "\nnext")


def test_a_log_goes_into_a_file_as_it_is() -> None:
    assert log_line(HOSTILE, terminal=False) == HOSTILE


def test_on_a_terminal_only_a_logs_colours_still_act() -> None:
    assert log_line("\x1b[31mred\x1b[0m \x1b[2Jx", terminal=True) == "\x1b[31mred\x1b[0m \\x1b[2Jx\x1b[0m"
    assert log_line("10%\r50%\r100%", terminal=True) == "100%"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (0.42, "0.4s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (7500, "2h05m"),
        (273600, "3d04h"),
        (-1, "0s"),
    ],
)
def test_spans(seconds: float, expected: str) -> None:
    assert span(seconds) == expected


def test_ago() -> None:
    assert ago(100.0, 292.3) == "3m12s ago"
    assert ago(None, 1.0) == "-"


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]


def test_hosts_are_folded_and_what_is_no_host_is_shown_harmless() -> None:
    assert hosts(["n3", "n1", "n2"]) == "n[1-3]"
    assert hosts(["n1", "x\x1b[2J"]) == "n1,x\\x1b[2J"


def test_a_table_fits_and_its_last_column_takes_what_is_left() -> None:
    lines = table(("A", "B", "C"), [("1", "x" * 50, "word " * 40), ("22", "y\n", "z")], (4, 10, 0), 40)
    assert lines[0] == "A   B           C"
    assert lines[1].startswith("1   xxxxxxxxx…  word word")
    assert max(len(line) for line in lines) == 40
    assert lines[2] == "22  y           z"


def test_without_a_limit_nothing_of_the_last_column_is_cut() -> None:
    assert table(("A", "B"), [("1", "z" * 500)], (4, 0), 0)[1] == "1  " + "z" * 500


def test_wrapping_keeps_words_and_cuts_what_has_none() -> None:
    assert wrapped("one two three four", 12) == ["  one two", "  three four"]
    assert max(len(line) for line in wrapped("x" * 100 + " y", 20)) == 20
    assert wrapped("a\nb", 0) == ["  a", "  b"]


def test_clip() -> None:
    assert (clip("abc", 3), clip("abcd", 3), clip("abcd", 0)) == ("abc", "ab…", "abcd")


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "a1b"]), st.integers(0, 120), st.integers(1, 3)),
        min_size=1,
        max_size=120,
    )
)
def test_folding_quickly_means_the_same_as_clustershell(parts: list[tuple[str, int, int]]) -> None:
    names = sorted({f"{prefix}{number:0{width}d}" for prefix, number, width in parts})
    assert sorted(expand(hosts(names))) == names


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50, unique=True), st.booleans())
def test_folding_one_prefix_writes_what_clustershell_writes(numbers: list[int], padded: bool) -> None:
    names = [f"gpu-{number:03d}" if padded else f"gpu-{number}" for number in numbers]
    assert hosts(names) == fold(names)
