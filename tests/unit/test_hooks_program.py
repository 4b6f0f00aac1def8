"""The hooks' program on this machine: deadlines, spool, seals. What needs Slurm is in tests/cluster."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from transom_slurm.hooks import hook
from transom_slurm.hooks.install import HOOK, KINDS, configuration, install, make_key, slurm_conf

KEY = "k" * 64
PROBE = b"""\
import json, sys
print(json.dumps({"probe": 1, "host": {"hostname": "x"}, "asked": json.loads(sys.argv[1])}))
"""
SOON_S = 40
"""On a machine that pauses; what hangs here does so for a minute, and what its alarm ends tells nothing."""
HANGS = b"import time\ntime.sleep(60)\n"
REQUEST = {"parts": ["gpus", "kernel", "host", "disk", "remaps"], "disk": ["/"], "mounts": []}


class Daemon:
    """Answers like transomd, and keeps what it was told."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {"said": "fit", "refuse": ""}
        self.key = KEY
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                scheme, when, nonce, seal = self.headers["Authorization"].split()
                assert scheme == "Transom-Hook"
                assert seal == hook.mac(KEY, "transom-hook-1", when.encode(), nonce.encode(), body)
                outer.reports.append(json.loads(body))
                text = json.dumps(outer.answer).encode()
                self.send_response(200)
                self.send_header("X-Transom-Mac", hook.mac(outer.key, "transom-answer-1", nonce.encode(), text))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    made.close()


Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Hooks installed in a folder; the spool is beside them."""

    def make(url: str = "http://127.0.0.1:9", probe: bytes = PROBE, spool: str = "") -> Path:
        folder = tmp_path / "hooks"
        install(folder, probe, configuration(url, REQUEST, spool or str(tmp_path / "spool")), KEY)
        return folder

    return make


def run(folder: Path, kind: str, *, limit: float = 30, say: bool = True, **env: str) -> tuple[int, str]:
    """Run a hook as slurmd does: no PATH, and nothing but Slurm's variables."""
    argv = [str(folder / kind), *(["--say"] if say else [])]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit)
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_it_is_python_3_6_of_the_standard_library_and_knows_no_slurm_command() -> None:
    text = HOOK.read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert "subprocess" not in imported, "nothing is run but the probe"
    assert not any(f'"{word}' in text for word in ("scontrol", "squeue", "sinfo", "scancel", "srun"))
    assert text.startswith("#!/usr/bin/python3 -IS\n"), "a node has no PATH"


def test_installed_files_and_their_modes(place: Place, tmp_path: Path) -> None:
    folder = place()
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert modes == {
        **dict.fromkeys([*KINDS, "probe.py"], "0o755"),
        "hooks.json": "0o644",
        "hooks.key": "0o600",
    }
    told = json.loads((folder / "hooks.json").read_text())["probe"]
    assert told["prolog"]["parts"] == ["gpus", "kernel", "host", "disk"], "quick parts only"
    assert told["healthcheck"]["parts"] == REQUEST["parts"]
    assert f"Prolog={folder}/prolog\n" in slurm_conf(folder)
    first = make_key(tmp_path / "key")
    assert (make_key(tmp_path / "key"), len(first)) == (first, 64), "made once"


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_holds_what_slurm_and_the_probe_say(kind: str, place: Place, daemon: Daemon) -> None:
    folder = place(daemon.url)
    env = {"SLURM_JOB_ID": "71", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "gpu-7"}
    assert run(folder, kind, **env) == (0, f"{kind}: told transomd: fit\n")
    (report,) = daemon.reports
    assert (report["kind"], report["node"], report["slurm_job"], report["uid"]) == (kind, "gpu-7", 71, 1000)
    assert report["facts"]["asked"]["deadline"] == hook.PROBE[kind]
    assert abs(report["at"] - time.time()) < 20
    assert "gpus" in report["not_run"], "it says what it did not run"
    assert (report.get("leftovers") is not None) == (kind == "epilog")


def test_without_say_nothing_at_all_is_printed(place: Place) -> None:
    assert run(place(), "prolog", say=False) == (0, "")
    assert run(place(probe=b"raise SystemExit('no')"), "epilog", say=False, SLURM_JOB_ID="x") == (0, "")
    shutil.rmtree(place())
    assert subprocess.run([str(HOOK)], env={}, capture_output=True).stdout == b""


def test_the_name_may_be_another_where_slurm_says_which_hook_it_is(place: Place, daemon: Daemon) -> None:
    folder = place(daemon.url)
    (folder / "50-transom").symlink_to(folder / "prolog")
    assert run(folder, "50-transom", SLURM_SCRIPT_CONTEXT="epilog_slurmd") == (0, "epilog: told transomd: fit\n")


