"""Faults to inject into a sandbox: a table from kind to what it does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from transom_slurm.sandbox import gpus, hub_faults, netns, processes, storage_faults, targets
from transom_slurm.sandbox.config import HUB, ClusterSpec
from transom_slurm.sandbox.daemons import daemon_environment, run, slurmd, start_script
from transom_slurm.sandbox.errors import SandboxError, SandboxUsage
from transom_slurm.sandbox.layout import command
from transom_slurm.sandbox.storage_faults import disk_full, mount_dead
from transom_slurm.sandbox.waiting import until

_AS_NEW = "GPUs and kernel log as after a reboot"
SLOW_PERCENT = 20
SLOW_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault, of a node or of the ``hub``. ``argument`` names what may follow the colon."""

    name: str
    help: str
    inject: Callable[[ClusterSpec, str, str], str]
    argument: str = ""
    needs_argument: bool = False
    needs_namespaces: bool = False
    hub: bool = False


def _power(spec: ClusterSpec, node: str, _: str) -> str:
    netns.power_off(spec, node)
    return "power cut: everything on it is dead"


def _net_cut(spec: ClusterSpec, node: str, _: str) -> str:
    if not netns.powered(spec, node):
        raise SandboxError(f"cut the cable of {node}", "it has no power", hint=command(spec.root, f"heal {node}"))
    netns.set_link(spec, node, up=False)
    return "cable cut: what runs on it goes on, alone"


def _slurmd_kill(spec: ClusterSpec, node: str, _: str) -> str:
    found = targets.slurmd_pids(spec, node)
    if not found:
        raise SandboxError(f"kill slurmd on {node}", "it does not run", hint=command(spec.root, f"heal {node}"))
    processes.signal_each(found, signal.SIGKILL)
    until(lambda: not targets.slurmd_pids(spec, node), 5.0)
    return "slurmd killed: its jobs go on"


def _rank_kill(spec: ClusterSpec, node: str, _: str) -> str:
    pid = targets.find_rank(spec, node)
    processes.signal_each([pid], signal.SIGKILL)
    return f"rank killed: process {pid} (host's numbering)"


def _rank_stop(spec: ClusterSpec, node: str, _: str) -> str:
    pid = targets.find_rank(spec, node)
    processes.stop([pid])
    return f"rank stopped: process {pid} (host's numbering)"


def _xid(spec: ClusterSpec, node: str, argument: str) -> str:
    number, _, index = argument.partition(":")
    if not number.isdigit() or (index and not index.isdigit()):
        raise SandboxUsage(f"inject xid:{argument}", "it takes a number, as xid:79, and may take a GPU, as xid:79:2")
    own = spec.layout.node(node)
    gpu = _gpu(spec, node, index)
    gpus.xid(own, node, int(number), gpu)
    return f"XID {number} of GPU {gpu} in the kernel log"


def _gpu_lost(spec: ClusterSpec, node: str, argument: str) -> str:
    gpu = _gpu(spec, node, argument)
    gpus.update(spec.layout.node(node), gpu, {"lost": True})
    return f"GPU {gpu} is gone from nvidia-smi"


def _gpu(spec: ClusterSpec, node: str, text: str) -> int:
    if not text:
        return gpus.first_present(spec.layout.node(node))
    if not text.isdigit() or int(text) >= spec.gpus:
        raise SandboxUsage(f"harm GPU {text} of {node}", f"it has {spec.gpus} GPUs, numbered from 0")
    return int(text)


def _stop(spec: ClusterSpec, node: str, daemon: str) -> None:
    found = targets.named(spec, node, daemon)
    if not found:
        raise SandboxError(f"stop {daemon} on {node}", "it does not run", hint=command(spec.root, f"heal {node}"))
    processes.stop(found)


def _slurmd_stop(spec: ClusterSpec, node: str, _: str) -> str:
    _stop(spec, node, "slurmd")
    return "slurmd stopped: it accepts connections and does not answer; its jobs go on"


def _munge_stop(spec: ClusterSpec, node: str, _: str) -> str:
    _stop(spec, node, "munged")
    return "munged stopped: Slurm cannot talk to the node, SSH can"


def _stepd_kill(spec: ClusterSpec, node: str, argument: str) -> str:
    if argument not in ("", "batch"):
        raise SandboxUsage(f"inject stepd-kill:{argument}", "it may take the word batch, as stepd-kill:batch")
    found = targets.stepd_of_batch(spec, node) if argument else targets.stepd_of_program(spec, node)
    processes.signal_each(found, signal.SIGKILL)
    return f"slurmstepd of the {'batch script' if argument else 'program'} killed: Slurm does not notice"


def _ecc(spec: ClusterSpec, node: str, argument: str) -> str:
    gpu = _gpu(spec, node, argument)
    gpus.uncorrected(spec.layout.node(node), gpu)
    return f"GPU {gpu} counts one more uncorrectable memory error"


def _nvidia_smi_hang(spec: ClusterSpec, node: str, _: str) -> str:
    gpus.hang(spec.layout.node(node))
    return "nvidia-smi does not answer any more; the program goes on"


