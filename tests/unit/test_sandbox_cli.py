"""``transom sandbox`` without a sandbox: help and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from transom_cli.commands.sandbox import sandbox
from transom_slurm.sandbox import daemons

from transomd.errors import NotFoundError, TransomError, UsageError


def _run(*words: str) -> str:
    done = CliRunner().invoke(sandbox, words, catch_exceptions=False, standalone_mode=False)
    return done.output


@pytest.mark.parametrize("words", [[], *([name] for name in sandbox.commands)])
def test_help_teaches_within_80_columns(words: list[str]) -> None:
    text = CliRunner().invoke(sandbox, [*words, "-h"], prog_name="transom sandbox").output
    assert max(map(len, text.splitlines())) <= 80
    assert "Example" in text or words in (["down"], ["status"], ["heal"])


def test_the_kinds_are_in_the_help_of_fail() -> None:
    text = _run("fail", "-h")
    assert all(
        kind in text for kind in ("power", "net-cut", "slurmd-kill", "rank-kill", "rank-stop", "xid:N", "gpu-lost")
    )


@pytest.mark.parametrize(
    "words", [["status"], ["env"], ["heal", "n1"], ["fail", "n1", "power"], ["exec", "--", "true"]]
)
def test_nothing_up(words: list[str], tmp_path: Path) -> None:
    command, *rest = words
    with pytest.raises(NotFoundError, match="nothing is up") as caught:
        _run(command, "--dir", str(tmp_path / "none"), *rest)
    assert caught.value.hint == f"transom sandbox up --dir {tmp_path}/none"


def test_down_of_nothing_is_no_error(tmp_path: Path) -> None:
    assert "nothing is up" in _run("down", "--dir", str(tmp_path / "none"))
    told = json.loads(_run("down", "--json", "--dir", str(tmp_path / "none")))
    assert told == {"directory": f"{tmp_path}/none", "ended": False}


def test_slurm_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(daemons, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(TransomError, match=r"not installed: slurmctld, slurmd, .*munged") as caught:
        _run("up", "--dir", str(tmp_path / "s"))
    assert caught.value.hint.startswith("apt-get install")
    assert not (tmp_path / "s").exists()


def test_too_many_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 to 250") as caught:
        _run("up", "--nodes", "251", "--dir", str(tmp_path / "s"))
    assert caught.value.hint == "transom sandbox up -h"
