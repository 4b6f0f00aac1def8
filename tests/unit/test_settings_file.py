"""transomd.toml: defaults, faults with lines, and where it is looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from transomd.errors import NotFoundError, SpecError, UsageError
from transomd.settings import Settings, load_settings, parse_settings
from transomd.words import CheckMode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def faults(text: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_settings(text, label="t")
    return caught.value.faults


def test_a_new_site_observes() -> None:
    settings = Settings()
    assert settings.health.mode("xid") is CheckMode.OBSERVE
    assert settings.drain.node_loss is CheckMode.OBSERVE
    assert settings.daemon.python == sys.executable
    assert settings.daemon.database_url == "sqlite:////var/lib/transom/transom.db"
    assert settings.daemon.listen_address == ("", 7077)


def test_what_a_site_writes() -> None:
    settings = parse_settings(
        '[daemon]\nlisten = "[::1]:0"\nstate_dir = "/s"\nadmins = ["root", "ops"]\nadvertise = "http://head:1"\n'
        '[health]\ninterval_s = 0\n[health.modes]\nxid = "drain"\n[watch]\nstall_after_s = "10m"\n'
    )
    assert settings.daemon.listen_address == ("::1", 0)
    assert settings.daemon.launcher_url(5) == "http://head:1"
    assert settings.health.mode("xid") is CheckMode.DRAIN
    assert settings.watch.stall_after_s == 600
    assert settings.daemon.admins == ("root", "ops")


def test_all_faults_with_their_lines() -> None:
    text = (
        "[daemon]\nlisten = 'x'\nsock = 'a'\ncycle_s = 0\n\n[health.modes]\nxid = 'drian'\nxidd = 'off'\n[drain]\n"
        "max_fraction = 2\n[ssh]\nfanout = 'many'\nkey = 'rel/key'\n[wacth]\n"
    )
    assert faults(text) == (
        "t:2: daemon.listen: must be host:port, :port or empty, got 'x'",
        "t:3: daemon.sock: is no field; did you mean `socket`?",
        "t:4: daemon.cycle_s: must be longer than nothing",
        "t:7: health.modes.xid: must be 'off', 'observe', 'comment' or 'drain', got 'drian'",
        "t:8: health.modes.xidd: 'xidd' is no check; did you mean `xid`?",
        "t:10: drain.max_fraction: must be at most 1.0, got 2",
        "t:12: ssh.fanout: must be a whole number, got 'many'",
        "t:13: ssh.key: must be an absolute path, got 'rel/key'",
        "t:14: wacth: is no field; did you mean `watch`?",
    )


def test_what_is_no_toml_is_told_with_its_place() -> None:
    (told,) = faults("[daemon]\nlisten = \n")
    assert told.startswith("t:2: is not TOML: ")
    assert "column" in told


@pytest.mark.parametrize("value", ["7077", ":70777", "a b:1", ":x"])
def test_addresses_that_nothing_can_listen_on(value: str) -> None:
    (told,) = faults(f"[daemon]\nlisten = '{value}'\n")
    assert "must be host:port" in told


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[daemon]\ncluster = 'c1'\n")
    assert load_settings(path, {}).daemon.cluster == "c1"
    assert load_settings(None, {"TRANSOM_CONFIG": str(path)}).daemon.cluster == "c1"
    with pytest.raises(NotFoundError, match="there is no such file"):
        load_settings(None, {"TRANSOM_CONFIG": str(tmp_path / "none")})
    with pytest.raises(UsageError, match="Is a directory"):
        load_settings(tmp_path, {})


def test_binary_is_no_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_settings(path, {})


def test_the_documented_file_is_a_settings_file_with_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    text = page.partition("## The site file")[2].partition("```toml\n")[2].partition("```")[0]
    written = tomllib.loads(text)
    assert parse_settings(text)
    expected = {name: set(type(part).model_fields) for name, part in Settings()}
    assert {name: set(section) for name, section in written.items()} == expected
