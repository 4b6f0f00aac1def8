"""What is said on standard error and where a person may copy from it, on a real terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from transom_cli.main import ENTRIES
from transom_cli.text import _OWN, wrapped

LONG = "scontrol update nodename=n3 state=down reason='job 5, it does not end at all; it is long'"


def on_a_terminal(*words: str, cwd: Path) -> tuple[int, list[str]]:
    """Run ``transom`` with everything on a terminal of 80 columns; return its exit code and the lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "TRANSOM_URL")}
    env |= {"TERM": "dumb", "TRANSOM_SOCKET": str(cwd / "none")}
    argv = [sys.executable, "-m", "transom_cli.main", *words]
    process = subprocess.Popen(argv, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = b""
    try:
        while block := os.read(ours, 65536):
            told += block
    except OSError:
        pass
    finally:
        os.close(ours)
    return process.wait(timeout=60), told.decode().replace("\r", "").splitlines()


def test_an_error_breaks_between_words(tmp_path: Path) -> None:
    code, lines = on_a_terminal("status", cwd=tmp_path)
    assert code == 3
    assert len(lines) > 2
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert re.sub(r"\s+", " ", " ".join(lines)).startswith(
        f"transom: asking transomd at {tmp_path}/none: there is no such socket: the daemon does not run here, or uses"
    )


@pytest.mark.parametrize("room", [30, 50, 80])
def test_a_command_is_never_broken(room: int) -> None:
    lines = wrapped(f"next: {LONG}; then look again: transom status 12 --watch", room, whole=True)
    assert any(LONG in line for line in lines)
    assert any("transom status 12 --watch" in line for line in lines)
    assert all(len(line) <= room for line in lines if LONG not in line and "transom" not in line)
    assert " ".join(lines).split() == f"next: {LONG}; then look again: transom status 12 --watch".split()


def test_a_short_command_in_a_page_is_not_broken() -> None:
    text = "its time limit is above its partition's; waiting does not help. See: scontrol show partition main; then so"
    lines = wrapped(text, 76)
    assert any("scontrol show partition main;" in line for line in lines)
    assert max(len(line) for line in lines) <= 76


def test_words_alone_are_no_command() -> None:
    text = "sbatch refused the job and transom said so, because the transomd of the site had no right to do it as asked"
    assert max(len(line) for line in wrapped(text, 40, indent="", whole=True)) <= 40


def test_blanks_before_a_long_word_make_no_empty_line() -> None:
    path = "/a/path/that/is/longer/than/a/line"
    assert wrapped(f"  {path} is not there", 20, indent="", whole=True) == [f"  {path}", "  is not there"]


def test_without_a_terminal_it_is_one_line() -> None:
    for whole in (False, True):
        assert wrapped("word " * 40, 0, indent="", whole=whole) == ["word " * 40]


def test_every_command_of_transom_counts_as_one() -> None:
    assert set(_OWN.split("|")) == set(ENTRIES)
