"""Which mode a daemon runs in, and what personal mode fills in."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from transomd.errors import UsageError
from transomd.modes import load, settle, site_file, user_name
from transomd.places import personal_socket, personal_state
from transomd.settings import Settings, load_settings, parse_settings

UID = pwd.getpwnam("nobody").pw_uid


def test_root_runs_a_site_and_anybody_else_a_personal_daemon() -> None:
    assert settle(Settings(), 0).daemon.mode == "site"
    assert settle(Settings(), UID).personal
    assert not settle(Settings(), 0).personal
    assert settle(parse_settings('[daemon]\nmode = "personal"'), 0).personal


def test_site_mode_needs_root() -> None:
    with pytest.raises(UsageError, match="needs root") as caught:
        settle(parse_settings('[daemon]\nmode = "site"'), UID)
    assert caught.value.hint


def test_what_personal_mode_fills_in(tmp_path: Path) -> None:
    settings = settle(Settings(), UID, {"HOME": str(tmp_path)})
    assert settings.daemon.state_dir == f"{tmp_path}/.local/state/transom"
    assert settings.daemon.socket == f"{tmp_path}/.local/state/transom/transomd.sock"
    assert settings.daemon.listen == ":0"
    assert settings.ssh.user == "nobody"
    assert settings.daemon.admins == ("nobody",)
    assert not settings.drain.enabled


def test_the_file_wins_but_for_rights() -> None:
    text = (
        '[daemon]\nsocket = "/x/s"\nlisten = ":5"\nadmins = ["root", "bob"]\n'
        '[drain]\nenabled = true\nnode_loss = "drain"\n[ssh]\nuser = "me"\n'
    )
    settings = settle(parse_settings(text), UID, {"HOME": "/h", "XDG_STATE_HOME": "/state"})
    assert (settings.daemon.socket, settings.daemon.listen, settings.ssh.user) == ("/x/s", ":5", "me")
    assert settings.daemon.state_dir == "/state/transom"
    assert settings.daemon.admins == ("nobody",), "nobody else administers a user's own daemon"
    assert not settings.drain.enabled


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "transom" / "transomd.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[daemon]\ncluster = "own"\n')
    env = {"HOME": str(tmp_path)}
    assert load(None, env, uid=UID).daemon.cluster == "own"
    assert load(None, {"HOME": str(tmp_path / "none")}, uid=UID).daemon.cluster == ""
    other = tmp_path / "other.toml"
    other.write_text('[daemon]\ncluster = "named"\n')
    assert load(None, {**env, "TRANSOM_CONFIG": str(other)}, uid=UID).daemon.cluster == "named"
    assert load(other, env, uid=UID).daemon.cluster == "named"


def test_places_follow_the_xdg_folders_when_they_are_absolute() -> None:
    assert personal_socket({"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/h"}) == Path(
        "/run/user/7/transom/transomd.sock"
    )
    assert personal_socket({"XDG_RUNTIME_DIR": "run", "HOME": "/h"}).is_relative_to("/h")
    assert personal_state({"XDG_STATE_HOME": "state", "HOME": "/h"}) == Path("/h/.local/state/transom")


def test_a_uid_without_a_name_is_its_number() -> None:
    assert user_name(os.geteuid()) == pwd.getpwuid(os.geteuid()).pw_name
    assert user_name(3_999_999_999) == "3999999999"


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT ROOT: only root can close a folder to itself as somebody else")
def test_a_site_file_in_a_closed_folder_is_roots_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "etc" / "transomd.toml"
    file.parent.mkdir(mode=0o700)
    file.write_text('[daemon]\ncluster = "site"\n')
    for module in ("modes", "settings"):
        monkeypatch.setattr(f"transomd.{module}.DEFAULT_PATH", file)
    assert site_file({}, uid=0) == file
    assert load_settings(None, {}).daemon.cluster == "site"
    os.seteuid(UID)
    try:
        assert site_file({"HOME": "/none"}) is None
        assert load(None, {"HOME": "/none"}).personal
        with pytest.raises(UsageError, match="Permission denied"):
            load_settings(None, {})
    finally:
        os.seteuid(0)
