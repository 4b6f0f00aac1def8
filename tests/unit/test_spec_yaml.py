"""YAML with lines, without YAML's guesses, and harmless whatever it holds."""

from __future__ import annotations

import pytest

from transomd.yamldoc import read_yaml


def faults(text: str) -> list[str]:
    return [fault.text("f") for fault in read_yaml(text).faults]


def test_scalars_stay_as_written() -> None:
    text = "time: 12:00:00\nflag: no\noctal: 010\nfloat: 1e3\ndate: 2026-01-01\nquoted: 'null'\nbig: 1_000\n"
    assert read_yaml(text).values == {
        "time": "12:00:00",
        "flag": "no",
        "octal": "010",
        "float": "1e3",
        "date": "2026-01-01",
        "quoted": "null",
        "big": "1_000",
    }


def test_an_empty_field_counts_as_not_written() -> None:
    assert read_yaml("a:\nb: ~\nc: null\nd: ''\n").values == {"d": ""}


def test_every_key_and_item_has_its_line() -> None:
    document = read_yaml("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y\n")
    assert document.line(("b", "c")) == 3
    assert document.line(("b", "d", 1)) == 6
    assert document.line(("b", "unknown")) == 2


def test_keys_written_twice_are_refused_at_any_depth() -> None:
    assert faults("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n") == [
        "f:4: b.c: is written twice (also in line 3); keep one",
        "f:5: a: is written twice (also in line 1); keep one",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: b: c\n", "f:1: is not YAML: mapping values are not allowed here (column 5)"),
        ("a: [1,\n", "f:2: is not YAML: "),
        ("\tname: x\n", "f:1: is not YAML: found character '\\t' that cannot start any token (column 1)"),
        ("- a\n- b\n", "f:1: must be a mapping of fields such as `name: demo`"),
        ("just words\n", "f:1: must be a mapping"),
        ("a: 1\n---\nb: 2\n", "f:2: is not YAML: but found another document"),
        ("a: *nowhere\n", "f:1: is not YAML: found undefined alias"),
        ("a: \x07\n", "is not YAML: special characters are not allowed"),
        ("? [a, b]\n: c\n", "f:1: a field's name must be one word"),
    ],
)
def test_what_is_no_mapping_is_told_with_its_place(text: str, expected: str) -> None:
    (told,) = faults(text)
    assert expected in told


def test_tags_construct_nothing() -> None:
    document = read_yaml("a: !!python/object/apply:os.system ['true']\n")
    assert "plain values only" in document.faults[0].message
    assert document.values == {"a": ["true"]}


def test_aliases_that_name_billions_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "more than" in faults("\n".join(lines))[0]


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: " + "[" * 5000 + "]" * 5000])
def test_nesting_without_end_is_refused(text: str) -> None:
    assert "nested too deeply" in faults(text)[0]


def test_an_empty_file_is_an_empty_mapping() -> None:
    assert read_yaml("# nothing\n").values == {}
