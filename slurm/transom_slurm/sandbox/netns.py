"""Nodes as namespaces: a hub with slurmctld and a bridge, and one cable to each node. Needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from transom_slurm.sandbox import processes
from transom_slurm.sandbox.config import HUB, HUB_ADDRESS, ClusterSpec, NodeSpec
from transom_slurm.sandbox.daemons import daemon_environment, munged, python, run, slurmctld, slurmd, spawn, sshd
from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.layout import NodeLayout, command
from transom_slurm.sandbox.waiting import until

_MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
_BRIDGE = "bridge"


def available() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "not root"
    test = ["unshare", "-m", "-u", "-i", "-n", "-p", "--fork", "--propagation", "private", "true"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"unshare: exit {done.returncode}"


def boot_hub(spec: ClusterSpec) -> None:
    """Start the hub: bridge, munged, slurmctld."""
    at = spec.layout
    steps = [
        *_private_run(),
        ["mount", "-t", "sysfs", "sysfs", "/sys"],
        ["mount", "--bind", f"{at.etc}/hosts", "/etc/hosts"],
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", _BRIDGE, "type", "bridge"],
        ["ip", "addr", "add", f"{HUB_ADDRESS}/24", "dev", _BRIDGE],
        ["ip", "link", "set", _BRIDGE, "up"],
        munged(spec, HUB, _MUNGE_SOCKET),
        slurmctld(),
    ]
    _start(spec, at.hub, HUB, steps, ["-m", "-u", "-n"])
    wait_booted(spec, [HUB], at.hub)


def boot_nodes(spec: ClusterSpec, names: Iterable[str]) -> None:
    """Switch nodes on and plug their cables in; returns when their daemons have started."""
    at = spec.layout
    nodes = [node for node in spec.nodes if node.name in set(names)]
    for node in nodes:
        own = at.node(node.name)
        (own.root / "boot_id").write_text(f"{uuid.uuid4()}\n")
        _start(spec, own, node.name, _node_steps(spec, node), ["-m", "-u", "-i", "-n", "-p", "--fork"])
    pids = {node.name: _pid(at.node(node.name)) for node in nodes}
    lines = [line for node in nodes for line in _cable(node, pids[node.name])]
    run([f"{at.lib}/hub", "ip", "-batch", "-"], "connect nodes", text="\n".join(lines) + "\n")
    for node in nodes:
        wait_booted(spec, [node.name], at.node(node.name))


def _cable(node: NodeSpec, pid: int) -> list[str]:
    # A node keeps its hardware address when it boots, or others send to the old one for up to 8 s (their ARP caches).
    hardware = "02:00:" + ":".join(f"{int(part):02x}" for part in node.address.split("."))
    return [
        f"link add {node.name} type veth peer name eth0 address {hardware} netns {pid}",
        f"link set {node.name} master {_BRIDGE}",
        f"link set {node.name} up",
    ]


def _private_run() -> list[list[str]]:
    return [
        ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
        ["mkdir", "-p", "/run/munge", "/run/sshd", "-m", "0755"],
        ["mkdir", "-p", "/run/lock", "-m", "1777"],
    ]


def _node_steps(spec: ClusterSpec, node: NodeSpec) -> list[list[str]]:
    at, own = spec.layout, spec.layout.node(node.name)
    return [
        ["mount", "-t", "proc", "proc", "/proc"],
        ["mount", "-t", "sysfs", "sysfs", "/sys"],
        *_private_run(),
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"],
        ["mount", "--bind", f"{at.etc}/hosts", "/etc/hosts"],
        ["mount", "--bind", f"{at.etc}/shadow", "/etc/shadow"],
        ["mount", "--bind", f"{own.log}", "/var/log"],
        ["mount", "--bind", f"{own.root}/boot_id", "/proc/sys/kernel/random/boot_id"],
        ["mount", "-t", "overlay", "-o", f"ro,lowerdir={own.bin}:/usr/bin", "overlay", "/usr/bin"],
        ["ip", "link", "set", "lo", "up"],
        ["wait-link", "eth0"],
        ["ip", "addr", "add", f"{node.address}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
        munged(spec, node.name, _MUNGE_SOCKET),
        slurmd(node.name),
        sshd(spec, node.name),
    ]


def _start(spec: ClusterSpec, own: NodeLayout, hostname: str, steps: list[list[str]], kinds: Sequence[str]) -> None:
    plan = {"hostname": hostname, "pid": str(own.pid), "boot": str(own.boot), "steps": steps}
    own.pid.unlink(missing_ok=True)
    own.boot.unlink(missing_ok=True)
    own.init.write_text(json.dumps(plan, indent=1))
    init = [python(), "-I", "-S", f"{spec.layout.lib}/node_init.py", str(own.init)]
    log = spec.layout.logs / f"boot.{hostname}.log"
    spawn(["unshare", *kinds, "--propagation", "private", "--", *init], daemon_environment(spec), log)


def _pid(own: NodeLayout) -> int:
    if not until(own.pid.exists, 20.0):
        raise SandboxError(f"start {own.root.name}", "its first process did not come up")
    return int(own.pid.read_text())


def wait_booted(spec: ClusterSpec, names: list[str], own: NodeLayout) -> None:
    """Wait until the boot ended; :class:`SandboxError` has the step that failed and what it said."""
    done = until(lambda: own.boot.exists() and own.boot.read_text() != "starting", 60.0)
    answer = own.boot.read_text() if done else "no answer within 60 s"
    if answer != "ready":
        log = spec.layout.logs / f"boot.{names[0]}.log"
        said = log.read_text()[-800:].strip() if log.exists() else ""
        raise SandboxError(f"start {names[0]}", f"{answer}\n{said}".strip())


def powered(spec: ClusterSpec, name: str) -> int:
    """The pid of a node's first process as the host numbers it; 0 without power."""
    own = spec.layout.node(name)
    try:
        pid = int(own.pid.read_text())
    except (OSError, ValueError):
        return 0
    return pid if processes.is_owned(pid, spec.layout.conf) else 0


def power_off(spec: ClusterSpec, name: str) -> None:
    """Cut a node's power: first the cable, so that nothing is heard of its death, then all its processes at once."""
    pid = powered(spec, name)
    if not pid:
        raise SandboxError(f"cut the power of {name}", "it has none", hint=command(spec.root, f"heal {name}"))
    run([f"{spec.layout.lib}/hub", "ip", "link", "del", name], f"unplug {name}")
    os.kill(pid, signal.SIGKILL)
    if not until(lambda: not processes.state(pid), 10.0):
        raise SandboxError(f"cut the power of {name}", f"process {pid} did not end")


def set_link(spec: ClusterSpec, name: str, up: bool) -> None:
    """Cut a node's cable at the hub's end, or mend it."""
    run([f"{spec.layout.lib}/hub", "ip", "link", "set", name, "up" if up else "down"], f"switch the link of {name}")


def link_up(spec: ClusterSpec, name: str) -> bool:
    """Whether the hub's end of a node's cable is up."""
    done = run([f"{spec.layout.lib}/hub", "ip", "-o", "link", "show", name], f"look at the link of {name}", check=False)
    return done.returncode == 0 and ",UP" in done.stdout


def node_pids(spec: ClusterSpec, name: str) -> set[int]:
    """The processes of a node, as the host numbers them."""
    pid = powered(spec, name)
    return processes.members([pid], "pid") if pid else set()
