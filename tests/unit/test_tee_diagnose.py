"""``transom diagnose``: a corpus of incidents, and files that are packed, missing, hostile or endless."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transom_cli.main import run

from transomd.errors import UsageError
from transomd.tee.catalogue import load
from transomd.tee.diagnose import diagnose, owner_of, verdict_to_json
from transomd.tee.document import page
from transomd.tee.tail import Owner
from transomd.words import Action, Blame, FailureClass

ROOT = Path(__file__).parents[2]
CORPUS = sorted(path for path in (ROOT / "tests/golden/tee").iterdir() if path.is_dir())
NOW = 1_780_000_000.0
TRACEBACK = "Traceback (most recent call last):\n  File \"train.py\", line 9, in <module>\nKeyError: 'labels'\n"
KEYS = ["class", "blame", "nodes", "ranks", "action", "confidence", "evidence", "summary"]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("incident", CORPUS, ids=[path.name for path in CORPUS])
def test_an_incident_of_the_corpus(incident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(incident)
    logs = sorted(path.name for path in incident.iterdir() if path.name != "verdict.json")
    wanted = json.loads(Path("verdict.json").read_text())
    assert verdict_to_json(diagnose(logs, now=NOW)) == wanted


@pytest.mark.parametrize("incident", CORPUS, ids=[path.name for path in CORPUS])
def test_the_order_of_files_decides_nothing(incident: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(incident)
    logs = sorted(path.name for path in incident.iterdir() if path.name != "verdict.json")
    wanted = json.loads(Path("verdict.json").read_text())
    found = verdict_to_json(diagnose(logs[::-1], now=NOW))
    assert {key: found[key] for key in ("class", "blame", "nodes", "ranks", "action", "confidence")} == {
        key: wanted[key] for key in ("class", "blame", "nodes", "ranks", "action", "confidence")
    }


def test_the_keys_are_part_of_the_interface(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(TRACEBACK)
    found = verdict_to_json(diagnose([str(log)]))
    assert list(found) == KEYS
    assert list(found["evidence"][0]) == ["file", "line", "text", "signature", "role"]


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("logs/rank-00003.log", Owner(rank=3)),
        ("job.rank7.out", Owner(rank=7)),
        ("dmesg-n2.txt", Owner(node="n2")),
        ("gpu-a-07.dmesg", Owner(node="gpu-a-07")),
        ("slurm-4711.out", Owner()),
        ("crank3.log", Owner()),
    ],
)
def test_the_name_of_a_file_says_who_wrote_it(name: str, owner: Owner) -> None:
    assert owner_of(name) == owner


def test_gzip_is_undone_whatever_the_name(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(gzip.compress(TRACEBACK.encode()))
    assert diagnose([str(log)]).failure_class is FailureClass.USER_CODE


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    log = tmp_path / "a.log.gz"
    log.write_bytes(gzip.compress(TRACEBACK.encode() * 1000)[:40])
    with pytest.raises(UsageError, match=r"diagnose .*a\.log\.gz: "):
        diagnose([str(log)])


@pytest.mark.parametrize("what", ["missing", "folder"])
def test_a_file_that_cannot_be_read_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path if what == "folder" else tmp_path / "none.log"
    with pytest.raises(UsageError, match=f"diagnose {path}: "):
        diagnose([str(path)])


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("srun: error: n2: task 5: Killed\n")
    assert diagnose([str(log), str(log)]).evidence[0].count == 1


def test_an_empty_file_is_unknown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.touch()
    verdict = diagnose([str(log)])
    assert (verdict.failure_class, verdict.blame, verdict.action) == (
        FailureClass.UNKNOWN,
        Blame.UNKNOWN,
        Action.RESTART,
    )


def test_a_program_that_prints_forged_lines_drains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("n9: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
    verdict = diagnose([str(log)])
    assert (verdict.action, verdict.drainable) == (Action.EXCLUDE, ())


def test_ordinary_lines_cost_little(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    line = "2026-03-02 03:10:{n:02d},1 INFO train.py:88 step {s} loss {loss:.4f} lr 3.0e-4 grad_norm 1.{n}\n"
    block = "".join(line.format(n=s % 60, s=s, loss=3 - s / 1e5) for s in range(10_000)).encode()
    log.write_bytes(block * 20)
    start = time.process_time()
    diagnose([str(log)])
    speed = len(block) * 20 / 1e6 / (time.process_time() - start)
    assert speed > 50, f"{speed:.0f} MB/s"


def test_the_command_ends_with_the_codes_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, unknown = tmp_path / "known.log", tmp_path / "unknown.log"
    known.write_text(TRACEBACK)
    unknown.write_text("all is well\n")
    assert run(["diagnose", str(known)]) == 0
    assert "KeyError: 'labels'" in capsys.readouterr().out
    assert run(["diagnose", str(unknown)]) == 7
    capsys.readouterr()
    assert run(["diagnose", str(known), str(tmp_path / "none.log")]) == 2
    captured = capsys.readouterr()
    assert "none.log: No such file or directory" in captured.err
    assert run(["diagnose"]) == 2


def test_the_command_prints_json_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text(TRACEBACK)
    assert run(["diagnose", "--json", str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "user-code"


def test_the_command_shows_no_escapes_of_a_hostile_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(
        b"\x1b]0;x\x07ValueError: \x1b[2J\x9b\xe2\x80\xaeboo\r\nTraceback (most recent call last):\nKeyError: \x1b[5m"
    )
    run(["diagnose", str(log)])
    out = capsys.readouterr().out
    assert not any(ord(char) < 32 and char != "\n" for char in out)
    assert "\u202e" not in out


def test_standard_input_is_read() -> None:
    program = "from transom_cli.main import main; main(['diagnose', '--json', '-'])"
    done = subprocess.run([sys.executable, "-c", program], input=TRACEBACK.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["evidence"][0]["file"] == "-"


def test_the_page_of_signatures_is_made_from_the_catalogue() -> None:
    assert (ROOT / "docs/signatures.md").read_text() == page(load())


def test_logs_that_say_nothing_are_named_with_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    Path("empty").write_bytes(b"")
    Path("weights.bin").write_bytes(b"\x7fELF\0\0" * 500)
    Path("notes.txt").write_text("hello\nworld")
    assert run(["diagnose", "empty", "weights.bin", "notes.txt"]) == 7
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Nothing that was read says what failed:"
    assert lines[2:5] == [
        "  empty: empty",
        "  weights.bin: 2.9 KiB of no text, so nothing in it was understood",
        "  notes.txt: 2 lines (11 B), without a sign of a failure that transom knows",
    ]
    assert lines[6].startswith("next: give all that was printed around the failure at once")
    assert max(map(len, lines)) <= 80
    assert run(["diagnose", "weights.bin", "--json"]) == 7
    assert list(json.loads(capsys.readouterr().out)) == KEYS