def _slow(spec: ClusterSpec, node: str, argument: str) -> str:
    """Let the node's ranks run for a part of every half second."""
    percent = argument or str(SLOW_PERCENT)
    if not percent.isdigit() or not 1 <= int(percent) <= 99:
        raise SandboxUsage(f"inject slow:{argument}", "it may take how much of its speed is left, as slow:20 (percent)")
    left = int(percent) / 100
    times = [f"{SLOW_PERIOD_S * (1 - left):.3f}", f"{SLOW_PERIOD_S * left:.3f}"]
    start_script(spec, node, "duty.py", *times, "ranks", says="slows")
    return f"the program's processes run {percent} % of the time, those of later launches too"


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("power", "all its processes die at once, silently", _power, needs_namespaces=True),
        Kind("net-cut", "the cable is cut; what runs on it goes on", _net_cut, needs_namespaces=True),
        Kind("slurmd-kill", "SIGKILL to slurmd; its jobs go on", _slurmd_kill),
        Kind("slurmd-stop", "SIGSTOP to slurmd; its jobs go on", _slurmd_stop),
        Kind("stepd-kill", "SIGKILL to the program's slurmstepd (:batch: the script's)", _stepd_kill, "batch"),
        Kind("munge-stop", "SIGSTOP to munged: lost to Slurm, not to SSH", _munge_stop, needs_namespaces=True),
        Kind("rank-kill", "SIGKILL to one process of the user's program", _rank_kill),
        Kind("rank-stop", "SIGSTOP to one process of the user's program: a hang", _rank_stop),
        Kind("slow", "the program runs 20 % of the time on it", _slow, "PERCENT", needs_namespaces=True),
        Kind("xid", "an XID in the kernel log; 79 takes the GPU away too", _xid, "N[:GPU]", needs_argument=True),
        Kind("gpu-lost", "a GPU vanishes from nvidia-smi, without a kernel line", _gpu_lost, "GPU"),
        Kind("ecc", "a GPU counts one more uncorrectable memory error", _ecc, "GPU"),
        Kind("nvidia-smi-hang", "nvidia-smi never answers again", _nvidia_smi_hang),
        Kind("disk-full", "the checkpoint folder (:PATH: another) is full there", disk_full, "PATH", False, True),
        Kind("mount-dead", "the same folder's server never answers there", mount_dead, "PATH", False, True),
        Kind("ctld-kill", "SIGKILL to slurmctld", hub_faults.ctld_kill, hub=True),
        Kind("ctld-stop", "SIGSTOP to slurmctld", hub_faults.ctld_stop, hub=True),
        Kind("ctld-slow", "slurmctld runs a sixth of the time", hub_faults.ctld_slow, hub=True),
        Kind("daemon-kill", "SIGKILL to transomd", hub_faults.daemon_kill, hub=True),
        Kind("db-locked", "transomd's SQLite database cannot be written", hub_faults.db_locked, hub=True),
        Kind("db-gone", "transomd's SQLite database is not at its place", hub_faults.db_gone, hub=True),
    )
}


def inject(spec: ClusterSpec, node: str, kind: str) -> str:
    """Inject ``kind`` (as ``power`` or ``xid:79``) into a node or the hub, and say what was done."""
    word, _, argument = kind.partition(":")
    found = KINDS.get(word)
    if found is None:
        raise SandboxUsage(f"inject {kind}", "no such kind", hint=f"use one of: {known()}")
    if (argument and not found.argument) or (found.needs_argument and not argument):
        raise SandboxUsage(f"inject {kind}", "wrong argument", hint=f"use one of: {known()}")
    if found.hub is not (node == HUB):
        cause = f"it is a fault of {'the hub' if found.hub else 'a node'}"
        raise SandboxUsage(f"inject {kind} into {node}", cause, hint=command(spec.root, f"fail {HUB} {kind}"))
    if found.needs_namespaces and not spec.namespaces:
        cause = "this sandbox runs on loopback addresses, its nodes share everything with this machine"
        raise SandboxError(f"inject {kind}", cause, hint="start the sandbox as root")
    return found.inject(spec, node, argument)


def known() -> str:
    """All kinds, as one types them."""
    return ", ".join(kind.name + (f":{kind.argument}" if kind.needs_argument else "") for kind in KINDS.values())


def heal(spec: ClusterSpec, node: str) -> tuple[str, ...]:
    """Undo what was injected into a node (as a reboot would) or the hub, and say what was done."""
    if node == HUB:
        return hub_faults.heal(spec)
    done = []
    gpus.boot(spec.layout.node(node), node, spec.gpus)
    if spec.namespaces and not netns.powered(spec, node):
        netns.boot_nodes(spec, [node])
        storage_faults.heal(spec, node)
        return ("booted", _AS_NEW)
    if spec.namespaces and not netns.link_up(spec, node):
        netns.set_link(spec, node, up=True)
        done.append("cable mended")
    done += storage_faults.heal(spec, node)
    helpers = targets.running(targets.node_pids(spec, node), ["duty.py"])
    if helpers:
        processes.signal_each(helpers, signal.SIGTERM)
        until(lambda: not any(processes.state(pid) not in ("", "Z") for pid in helpers), 5.0)
        done.append("its program has its speed back")
    stopped = {pid for pid in targets.node_pids(spec, node) if processes.state(pid) == "T"}
    if stopped:
        processes.signal_each(stopped, signal.SIGCONT)
        done.append(f"{len(stopped)} stopped processes continued")
    if not targets.slurmd_pids(spec, node):
        start = [f"{spec.layout.lib}/node", node, *slurmd(node)]
        run(start, f"start slurmd on {node}", env=daemon_environment(spec))
        done.append("slurmd started")
    return (*done, _AS_NEW)
