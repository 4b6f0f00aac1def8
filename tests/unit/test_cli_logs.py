"""transom logs: the files of the ranks, read as the user, followed across restarts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_server import Recorded, a_job, a_view, serving, start, transom
from transom_cli.tail import Tail, log_files


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write(tmp_path / "run", 1, 0, "old\n")
    write(tmp_path / "run", 2, 0, "".join(f"a{n}\n" for n in range(20)))
    write(tmp_path / "run", 2, 1, "b0\nb1 without end")
    write(tmp_path / "run", 2, 10, "k0\n")
    return tmp_path / "run"


@pytest.fixture
def server(tmp_path: Path, run_dir: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        recorded.on("GET /v1/jobs/12", (200, a_view(job=a_job(run_dir=str(run_dir)))))
        yield recorded


def write(run_dir: Path, epoch: int, rank: int, text: str) -> Path:
    path = run_dir / "logs" / f"e{epoch:06d}" / f"rank-{rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
    return path


def end(server: Recorded, run_dir: Path) -> None:
    server.on("GET /v1/jobs/12", (200, a_view(job=a_job(state="completed", run_dir=str(run_dir)))))


def test_the_newest_launch_rank_by_rank(server: Recorded) -> None:
    lines = transom("logs", "12", socket=server.socket).stdout.splitlines()
    assert lines[0] == "[e2 r0] a0"
    assert lines[19:] == ["[e2 r0] a19", "[e2 r1] b0", "[e2 r1] b1 without end", "[e2 r10] k0"]


def test_one_rank_of_one_launch_needs_no_prefix(server: Recorded) -> None:
    assert transom("logs", "12", "--rank", "0", "--epoch", "1", socket=server.socket).stdout == "old\n"


def test_the_last_lines(server: Recorded) -> None:
    assert transom("logs", "12", "-n", "2", "--rank", "0", socket=server.socket).stdout == "a18\na19\n"
    assert transom("logs", "12", "-n", "1", "--rank", "1", socket=server.socket).stdout == "b1 without end\n"


def test_into_a_pipe_every_byte_goes_as_it_is(server: Recorded, run_dir: Path) -> None:
    write(run_dir, 3, 0, "\x1b[31mred\x1b[0m\r100%\n")
    assert transom("logs", "12", socket=server.socket).stdout.splitlines()[0].endswith("red\x1b[0m")


@pytest.mark.parametrize(("words", "which"), [(["--rank", "7"], "rank 7"), (["--epoch", "9"], "epoch 9")])
def test_no_log_comes_any_more_of_a_job_that_has_ended(
    server: Recorded, run_dir: Path, words: list[str], which: str
) -> None:
    end(server, run_dir)
    done = transom("logs", "12", *words, socket=server.socket)
    assert done.returncode == 5
    assert done.stderr.splitlines() == [
        f"transom: job 12 has no log of {which}: there are those of ranks 0 to 10 and epochs 1 to 2",
        "  next: transom logs 12",
    ]


def test_a_job_that_ended_before_it_ran_has_no_log_to_wait_for(server: Recorded, tmp_path: Path) -> None:
    (tmp_path / "none" / "logs").mkdir(parents=True)
    job = a_job(state="cancelled", reason="cancelled by alice", run_dir=str(tmp_path / "none"))
    server.on("GET /v1/jobs/12", (200, a_view(job=job)))
    done = transom("logs", "12", socket=server.socket)
    assert done.stderr.splitlines() == [
        "transom: job 12 has no log: it is cancelled, cancelled by alice",
        "  next: transom status 12",
    ]


@pytest.mark.parametrize("words", [["--rank", "7"], ["--epoch", "9"]])
def test_no_such_log(server: Recorded, run_dir: Path, words: list[str]) -> None:
    (run_dir / "logs" / "launcher.log").write_text("")
    done = transom("logs", "12", *words, socket=server.socket)
    assert done.returncode == 5
    assert "yet: it is running, epoch 2 runs on n[1-2,4-5]" in done.stderr
    assert "next: transom status 12, or transom logs 12 -f to wait for it" in done.stderr
    assert f"the launcher's own is {run_dir}/logs/launcher.log" in done.stderr


def test_a_run_folder_that_is_not_here(server: Recorded, tmp_path: Path) -> None:
    server.on("GET /v1/jobs/12", (200, a_view(job=a_job(run_dir=str(tmp_path / "gone")))))
    done = transom("logs", "12", socket=server.socket)
    assert done.returncode == 5
    assert f"reading the logs in {tmp_path}/gone: there is no such folder" in done.stderr


def read_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != wanted:
        line = process.stdout.readline()
        assert line, f"ended before {wanted!r}, after {lines}"
        lines.append(line.rstrip("\n"))
    return lines


def test_following_across_a_restart_to_the_end_of_the_job(server: Recorded, run_dir: Path) -> None:
    process = start("logs", "12", "-f", "-n", "1", socket=server.socket)
    assert "[e2 r0] a19" in read_until(process, "[e2 r10] k0")
    write(run_dir, 2, 1, " at last\nnext\n")
    assert read_until(process, "[e2 r1] next") == ["[e2 r1] b1 without end at last", "[e2 r1] next"]
    write(run_dir, 3, 0, "again from step 100\n")
    assert read_until(process, "[e3 r0] again from step 100") == ["[e3 r0] again from step 100"]
    write(run_dir, 3, 0, "the last line has no end")
    end(server, run_dir)
    out, _ = process.communicate(timeout=60)
    assert out == "[e3 r0] the last line has no end\n"
    assert process.returncode == 0


def test_following_waits_for_the_first_line_and_outlives_the_daemon(server: Recorded, tmp_path: Path) -> None:
    run_dir = tmp_path / "new"
    (run_dir / "logs").mkdir(parents=True)
    answers = iter([(200, a_view(job=a_job(run_dir=str(run_dir)))), (0, None)])
    ended = (200, a_view(job=a_job(state="completed", run_dir=str(run_dir))))
    server.on("GET /v1/jobs/12", lambda _: next(answers, ended))
    process = start("logs", "12", "-f", socket=server.socket)
    write(run_dir, 1, 0, "first\n")
    out, _ = process.communicate(timeout=60)
    assert out == "first\n"


def test_a_file_that_shrank_is_read_from_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 0, "one\ntwo\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one", "two"]
    path.write_text("x\n")
    assert list(tail.lines()) == ["x"]


def test_lines_come_whole(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 0, "par")
    tail = Tail(path)
    assert list(tail.lines()) == []
    write(tmp_path, 1, 0, "t\n")
    assert list(tail.lines()) == ["part"]
    path.write_bytes(b"part\nx\xff\xfe\n")
    assert list(tail.lines()) == ["x��"]


def test_a_line_without_an_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    tail = Tail(write(tmp_path, 1, 0, "x" * (3 << 20)))
    assert sum(len(line) for line in tail.lines()) > 2 << 20


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "e001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "rank-0.log")
    (folder / "rank-1.log").symlink_to("/etc/passwd")
    (folder / "rank-2.log.tmp").write_text("")
    assert log_files(tmp_path) == []
    assert list(Tail(folder / "rank-0.log").lines()) == []
    assert list(Tail(folder / "rank-1.log").lines()) == []


@pytest.mark.parametrize(
    ("lines", "expected"), [(0, []), (1, ["d"]), (3, ["b" * 99999, "c", "d"]), (9, ["a", "b" * 99999, "c", "d"])]
)
def test_the_last_lines_of_a_large_file(tmp_path: Path, lines: int, expected: list[str]) -> None:
    path = write(tmp_path, 1, 0, "a\n" + "b" * 99999 + "\nc\nd\n")
    assert list(Tail(path, last_lines=lines).lines()) == expected
