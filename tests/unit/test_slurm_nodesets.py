"""Host lists in Slurm's grammar, with hostile ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transom_slurm.nodesets import HostlistError, expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("None assigned", []),
        ("n1", ["n1"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a[1-2]b[01-02]", ["a1b01", "a1b02", "a2b01", "a2b02"]),
        ("b,a[2-3],n-1.x_y", ["b", "a2", "a3", "n-1.x_y"]),
        ("n1,n[1-2],n1", ["n1", "n2"]),
        (" n1 , n2 ", ["n1", "n2"]),
        ("r[1-2]", ["r1", "r2"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n1,,n2", "an empty name"),
        ("ok,n[1-", r"n\[1-"),
        ("ok,n]", "n]"),
        ("n[3-1]", r"n\[3-1\]"),
        ("n[a-b]", r"n\[a-b\]"),
        ("n[]", r"n\[\]"),
        ("n[1-9/2]", r"1-9/2"),
        ("@rack1", "@rack1"),
        ("n1!n2", "n1!n2"),
        ("n*", r"n\*"),
        ("n1 n2", "n1 n2"),
        ("n1;reboot", "n1;reboot"),
        ("$(reboot)", "reboot"),
    ],
)
def test_the_error_names_the_part(text: str, part: str) -> None:
    with pytest.raises(HostlistError, match=part):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[1-65537]",
        "n[1-99999999999]",
        "n[1-1000]m[1-1000]",
        "n[1-40000],m[1-40000]",
        "n[0-1" + "0" * 6000 + "]",
        ",".join(["n[1-60000]"] * 50000),
    ],
)
def test_a_short_text_cannot_ask_for_any_number_of_names(text: str) -> None:
    with pytest.raises(HostlistError, match="more than 65536 names"):
        expand(text)
    assert len(expand("n[1-65536]")) == 65536


def test_fold() -> None:
    assert fold(["n5", "n2", "n1", "n1"]) == "n[1-2,5]"
    assert fold(["n08", "n09", "n10"]) == "n[08-10]"
    assert fold([]) == ""
    with pytest.raises(HostlistError, match="two words"):
        fold(["two words"])


@given(st.sets(st.from_regex(r"[a-z]{1,3}(0?[1-9]|[1-9][0-9]{0,2})(b[0-9]{1,2})?", fullmatch=True), max_size=20))
def test_folding_loses_nothing(names: set[str]) -> None:
    assert set(expand(fold(names))) == names


def test_ten_thousand_nodes_are_quick() -> None:
    names = expand("n[1-10000]")
    assert len(names) == 10_000
    assert fold(names) == "n[1-10000]"
