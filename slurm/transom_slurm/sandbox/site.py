"""transomd's site file for a sandbox, as text: ``DIR/etc/transomd.toml``."""

from __future__ import annotations

from transom_slurm.sandbox.config import ClusterSpec


def transomd_toml(spec: ClusterSpec) -> str:
    """A site that trusts transom: it drains, and its times are short, since a sandbox's faults are watched live.

    Without namespaces the nodes share an address, and only ``ssh_config`` tells their ports.
    """
    at = spec.layout
    return f"""\
# Written by `transom sandbox up`: a site file for trying transom. docs/operate.md describes the fields.
[daemon]
socket = "{at.daemon_socket}"
listen = "{spec.controller_address}:0"
state_dir = "{at.root}/transomd"
cycle_s = 1

[slurm]
query_timeout_s = 5

[ssh]
user = "{spec.user}"
key = "{at.etc}/id_ed25519"
known_hosts = "{at.etc}/known_hosts"
config = "{at.etc}/ssh_config"
connect_timeout_s = 2

[health]
interval_s = 5
probe_timeout_s = 6
gate_timeout_s = 60

[health.modes]
xid = "drain"
gpu-count = "drain"

[watch]
report_s = 1
heartbeat_s = 0.5
heartbeat_timeout_s = 4
launcher_silence_s = 15
launcher_start_s = 60
stall_after_s = 20
first_step_after_s = 90
exit_grace_s = 2

[drain]
node_loss = "drain"
max_fraction = 0.5
"""
