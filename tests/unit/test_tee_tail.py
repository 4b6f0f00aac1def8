"""The tailer on real files: growth, rotation, truncation, links, budgets, and writers that are still at it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transomd.tee.matcher import Matcher
from transomd.tee.tail import CHUNK, LONGEST_WAIT, Owner, Tailer, rank_of_name
from transomd.tee.types import Chunk


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def text(chunks: list[Chunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("rank-00003.log", Owner(rank=3)),
        ("rank-0.log", Owner(rank=0)),
        ("rank-00003.log.gz", None),
        ("rank-x.log", None),
        ("other", None),
    ],
)
def test_the_rank_stands_in_the_name(name: str, owner: Owner | None) -> None:
    assert rank_of_name(name) == owner


def test_what_is_new_comes_once_as_whole_lines_with_its_rank(tmp_path: Path) -> None:
    log = tmp_path / "rank-00003.log"
    tailer = Tailer(tmp_path)
    assert list(tailer.poll()) == []
    append(log, b"one\ntwo\nthr")
    assert list(tailer.poll()) == [Chunk(file=log.name, data=b"one\ntwo\n", rank=3, fresh=True)]
    assert list(tailer.poll()) == []
    append(log, b"ee\n")
    assert list(tailer.poll()) == [Chunk(file=log.name, data=b"three\n", rank=3)]


def test_the_last_words_come_without_their_newline_at_the_end(tmp_path: Path) -> None:
    append(tmp_path / "rank-0.log", b"one\nKilled")
    tailer = Tailer(tmp_path)
    assert text(list(tailer.poll())) == b"one\n"
    assert text(list(tailer.poll(final=True))) == b"Killed"


def test_a_progress_bar_without_newlines_is_read(tmp_path: Path) -> None:
    append(tmp_path / "rank-0.log", b"1%\r2%\r3")
    assert text(list(Tailer(tmp_path).poll())) == b"1%\r2%\r"


def test_a_line_without_end_is_handed_on_in_pieces(tmp_path: Path) -> None:
    append(tmp_path / "rank-0.log", b"x" * (LONGEST_WAIT + 1))
    assert len(text(list(Tailer(tmp_path).poll()))) == LONGEST_WAIT + 1


def test_a_truncated_file_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    append(log, b"one\ntwo\n")
    tailer = Tailer(tmp_path)
    list(tailer.poll())
    log.write_bytes(b"new\n")
    assert list(tailer.poll()) == [Chunk(file=log.name, data=b"new\n", rank=0, fresh=True)]


def test_a_rotated_file_starts_again(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    append(log, b"one\ntwo\n")
    tailer = Tailer(tmp_path)
    list(tailer.poll())
    log.rename(tmp_path / "rank-0.log.1")
    append(log, b"a longer first line than before\n")
    assert list(tailer.poll()) == [Chunk(file=log.name, data=b"a longer first line than before\n", rank=0, fresh=True)]


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    (tmp_path / "rank-0.log").symlink_to(secret)
    os.mkfifo(tmp_path / "rank-1.log")
    (tmp_path / "rank-2.log").mkdir()
    append(tmp_path / "rank-3.log", b"fine\n")
    tailer = Tailer(tmp_path)
    assert text(list(tailer.poll())) == b"fine\n"
    assert set(tailer.errors) == {"rank-0.log", "rank-1.log", "rank-2.log"}


def test_a_folder_that_is_not_there_yet_is_said_and_tried_again(tmp_path: Path) -> None:
    tailer = Tailer(tmp_path / "logs")
    assert list(tailer.poll()) == []
    assert tailer.errors == {str(tmp_path / "logs"): "No such file or directory"}
    (tmp_path / "logs").mkdir()
    append(tmp_path / "logs" / "rank-0.log", b"one\n")
    assert text(list(tailer.poll())) == b"one\n"
    assert tailer.errors == {}


def test_one_busy_rank_starves_nobody(tmp_path: Path) -> None:
    append(tmp_path / "rank-0.log", b"a line of the busy rank\n" * (3 * CHUNK // 24))
    append(tmp_path / "rank-1.log", b"quiet\n")
    tailer = Tailer(tmp_path)
    polls = []
    while chunks := list(tailer.poll(budget=CHUNK)):
        append(tmp_path / "rank-0.log", b"more\n")
        polls.append({chunk.file for chunk in chunks})
        if len(polls) == 6:
            break
    assert any("rank-1.log" in files for files in polls)


def test_a_poll_keeps_to_its_budget(tmp_path: Path) -> None:
    for rank in range(4):
        append(tmp_path / f"rank-{rank}.log", b"0123456789\n" * (CHUNK // 11))
    assert len(text(list(Tailer(tmp_path).poll(budget=CHUNK)))) <= 2 * CHUNK


def test_a_rank_that_fails_while_it_is_followed_is_found(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfor n in range(40):\n    print('step', n, flush=True); time.sleep(0.005)\n{}['labels']\n"
    )
    with (tmp_path / "rank-00001.log").open("wb") as out:
        rank = subprocess.Popen([sys.executable, "-c", program], stdout=out, stderr=subprocess.STDOUT)
    tailer, matcher = Tailer(tmp_path), Matcher()
    lines = 0
    deadline = time.monotonic() + 60
    while rank.poll() is None and time.monotonic() < deadline:
        for chunk in tailer.poll():
            lines += chunk.data.count(b"\n")
            matcher.feed(chunk, time.time())
    for chunk in tailer.poll(final=True):
        lines += chunk.data.count(b"\n")
        matcher.feed(chunk, time.time())
    matcher.finish()
    assert rank.wait() == 1
    assert [(one.signature, one.rank, one.line) for one in matcher.evidence()] == [("PY-EXCEPTION", 1, 41)]
    assert lines > 41
