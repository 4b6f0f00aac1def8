"""What Slurm and the nodes of a sandbox look like from outside, waiting for it, and its slurmctld."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass

from transom_slurm.sandbox import gpus, netns, processes, targets
from transom_slurm.sandbox.config import ClusterSpec, NodeSpec
from transom_slurm.sandbox.daemons import daemon_environment, run, slurmctld
from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.waiting import until


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node looks like from outside. ``slurm`` is Slurm's word for its state, empty without an answer."""

    name: str
    address: str
    power: bool
    link: bool
    slurmd: bool
    gpus: int
    slurm: str


def report(spec: ClusterSpec, node: NodeSpec, slurm: str) -> NodeReport:
    """Look at one node; ``slurm`` is what Slurm says of it."""
    power = not spec.namespaces or netns.powered(spec, node.name) > 0
    return NodeReport(
        name=node.name,
        address=node.address,
        power=power,
        link=power and (not spec.namespaces or netns.link_up(spec, node.name)),
        slurmd=bool(targets.slurmd_pids(spec, node.name)),
        gpus=gpus.shown(spec.layout.node(node.name)),
        slurm=slurm,
    )


def states(spec: ClusterSpec) -> dict[str, str]:
    """Slurm's short state of each node; empty when Slurm does not answer."""
    done = _hub(spec, "sinfo", "-h", "-N", "-o", "%N %t")
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def wait_started(spec: ClusterSpec, timeout_s: float) -> None:
    """Wait for the nodes for the first time, but no longer than until a daemon gives up."""
    until(lambda: _idle(spec) or bool(_complaints(spec, "fatal:")), timeout_s, 0.05)
    if fatal := _complaints(spec, "fatal:"):
        raise SandboxError("start Slurm", "\n".join(fatal), hint="look at the lines of slurm.conf that you added")
    wait_idle(spec, 0.0)


def wait_idle(spec: ClusterSpec, timeout_s: float) -> None:
    """Return when all nodes are idle; :class:`SandboxError` says which are not, and what the logs complain of."""
    if until(lambda: _idle(spec), timeout_s, 0.05):
        return
    got = states(spec)
    bad = ", ".join(f"{node} {got.get(node, '?')}" for node in spec.names if got.get(node) != "idle")
    cause = "\n".join([f"after {timeout_s:g} s not idle: {bad}", *_complaints(spec, "error:")])
    raise SandboxError("wait for the nodes", cause, hint=f"see {spec.layout.logs}")


def settle(spec: ClusterSpec) -> None:
    """Outlast slurmctld's last unanswered ping to a node that was away: its failure marks the node once more."""
    until(lambda: "idle*" in states(spec).values(), spec.message_timeout + 1.0, 0.2)
    wait_idle(spec, 60.0)


def stop_controller(spec: ClusterSpec, number: signal.Signals) -> None:
    """End slurmctld by a signal and wait until it has ended."""
    pid = controller(spec)
    if not pid:
        raise SandboxError("stop slurmctld", "it does not run")
    os.kill(pid, number)
    if not until(lambda: processes.state(pid) in ("", "Z"), 30.0):
        raise SandboxError("stop slurmctld", f"process {pid} did not end")


def start_controller(spec: ClusterSpec, timeout_s: float) -> None:
    """Start slurmctld and return when it answers."""
    run([f"{spec.layout.lib}/hub", *slurmctld()], "start slurmctld", env=daemon_environment(spec))
    if not until(lambda: " is UP" in _hub(spec, "scontrol", "ping").stdout, timeout_s):
        raise SandboxError("start slurmctld", "it does not answer", hint=f"see {spec.layout.logs}/slurmctld.log")


def _hub(spec: ClusterSpec, *argv: str) -> subprocess.CompletedProcess[str]:
    return run([f"{spec.layout.lib}/hub", *argv], f"run {argv[0]}", check=False)


def _idle(spec: ClusterSpec) -> bool:
    return states(spec) == dict.fromkeys(spec.names, "idle")


def controller(spec: ClusterSpec) -> int:
    """The pid of slurmctld; 0 when it does not run."""
    try:
        pid = int((spec.layout.run / "slurmctld.pid").read_text())
    except (OSError, ValueError):
        return 0
    return pid if processes.is_owned(pid, spec.layout.conf) else 0


def _complaints(spec: ClusterSpec, word: str) -> list[str]:
    """The last lines of each of Slurm's logs that hold a word."""
    found = []
    for log in sorted(spec.layout.logs.glob("slurm*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if word in line]
        found += [f"{log.name}: {line}" for line in lines[-3:]]
    return found
