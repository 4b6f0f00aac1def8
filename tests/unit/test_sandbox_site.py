"""The site file that a sandbox brings for transomd."""

from __future__ import annotations

from pathlib import Path

import pytest
from transom_slurm.sandbox.config import LOOPBACK, NETNS, ClusterSpec, netns_nodes
from transom_slurm.sandbox.site import transomd_toml

from transomd.launch import agents
from transomd.settings import parse_settings
from transomd.words import CheckMode


@pytest.mark.parametrize("mode", [NETNS, LOOPBACK])
def test_transomd_accepts_it(mode: str) -> None:
    spec = ClusterSpec(
        root=Path("/tmp/s"),
        mode=mode,
        slurm_version=(22, 5),
        user="alice",
        hostname="here",
        controller_port=6817,
        nodes=netns_nodes(4),
    )
    settings = parse_settings(transomd_toml(spec))
    assert settings.daemon.socket == str(spec.layout.daemon_socket)
    assert settings.daemon.listen_address == (spec.controller_address, 0)
    assert settings.daemon.database_url == "sqlite:////tmp/s/transomd/transom.db"
    assert settings.daemon.launcher_url(5) == f"http://{spec.controller_address}:5"
    assert settings.ssh.user == "alice"
    assert settings.drain.node_loss is CheckMode.DRAIN
    assert settings.health.mode("xid") is CheckMode.DRAIN
    # A launcher says nothing while it ends a launch.
    assert settings.watch.launcher_silence_s > agents.FENCE_S