def test_a_prolog_fails_only_on_a_sealed_word(place: Place, daemon: Daemon) -> None:
    folder = place(daemon.url)
    daemon.answer = {"said": "unfit", "refuse": "gpu-count: 7 of 8"}
    assert run(folder, "prolog") == (1, "prolog: refused: gpu-count: 7 of 8\n")
    assert run(folder, "epilog")[0] == 0
    assert run(folder, "healthcheck")[0] == 0
    daemon.key = "another" * 8
    code, said = run(folder, "prolog")
    assert (code, "not our transomd" in said) == (0, True)


def test_a_probe_that_hangs_is_left_behind(place: Place, daemon: Daemon) -> None:
    folder = place(daemon.url, probe=HANGS)
    began = time.monotonic()
    assert run(folder, "prolog")[0] == 0
    assert time.monotonic() - began < SOON_S
    (report,) = daemon.reports
    assert (report["facts"], "no answer within" in report["error"]) == ({}, True)


def test_a_daemon_that_accepts_and_never_answers(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        folder = place(f"http://127.0.0.1:{deaf.getsockname()[1]}")
        began = time.monotonic()
        code, said = run(folder, "prolog")
        took = time.monotonic() - began
    assert (code, "no answer within 2.0 s; the report is kept" in said) == (0, True)
    assert hook.ANSWER <= took < SOON_S


def test_the_alarm_ends_it_whatever_happens(place: Place) -> None:
    """As if a child could neither be waited for nor killed: the process itself is asleep when the alarm comes."""
    folder = place()
    text = (folder / "prolog").read_text().replace('"prolog": 9.5', '"prolog": 0.5')
    look = "    report = look("
    (folder / "prolog").write_text(text.replace(look, f"    time.sleep(60)\n{look}"))
    began = time.monotonic()
    assert run(folder, "prolog") == (0, "")
    assert time.monotonic() - began < SOON_S


def test_what_cannot_be_told_is_kept_bounded_and_told_later(place: Place, daemon: Daemon, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    assert "the report is kept" in run(place(), "prolog")[1]
    (kept,) = spool.iterdir()
    assert oct(spool.stat().st_mode & 0o777) == "0o700"
    for number in range(hook.SPOOL_FILES + 5):
        shutil.copy(kept, spool / f"0000000000.{number:03d}-prolog-1.json")
    (spool / "0000000000.001-broken.json").write_text("{")
    run(place(), "epilog")
    assert len(list(spool.iterdir())) == hook.SPOOL_FILES
    run(place(daemon.url), "prolog")
    late = [report["late"] for report in daemon.reports]
    assert late == [False] + [True] * (len(late) - 1)
    assert 1 < len(late) <= 1 + hook.SPOOL_SENT
    assert len(list(spool.iterdir())) == hook.SPOOL_FILES - len(late) + 1


@pytest.mark.parametrize("kind", ["a-file", "a-link", "of-everybody", "read-only"])
def test_a_spool_that_is_not_ours_is_not_used(kind: str, place: Place, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    if kind == "a-file":
        spool.write_text("")
    elif kind == "a-link":
        spool.symlink_to(tmp_path)
    elif kind == "of-everybody":
        spool.mkdir()
        spool.chmod(0o777)
    code, said = run(place(spool="/proc/no/such" if kind == "read-only" else ""), "prolog")
    assert (code, "the report is lost" in said) == (0, True)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "hooks.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "hooks.json").unlink(), "FileNotFoundError"),
        (lambda folder: (folder / "hooks.key").chmod(0o644), "mode 0600"),
        (lambda folder: (folder / "hooks.key").write_text("short"), "holds no key"),
    ],
)
def test_a_damaged_installation_is_said_and_harms_no_job(spoil: Callable[[Path], Any], said: str, place: Place) -> None:
    folder = place()
    spoil(folder)
    code, text = run(folder, "prolog")
    assert (code, said in text) == (0, True), text


def test_leftovers_are_found_by_the_jobs_mark_and_never_by_the_user() -> None:
    job = 900_000_000 + os.getpid()
    env = {"SLURM_JOB_ID": str(job), "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "60"], env=env) as mine, subprocess.Popen(["sleep", "60"]) as other:
        found = hook.leftovers(job, 2**22 + 5)
        assert [p["pid"] for p in found["processes"]] == [mine.pid]
        assert (found["count"], found["processes"][0]["by"]) == (1, "environment")
        assert hook.leftovers(job, os.getpid())["count"] == 0, "what the hook itself started is none"
        for one in (mine, other):
            one.send_signal(signal.SIGKILL)
