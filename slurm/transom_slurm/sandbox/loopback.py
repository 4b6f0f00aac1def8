"""Nodes as daemons on loopback addresses, for users without root: they share the host's processes and network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from transom_slurm.sandbox import processes
from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.daemons import daemon_environment, munged, run, slurmctld, slurmd, sshd
from transom_slurm.sandbox.errors import SandboxError

PRIVILEGE_SEPARATION = Path("/run/sshd")
"""A directory that sshd insists on as root; the only thing a sandbox ever makes outside its own directory."""


def check_hostname() -> None:
    """:class:`SandboxError` when this host's name does not resolve: slurmctld would block for 10 s at every job."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        hint = f'add "127.0.0.1 {name}" to /etc/hosts'
        raise SandboxError(
            "start a sandbox", f"this host's name {name} does not resolve: {error}", hint=hint
        ) from error


def free_ports(count: int) -> list[int]:
    """Ports that were free just now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("0.0.0.0", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def boot_hub(spec: ClusterSpec) -> None:
    """Start munged and slurmctld."""
    at = spec.layout
    if os.geteuid() == 0 and not PRIVILEGE_SEPARATION.exists():
        _made_here(spec).touch()
        PRIVILEGE_SEPARATION.mkdir(mode=0o755)
    env = daemon_environment(spec)
    run([f"{at.lib}/hub", *munged(spec, "hub", at.run / "munge.socket")], "start munged", env=env)
    run([f"{at.lib}/hub", *slurmctld()], "start slurmctld", env=env)


def boot_nodes(spec: ClusterSpec, names: Iterable[str]) -> None:
    """Start each node's slurmd and sshd."""
    for name in names:
        for argv in (slurmd(name), sshd(spec, name)):
            run([f"{spec.layout.lib}/node", name, *argv], f"start {argv[0]} of {name}", env=daemon_environment(spec))


def _made_here(spec: ClusterSpec) -> Path:
    return spec.layout.run / "made-run-sshd"


def clean(spec: ClusterSpec) -> None:
    """Remove what was made outside the directory."""
    if _made_here(spec).exists() and PRIVILEGE_SEPARATION.exists():
        PRIVILEGE_SEPARATION.rmdir()


def daemons(spec: ClusterSpec) -> set[int]:
    """The sshd processes, which hide their environment, found by the pids they wrote."""
    found = set()
    for name in spec.names:
        own = spec.layout.node(name)
        try:
            pid = int((own.root / "sshd.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except (OSError, ValueError):
            continue
        if str(own.sshd_config) in command:
            found.add(pid)
    return found


def node_pids(spec: ClusterSpec, name: str) -> set[int]:
    """The processes of a node: those that Slurm or the sandbox started in its name."""
    own = processes.owned(spec.layout.conf)
    return {pid for pid in own if processes.environment(pid).get("SLURMD_NODENAME") == name}
