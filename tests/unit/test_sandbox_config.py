"""The configuration files of a sandbox. To renew the recorded ones: TRANSOM_UPDATE_GOLDEN=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transom_slurm.sandbox import config, scripts
from transom_slurm.sandbox.config import LOOPBACK, NETNS, ClusterSpec, loopback_nodes, netns_nodes
from transom_slurm.sandbox.errors import SandboxUsage
from transom_slurm.sandbox.layout import check_directory

GOLDEN = Path(__file__).parent.parent / "golden" / "sandbox"
ROOT = Path("/srv/sb")


def _spec(version: tuple[int, int], mode: str = NETNS) -> ClusterSpec:
    netns = mode == NETNS
    return ClusterSpec(
        root=ROOT,
        mode=mode,
        slurm_version=version,
        user="root" if netns else "ada",
        hostname="lab",
        controller_port=6817 if netns else 4000,
        nodes=netns_nodes(2) if netns else loopback_nodes(range(4001, 4005), 2),
        extra=("Prolog=/srv/prolog",),
    )


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("netns-22.05", _spec((22, 5))),
        ("netns-24.11", _spec((24, 11))),
        ("loopback-24.11", _spec((24, 11), LOOPBACK)),
    ],
)
def test_slurm_conf_is_as_recorded(name: str, spec: ClusterSpec) -> None:
    recorded, now = GOLDEN / f"slurm-{name}.conf", config.slurm_conf(spec)
    if os.environ.get("TRANSOM_UPDATE_GOLDEN") == "1":
        recorded.write_text(now)
    assert now == recorded.read_text()


@pytest.mark.parametrize(
    ("version", "plugin", "old_words"),
    [
        ((22, 5), "cgroup/v1", True),
        ((23, 2), "cgroup/v1", True),
        ((23, 11), "disabled", False),
        ((26, 5), "disabled", False),
    ],
)
def test_what_differs_between_versions(version: tuple[int, int], plugin: str, old_words: bool) -> None:
    assert config.cgroup_conf(_spec(version)) == f"CgroupPlugin={plugin}\n"
    assert ("SwitchType=switch/none" in config.slurm_conf(_spec(version))) is old_words
    assert ("accounting_storage/none" in config.slurm_conf(_spec(version))) is old_words


def test_hosts_know_every_node_and_the_hub() -> None:
    assert config.hosts(_spec((22, 5))).splitlines()[2:] == ["10.77.0.254 hub", "10.77.0.1 n1", "10.77.0.2 n2"]


def test_shadow_holds_no_password_and_locks_nobody() -> None:
    assert config.shadow(["root", "ada"]).splitlines() == ["root:*:19000:0:99999:7:::", "ada:*:19000:0:99999:7:::"]


def test_known_hosts_name_the_port_only_where_it_is_unusual() -> None:
    keys = {"n1": "ssh-ed25519 AAA comment", "n2": "ssh-ed25519 BBB comment"}
    assert config.known_hosts(_spec((22, 5)), keys) == "n1,10.77.0.1 ssh-ed25519 AAA\nn2,10.77.0.2 ssh-ed25519 BBB\n"
    assert "n2,[127.77.0.2]:4004 ssh-ed25519 BBB" in config.known_hosts(_spec((22, 5), LOOPBACK), keys)


def test_sshd_takes_keys_only_and_gives_slurm_conf() -> None:
    spec = _spec((22, 5))
    text = config.sshd_config(spec, spec.nodes[1])
    assert "ListenAddress 10.77.0.2" in text
    assert "PasswordAuthentication no" in text
    assert "UsePAM no" in text
    assert "SetEnv SLURM_CONF=/srv/sb/etc/slurm.conf HOME=/srv/sb/nodes/n2/home\n" in text


def test_gres_has_one_device_file_a_gpu() -> None:
    assert "File=/srv/sb/dev/nvidia[0-7]" in config.gres_conf(_spec((22, 5)))


def test_wrappers_run_in_the_hub_but_the_sandbox_command_does_not() -> None:
    spec = _spec((22, 5))
    assert scripts.wrapper(spec, "squeue").splitlines()[-1] == 'exec /srv/sb/lib/hub squeue "$@"'
    lines = scripts.transom_wrapper(spec, "/venv/bin").splitlines()
    assert lines[1] == 'case "$1" in sandbox) exec /venv/bin/transom "$@" ;; esac'


@pytest.mark.parametrize(
    ("directory", "fault"),
    [
        ("/run/x", "/run is private"),
        ("/dev/shm/x", "/dev is private"),
        ("/tmp/with space", "characters"),
        ("/tmp/a:b", "characters"),
        ("/tmp/" + "x" * 90, "too long"),
        ("/run/" + "x y" * 40, "characters .*; .*too long.*; /run is private"),
    ],
)
def test_a_directory_that_cannot_hold_one_is_refused_with_every_reason(directory: str, fault: str) -> None:
    with pytest.raises(SandboxUsage, match=fault):
        check_directory(Path(directory))
