"""Help teaches, is fast, and every error ends with its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_server import transom
from transom_cli.main import ENTRIES

from transomd import __version__

OWN = [
    *("submit", "status", "logs", "events", "cancel", "ckpt", "nodes", "drain", "undrain"),
    *("check", "doctor", "pause", "resume-actions", "incident", "history", "completion"),
]


def test_the_help_teaches() -> None:
    done = transom("-h")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in ENTRIES)
    assert "transom submit job.yaml" in done.stdout
    assert "transom completion bash" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


@pytest.mark.parametrize("name", OWN)
def test_every_commands_help_has_examples_within_80_columns(name: str) -> None:
    done = transom(name, "-h")
    assert done.returncode == 0
    assert name == "ckpt" or f"Examples:\n    transom {name}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


@pytest.mark.parametrize("name", ["list", "verify"])
def test_ckpts_help(name: str) -> None:
    assert f"Examples:\n    transom ckpt {name}" in transom("ckpt", name, "--help").stdout


def test_the_version() -> None:
    assert transom("--version").stdout == f"transom {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said", "usage", "command"),
    [
        (["sumbit", "x"], "transom: no such command 'sumbit'", "[OPTIONS] COMMAND [ARGS]...", ""),
        (["submit"], "transom: submit: missing argument 'JOB.yaml'", "submit [OPTIONS] JOB.yaml", "submit"),
        (["drain", "n1"], "transom: drain: missing option '--reason'", "drain [OPTIONS] NODES...", "drain"),
        (["status", "--bogus"], "transom: status: no such option", "status [OPTIONS] [JOB]", "status"),
        (["logs", "1", "--rank", "-1"], "transom: logs: invalid value for '--rank': -1", "logs [OPTIONS] JOB", "logs"),
        (
            ["ckpt", "list"],
            "transom: ckpt list: missing argument 'JOB|DIR'",
            "ckpt list [OPTIONS] JOB|DIR",
            "ckpt list",
        ),
        (["sandbox", "fail", "n1"], "transom: sandbox fail: missing", "sandbox fail [OPTIONS] NODE", "sandbox fail"),
        (["ckpt", "sho"], "transom: ckpt: no such command 'sho'", "ckpt [OPTIONS] COMMAND [ARGS]...", "ckpt"),
    ],
)
def test_wrong_usage_has_the_form_of_all_errors(words: list[str], said: str, usage: str, command: str) -> None:
    done = transom(*words)
    assert (done.returncode, done.stdout) == (2, "")
    first, second, third = done.stderr.splitlines()
    assert first.startswith(said)
    assert second.startswith(f"  usage: transom {usage}")
    assert third == f"  next: transom {command}{' ' if command else ''}-h"


@pytest.mark.parametrize("words", [[], ["ckpt"], ["sandbox"]])
def test_a_group_alone_shows_its_help(words: list[str]) -> None:
    done = transom(*words)
    assert done.returncode == 2
    assert "Usage: transom" in done.stderr
    assert "Examples:" in done.stderr


@pytest.mark.parametrize(
    "words", [["status"], ["nodes"], ["events"], ["cancel", "1"], ["logs", "1"], ["drain", "n1", "--reason", "x"]]
)
def test_the_daemon_does_not_run(words: list[str], tmp_path: Path) -> None:
    done = transom(*words, socket=tmp_path / "none")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"transom: asking transomd at {tmp_path}/none: there is no such socket: "
        "the daemon does not run here, or uses another",
        "  next: systemctl status transomd; or name another by --socket, $TRANSOM_SOCKET or $TRANSOM_URL",
    ]


def test_the_socket_option_goes_before_the_environment(tmp_path: Path) -> None:
    assert f"{tmp_path}/other" in transom("--socket", f"{tmp_path}/other", "status").stderr


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys, transom_cli.main as m; m.run(['-h']); "
        "print(sorted({n.split('.')[0] for n in sys.modules} "
        "& {'torch','asyncssh','sqlalchemy','pydantic','rich','yaml','ClusterShell','http'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("name", OWN)
def test_no_command_needs_torch_or_the_daemons_parts(name: str) -> None:
    code = (
        f"import sys, transom_cli.main as m; m.run(['{name}', '-h']); "
        "print(sorted({n.split('.')[0] for n in sys.modules} "
        "& {'torch','asyncssh','sqlalchemy','transom_sql','aiohttp','numpy'} "
        "| {n for n in sys.modules if n.startswith('transomd.tol')}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
