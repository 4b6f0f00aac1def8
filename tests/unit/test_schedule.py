"""The order in which files of tests are dealt out."""

from __future__ import annotations

from pathlib import Path

from schedule import SECONDS, SHORT_S, dealt

TESTS = Path(__file__).parents[1]
FILES = [file for kind in ("cluster", "contract", "unit") for file in sorted((TESTS / kind).glob("test_*.py"))]


def test_every_file_is_dealt_once_in_the_same_order_whatever_they_come_in() -> None:
    assert sorted(dealt(FILES)) == sorted(FILES)
    assert dealt(reversed(FILES)) == dealt(set(FILES)) == dealt(FILES)


def begun(whole_cluster: bool) -> dict[Path, float]:
    """The files of one kind as they are dealt, each with the part of the kind's time that is over when it begins."""
    files = [file for file in dealt(FILES) if ("cluster" in file.parts) is whole_cluster]
    seconds = [SECONDS.get(file.stem, SHORT_S) for file in files]
    assert seconds == sorted(seconds, reverse=True), "the longest come first"
    return {file: sum(seconds[:number]) / sum(seconds) for number, file in enumerate(files)}


def test_as_much_of_the_one_kinds_time_goes_by_as_of_the_others() -> None:
    gone = begun(True) | begun(False)
    parts = [gone[file] for file in dealt(FILES)]
    assert parts == sorted(parts)


def test_no_file_is_named_that_is_not_there() -> None:
    assert set(SECONDS) <= {file.stem for file in FILES}
