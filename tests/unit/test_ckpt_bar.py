"""The progress bar: on a terminal, after two seconds, and gone afterwards."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from transom_cli import progress
from transom_cli.commands import ckpt_bar
from transom_cli.commands.ckpt_bar import ByteBar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A real terminal: what a program writes into, and where the screen's side of it is read."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen, program = os.openpty()
    with os.fdopen(program, "w") as stream:
        yield stream, screen
    os.close(screen)


def seen(stream: TextIO, screen: int) -> str:
    """Everything that came to the screen so far."""
    stream.write("END")
    stream.flush()
    content = b""
    while b"END" not in content:
        content += os.read(screen, 1 << 16)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", content.decode()).removesuffix("END")


def work(stream: TextIO, seconds: float) -> None:
    now = iter([100.0, 100.0 + seconds])
    with ByteBar("verifying step 7", 1000, stream=stream, clock=lambda: next(now)) as bar:
        bar.advance(400)


def test_after_two_seconds_it_shows_how_far_the_work_has_come(terminal: tuple[TextIO, int]) -> None:
    work(terminal[0], 2.5)
    text = seen(*terminal)
    assert "verifying step 7" in text
    assert "400/1,000 bytes" in text


def test_quick_work_shows_nothing(terminal: tuple[TextIO, int]) -> None:
    work(terminal[0], 1.5)
    assert seen(*terminal) == ""


def test_a_pipe_sees_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        ByteBar("x", 10, stream=stream, clock=iter([0.0, 99.0]).__next__).advance(5)
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_it_goes_for_a_line_and_comes_back_with_other_words(terminal: tuple[TextIO, int]) -> None:
    stream, screen = terminal
    with ByteBar("verifying step 7", 1000, stream=stream, clock=iter([0.0, *[9.0] * 9]).__next__) as bar:
        bar.advance(400)
        bar.hide()
        before = seen(stream, screen)
        bar.turn_to("verifying step 8")
        bar.advance(100)
        after = seen(stream, screen)
    assert "verifying step 7" in before
    assert "verifying step 8" in after
    assert "500/1,000 bytes" in after


def test_what_the_process_writes_moves_the_bar(
    terminal: tuple[TextIO, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal[0])
    monkeypatch.setattr(ckpt_bar, "AFTER_S", 0.0)
    monkeypatch.setattr(ckpt_bar, "EVERY_S", 0.01)
    text = ""
    with ckpt_bar.writing("importing x", 3000) as _:
        (tmp_path / "f").write_bytes(bytes(5000))
        deadline = time.monotonic() + 60
        while "2.9/2.9 KiB" not in text and time.monotonic() < deadline:
            text += seen(*terminal)
    assert "importing x" in text
    assert "2.9/2.9 KiB" in text, "and never more than all"


def test_a_line_that_says_what_goes_on_never_wraps(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal[0])
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    text = ""
    with progress.working("removing \x1b]0;" + "x" * 200):
        while "0 s" not in text:
            text += seen(*terminal)
    lines = [line for line in text.split("\r") if line]
    assert lines
    assert max(map(len, lines)) < 100
    assert "\x1b" not in text
