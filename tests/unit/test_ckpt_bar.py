"""The progress bar: on a terminal, after two seconds, and gone afterwards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TextIO

import pytest
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
