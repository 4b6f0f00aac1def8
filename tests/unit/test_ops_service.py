"""What systemd is told, and new settings while the daemon runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transom_sql.store import StoreError

from transomd.reload import NEEDS_RESTART, reloaded
from transomd.service import Watchdog, notify_systemd, reloading, watchdog_s
from transomd.settings import Settings

Heard = Callable[[], list[str]]


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """The socket that systemd would listen on; returns what came in."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@transom-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)

        def read() -> list[str]:
            found = []
            while True:
                try:
                    found.append(listener.recv(4096).decode())
                except BlockingIOError:
                    return found

        yield read


def test_states_are_one_datagram(heard: Heard) -> None:
    notify_systemd("READY=1", "STATUS=all is well")
    assert heard() == ["READY=1\nSTATUS=all is well"]


def test_reloading_names_its_moment(heard: Heard) -> None:
    reloading()
    (told,) = heard()
    assert told.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert told.rpartition("=")[2].isdigit()


def test_only_a_cycle_that_came_to_its_end_is_a_sign_of_life(heard: Heard) -> None:
    watchdog = Watchdog(lambda: "3 active jobs")
    watchdog.cycled(0.2, None)
    watchdog.cycled(0.2, StoreError("the database is away"))
    assert heard() == ["WATCHDOG=1\nSTATUS=3 active jobs"] * 2
    watchdog.cycled(0.2, ValueError("a fault in a rule"))
    assert heard() == []


def test_a_listener_that_does_not_read_holds_nobody_up(heard: Heard) -> None:
    for _ in range(2000):
        notify_systemd("WATCHDOG=1")
    assert 0 < len(heard()) < 2000


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notify_systemd("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_systemd("READY=1")


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdogs_patience(env: dict[str, str], wanted: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert watchdog_s() == wanted


# --- reload -------------------------------------------------------------------------------------------------------


def site(**sections: dict[str, object]) -> Settings:
    return Settings.model_validate(sections)


def test_what_may_change_does_and_the_rest_waits_for_a_restart() -> None:
    old = site(daemon={"cycle_s": 5, "listen": ":7077"}, drain={"per_hour": 4})
    new = site(
        daemon={"cycle_s": 2, "listen": ":7078", "admins": ["root", "ann"]}, drain={"per_hour": 1}, ssh={"fanout": 8}
    )
    found = reloaded(old, new)
    assert found.at_once == ("daemon.cycle_s", "daemon.admins", "drain.per_hour")
    assert found.after_restart == ("daemon.listen", "ssh.fanout")
    assert (found.settings.daemon.cycle_s, found.settings.daemon.listen) == (2, ":7077")
    assert (found.settings.ssh.fanout, found.settings.drain.per_hour) == (32, 1)
    assert found.sentence == (
        "the site file was read again: now daemon.cycle_s, daemon.admins, drain.per_hour; "
        "only after a restart: daemon.listen, ssh.fanout"
    )


def test_a_setting_taken_back_needs_no_restart() -> None:
    old = site(daemon={"listen": ":7077"})
    held = reloaded(old, site(daemon={"listen": ":7078"})).settings
    assert reloaded(held, old).sentence == "the site file was read again: nothing has changed"


def test_every_name_that_needs_a_restart_is_a_setting() -> None:
    settings = Settings()
    for name in NEEDS_RESTART:
        section, _, field = name.partition(".")
        assert field in type(getattr(settings, section)).model_fields
