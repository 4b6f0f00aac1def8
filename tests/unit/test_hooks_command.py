"""``transom hooks install``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transom_cli.main import run

from transomd.words import ExitCode


def site(folder: Path, *lines: str) -> str:
    path = folder / "transomd.toml"
    path.write_text("\n".join(["[daemon]", f'state_dir = "{folder}"', *lines]) + "\n")
    return str(path)


def test_it_writes_what_the_site_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = site(
        tmp_path, 'advertise = "http://head:7077"', "[health]", 'mounts = ["/home"]', "[health.modes]", 'xid = "off"'
    )
    for _ in range(2):
        assert run(["hooks", "install", str(tmp_path / "h"), "--config", config]) == ExitCode.OK
    told = json.loads((tmp_path / "h/hooks.json").read_text())
    assert (told["url"], told["probe"]["prolog"]["mounts"]) == ("http://head:7077", ["/home", "/tmp"])
    assert (tmp_path / "h/hooks.key").read_text() == (tmp_path / "hooks.key").read_text(), "transomd's own"
    assert f"Epilog={tmp_path}/h/epilog" in capsys.readouterr().out


def test_it_tells_programs_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = site(tmp_path, 'advertise = "http://head:7077"')
    assert run(["hooks", "install", str(tmp_path / "h"), "--config", config, "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert (told["directory"], told["url"]) == (str(tmp_path / "h"), "http://head:7077")
    assert sorted(told["files"]) == sorted(str(file) for file in (tmp_path / "h").iterdir())
    assert f"Epilog={tmp_path}/h/epilog" in told["slurm_conf"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['listen = ""'], "does not listen on TCP"),
        (['listen = ":0"'], "start transomd once"),
        (['advertise = "http://localhost:7077"'], "leads nowhere from a node"),
    ],
)
def test_an_address_that_no_node_could_use_is_refused(
    lines: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["hooks", "install", str(tmp_path / "h"), "--config", site(tmp_path, *lines)])
    assert (code, said in capsys.readouterr().err) == (ExitCode.USAGE, True)
    assert not (tmp_path / "h").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = site(tmp_path, 'advertise = "http://head:7077"')
    code = run(["hooks", "install", "/proc/no/such", "--config", config])
    assert (code, "writing /proc/no" in capsys.readouterr().err) == (ExitCode.ERROR, True)
