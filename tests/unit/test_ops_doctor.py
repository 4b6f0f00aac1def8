"""What Slurm's settings mean, and what transomd --check finds."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from transom_slurm.parsers import parse_config
from transom_sql.upgrade import upgrade

from transomd import preflight
from transomd.doctor import CONFIRM_S, Finding, exit_code, number, slurm_findings
from transomd.settings import Settings
from transomd.tol.drains import CONFIRM_WITHIN_S
from transomd.words import ExitCode, Level

GOLDEN = Path(__file__).parent.parent / "golden" / "slurm"
GOOD = {
    "SLURM_VERSION": "24.11.5", "SlurmctldHost[0]": "a", "SlurmctldHost[1]": "b",
    "AccountingStorageType": "accounting_storage/slurmdbd", "MinJobAge": "300 sec", "SlurmdTimeout": "300 sec",
    "ReturnToService": "1", "JobRequeue": "1", "KillWait": "60 sec", "ProctrackType": "proctrack/cgroup",
    "Prolog[0]": "/etc/slurm/transom/prolog", "Epilog": "/etc/slurm/epilog", "HealthCheckProgram": "/etc/hc",
    "HealthCheckInterval": "300 sec",
}  # fmt: skip


@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_a_real_configuration_is_read_whole(version: str) -> None:
    config = parse_config((GOLDEN / version / "config.txt").read_text())
    found = slurm_findings(config)
    assert found[0] == Finding(section="slurm", level=Level.OK, text=f"Slurm {version}")
    assert Level.UNKNOWN not in {finding.level for finding in found}
    told = " ".join(finding.text for finding in found)
    for word in (
        "MinJobAge",
        "SlurmdTimeout",
        "ReturnToService",
        "JobRequeue",
        "KillWait",
        "Prolog",
        "Epilog",
        "account",
    ):
        assert word in told


def test_a_good_configuration_has_nothing_to_say() -> None:
    assert {finding.level for finding in slurm_findings(GOOD)} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"SLURM_VERSION": "20.11.9"}, Level.NOTE, "tested with 22.05 to 26.05"),
        ({"SLURM_VERSION": ""}, Level.UNKNOWN, "version"),
        ({"SlurmctldHost[1]": ""}, Level.NOTE, "one controller, a"),
        ({"AccountingStorageType": "accounting_storage/none"}, Level.NOTE, "no accounting"),
        ({"AccountingStorageType": "(null)", "MinJobAge": "5 sec"}, Level.PROBLEM, "MinJobAge 5 s"),
        ({"SlurmdTimeout": "0 sec"}, Level.PROBLEM, "never says that a node is lost"),
        ({"SlurmdTimeout": "3600 sec"}, Level.PROBLEM, "too late"),
        ({"SlurmdTimeout": ""}, Level.UNKNOWN, "SlurmdTimeout"),
        ({"ReturnToService": "2"}, Level.NOTE, "ReturnToService 2"),
        ({"KillWait": "5 sec"}, Level.NOTE, "KillWait 5 s"),
        ({"ProctrackType": "proctrack/linuxproc"}, Level.NOTE, "linuxproc"),
        ({"Prolog[0]": "(null)"}, Level.NOTE, "no Prolog"),
        ({"HealthCheckInterval": "0 sec"}, Level.PROBLEM, "never run"),
    ],
)
def test_what_a_setting_means(change: dict[str, str], level: Level, said: str) -> None:
    told = [finding for finding in slurm_findings({**GOOD, **change}) if finding.level is not Level.OK]
    assert any(finding.level is level and said in finding.text for finding in told), told


def test_short_memory_with_accounting_is_fine() -> None:
    assert {finding.level for finding in slurm_findings({**GOOD, "MinJobAge": "5 sec"})} == {Level.OK}


def test_the_patience_is_that_of_the_drains() -> None:
    assert CONFIRM_S == CONFIRM_WITHIN_S


def test_numbers_have_units() -> None:
    assert number({"a": "300 sec"}, "a") == 300
    assert number({"a": "UNLIMITED"}, "a") is None
    assert number({}, "a") is None


def test_the_exit_code_is_the_worst_word() -> None:
    def told(*levels: Level) -> list[Finding]:
        return [Finding(section="x", level=level, text="") for level in levels]

    assert exit_code(told(Level.OK, Level.NOTE)) is ExitCode.OK
    assert exit_code(told(Level.OK, Level.UNKNOWN)) is ExitCode.UNKNOWN
    assert exit_code(told(Level.UNKNOWN, Level.PROBLEM)) is ExitCode.UNHEALTHY


def test_a_level_of_a_newer_daemon_is_unknown() -> None:
    assert Finding.from_json({"section": "x", "level": "dreadful", "text": "y"}).level is Level.UNKNOWN


# --- transomd --check ---------------------------------------------------------------------------------------------


def site(folder: Path, **sections: dict[str, Any]) -> Settings:
    daemon = {"socket": f"{folder}/run/d.sock", "state_dir": f"{folder}/state", **sections.pop("daemon", {})}
    return Settings.model_validate({"daemon": daemon, **sections})


def levels(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level.value, finding.text) for finding in found if finding.level is not Level.OK]


def test_what_is_not_there_yet_will_be_made_and_is_not(tmp_path: Path) -> None:
    settings = site(tmp_path)
    assert levels([*preflight.places(settings), *preflight.database(settings)]) == []
    assert list(tmp_path.iterdir()) == []


def test_faults_are_told_at_once_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    key = tmp_path / "key"
    key.touch(0o644)
    settings = site(
        tmp_path,
        daemon={"state_dir": f"{tmp_path}/file/state"},
        ssh={"key": str(key), "known_hosts": f"{tmp_path}/none"},
    )
    found = [*preflight.places(settings), *preflight.keys(settings)]
    assert [level for level, _ in levels(found)] == ["problem"] * 3
    text = preflight.report(found)
    assert f"the state directory {tmp_path}/file/state cannot be written" in text
    assert f"the known hosts {tmp_path}/none: there is no such file" in text
    assert f"next: chmod 0600 {key}" in text


def test_a_daemon_that_runs_is_a_note_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(0o700)
    with open(tmp_path / "state/lock", "w") as lock, socket.socket() as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        settings = site(tmp_path, daemon={"listen": f"127.0.0.1:{listener.getsockname()[1]}"})
        assert levels(preflight.places(settings)) == [("note", f"a transomd runs on {tmp_path}/state already")]
        assert "a running transomd?" in levels(preflight._ports(settings))[0][1]


def test_databases(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(0o700)
    settings = site(tmp_path)
    upgrade(settings.daemon.database_url)
    before = (tmp_path / "state/transom.db").read_bytes()
    assert levels(preflight.database(settings)) == []
    assert (tmp_path / "state/transom.db").read_bytes() == before
    (tmp_path / "state/transom.db").write_bytes(b"this is no database" * 100)
    ((level, text),) = levels(preflight.database(settings))
    assert level == "problem"
    assert "transom.db" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_service_user_is_told_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    key = tmp_path / "key"
    key.touch(0o600)
    settings = site(tmp_path, ssh={"key": str(key), "known_hosts": str(key)})
    os.seteuid(65534)
    try:
        found = [*preflight.places(settings), *preflight.keys(settings)]
    finally:
        os.seteuid(0)
    assert [level for level, _ in levels(found)] == ["problem"] * 4
