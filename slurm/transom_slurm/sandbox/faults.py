"""Faults to inject into a sandbox's nodes: a table from kind to what it does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from transom_slurm.sandbox import gpus, loopback, netns, processes
from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.daemons import daemon_environment, run, slurmd
from transom_slurm.sandbox.errors import SandboxError, SandboxMissing, SandboxUsage
from transom_slurm.sandbox.layout import command
from transom_slurm.sandbox.waiting import until

_SHELLS = ("sh", "bash", "dash", "zsh")
_AS_NEW = "GPUs and kernel log as after a reboot"
_NOT_RANKS = ("srun", "slurmstepd", "slurm_script")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. ``argument`` names what may follow the colon; empty when nothing may."""

    name: str
    help: str
    inject: Callable[[ClusterSpec, str, str], str]
    argument: str = ""
    needs_argument: bool = False
    needs_namespaces: bool = False


def node_pids(spec: ClusterSpec, node: str) -> set[int]:
    """The processes of one node."""
    return netns.node_pids(spec, node) if spec.namespaces else loopback.node_pids(spec, node)


def slurmd_pids(spec: ClusterSpec, node: str) -> set[int]:
    """The node's slurmd; not its stepds."""
    return {pid for pid in node_pids(spec, node) if processes.name(pid) == "slurmd"}


def _power(spec: ClusterSpec, node: str, _: str) -> str:
    netns.power_off(spec, node)
    return "power cut: everything on it is dead"


def _net_cut(spec: ClusterSpec, node: str, _: str) -> str:
    if not netns.powered(spec, node):
        raise SandboxError(f"cut the cable of {node}", "it has no power", hint=command(spec.root, f"heal {node}"))
    netns.set_link(spec, node, up=False)
    return "cable cut: what runs on it goes on, alone"


def _slurmd_kill(spec: ClusterSpec, node: str, _: str) -> str:
    found = slurmd_pids(spec, node)
    if not found:
        raise SandboxError(f"kill slurmd on {node}", "it does not run", hint=command(spec.root, f"heal {node}"))
    processes.signal_each(found, signal.SIGKILL)
    until(lambda: not slurmd_pids(spec, node), 5.0)
    return "slurmd killed: its jobs go on"


def _rank_kill(spec: ClusterSpec, node: str, _: str) -> str:
    pid = find_rank(spec, node)
    processes.signal_each([pid], signal.SIGKILL)
    return f"rank killed: process {pid} (host's numbering)"


def _rank_stop(spec: ClusterSpec, node: str, _: str) -> str:
    pid = find_rank(spec, node)
    processes.signal_each([pid], signal.SIGSTOP)
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


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("power", "cut the power: all its processes die at once, silently", _power, needs_namespaces=True),
        Kind("net-cut", "cut the network cable; what runs on the node goes on", _net_cut, needs_namespaces=True),
        Kind("slurmd-kill", "SIGKILL to slurmd; its jobs go on", _slurmd_kill),
        Kind("rank-kill", "SIGKILL to one process of the user's program", _rank_kill),
        Kind("rank-stop", "SIGSTOP to one process of the user's program: a hang", _rank_stop),
        Kind("xid", "an XID in the kernel log; 79 takes the GPU away too", _xid, "N[:GPU]", needs_argument=True),
        Kind("gpu-lost", "a GPU vanishes from nvidia-smi, without a kernel line", _gpu_lost, "GPU"),
    )
}


def inject(spec: ClusterSpec, node: str, kind: str) -> str:
    """Inject ``kind`` (as ``power`` or ``xid:79``) and say what was done."""
    word, _, argument = kind.partition(":")
    found = KINDS.get(word)
    if found is None:
        raise SandboxUsage(f"inject {kind}", "no such kind", hint=f"use one of: {known()}")
    if (argument and not found.argument) or (found.needs_argument and not argument):
        raise SandboxUsage(f"inject {kind}", "wrong argument", hint=f"use one of: {known()}")
    if found.needs_namespaces and not spec.namespaces:
        cause = "this sandbox runs on loopback addresses, its nodes have no power or cable of their own"
        raise SandboxError(f"inject {kind}", cause, hint="start the sandbox as root")
    return found.inject(spec, node, argument)


def known() -> str:
    """All kinds, as one types them."""
    return ", ".join(kind.name + (f":{kind.argument}" if kind.needs_argument else "") for kind in KINDS.values())


def find_rank(spec: ClusterSpec, node: str) -> int:
    """The process of the user's program with the lowest LOCAL_RANK on the node.

    Neither transom's own processes nor the batch script have both TRANSOM_EPOCH and RANK. Shells that only wait for the
    program are passed over, and so are the program's own workers.
    """
    ranks = {}
    for pid in node_pids(spec, node):
        env = processes.environment(pid)
        if "TRANSOM_EPOCH" in env and "RANK" in env and processes.name(pid) not in _NOT_RANKS:
            ranks[pid] = int(env.get("LOCAL_RANK", "0"))
    tops = [pid for pid in ranks if processes.parent(pid) not in ranks]
    if not tops:
        raise SandboxMissing(f"find a rank on {node}", "no process of a training program runs there")
    return _behind_shells(min(tops, key=lambda pid: (ranks[pid], pid)), set(ranks))


def _behind_shells(pid: int, ranks: set[int]) -> int:
    while processes.name(pid) in _SHELLS:
        below = [child for child in ranks if processes.parent(child) == pid]
        if len(below) != 1:
            break
        pid = below[0]
    return pid


def heal(spec: ClusterSpec, node: str) -> tuple[str, ...]:
    """Undo what was injected into a node, as a reboot would, and say what was done."""
    done = []
    gpus.boot(spec.layout.node(node), node, spec.gpus)
    if spec.namespaces and not netns.powered(spec, node):
        netns.boot_nodes(spec, [node])
        return ("booted", _AS_NEW)
    if spec.namespaces and not netns.link_up(spec, node):
        netns.set_link(spec, node, up=True)
        done.append("cable mended")
    stopped = {pid for pid in node_pids(spec, node) if processes.state(pid) == "T"}
    if stopped:
        processes.signal_each(stopped, signal.SIGCONT)
        done.append(f"{len(stopped)} stopped processes continued")
    if not slurmd_pids(spec, node):
        start = [f"{spec.layout.lib}/node", node, *slurmd(node)]
        run(start, f"start slurmd on {node}", env=daemon_environment(spec))
        done.append("slurmd started")
    return (*done, _AS_NEW)
