"""Finding what a fault is to hit: a node's processes, the user's program, slurmd, stepds, transomd, helpers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from transom_slurm.sandbox import loopback, netns, processes
from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.errors import SandboxMissing

_SHELLS = ("sh", "bash", "dash", "zsh")
_NOT_RANKS = ("srun", "slurmstepd", "slurm_script")


def node_pids(spec: ClusterSpec, node: str) -> set[int]:
    """The processes of one node."""
    return netns.node_pids(spec, node) if spec.namespaces else loopback.node_pids(spec, node)


def named(spec: ClusterSpec, node: str, name: str) -> set[int]:
    """The processes of a node with this short name."""
    return {pid for pid in node_pids(spec, node) if processes.name(pid) == name}


def slurmd_pids(spec: ClusterSpec, node: str) -> set[int]:
    """The node's slurmd; not its stepds."""
    return named(spec, node, "slurmd")


def running(pids: Iterable[int], scripts: Iterable[str]) -> set[int]:
    """Those processes that run one of the sandbox's scripts; not those that only wait for them (nsenter)."""
    wanted, found = set(scripts), set()
    for pid in pids:
        words = [Path(word).name for word in command_line(pid)]
        if words and words[0].startswith("python") and wanted & set(words):
            found.add(pid)
    return found


def command_line(pid: int) -> list[str]:
    """A process's words; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def ranks(spec: ClusterSpec, node: str) -> dict[int, int]:
    """The processes of the user's program on a node, each with its LOCAL_RANK.

    Neither transom's own processes nor the batch script have both TRANSOM_EPOCH and RANK.
    """
    found = {}
    for pid in node_pids(spec, node):
        env = processes.environment(pid)
        if "TRANSOM_EPOCH" in env and "RANK" in env and processes.name(pid) not in _NOT_RANKS:
            found[pid] = int(env.get("LOCAL_RANK", "0"))
    return found


def job_pids(spec: ClusterSpec, node: str) -> set[int]:
    """The processes of Slurm jobs on a node."""
    return {pid for pid in node_pids(spec, node) if "SLURM_JOB_ID" in processes.environment(pid)}


def find_rank(spec: ClusterSpec, node: str) -> int:
    """The process of the user's program with the lowest LOCAL_RANK on the node.

    Shells that only wait for the program are passed over, and so are the program's own workers.
    """
    found = ranks(spec, node)
    tops = [pid for pid in found if processes.parent(pid) not in found]
    if not tops:
        raise SandboxMissing(f"find a rank on {node}", "no process of a training program runs there")
    return _behind_shells(min(tops, key=lambda pid: (found[pid], pid)), set(found))


def _behind_shells(pid: int, found: set[int]) -> int:
    while processes.name(pid) in _SHELLS:
        below = [child for child in found if processes.parent(child) == pid]
        if len(below) != 1:
            break
        pid = below[0]
    return pid


def stepd_of_program(spec: ClusterSpec, node: str) -> set[int]:
    """The slurmstepd above the user's program on a node."""
    stepds = named(spec, node, "slurmstepd")
    found = {above for pid in ranks(spec, node) for above in _ancestors(pid) if above in stepds}
    if not found:
        raise SandboxMissing(f"find a slurmstepd on {node}", "no step of a training program runs there")
    return found


def stepd_of_batch(spec: ClusterSpec, node: str) -> set[int]:
    """The slurmstepd of a batch script on a node: it is the one whose step has no number."""
    found = {pid for pid in named(spec, node, "slurmstepd") if any(".batch]" in word for word in command_line(pid))}
    if not found:
        raise SandboxMissing(f"find a slurmstepd on {node}", "no batch script runs there")
    return found


def _ancestors(pid: int) -> list[int]:
    found = []
    while (pid := processes.parent(pid)) > 1:
        found.append(pid)
    return found


def checkpoint_folder(spec: ClusterSpec, node: str) -> str:
    """The checkpoint folder of the program on a node, which is there already."""
    for pid in ranks(spec, node):
        folder = processes.environment(pid).get("TRANSOM_CHECKPOINT_DIR", "")
        if folder and os.path.isdir(folder):
            return folder
    raise SandboxMissing(f"find a checkpoint folder on {node}", "no program there has one yet", hint="name a folder")


def transomd(spec: ClusterSpec) -> set[int]:
    """The transomd of the sandbox."""
    found = set()
    for pid in processes.owned(spec.layout.conf):
        words = command_line(pid)
        if "transomd.daemon" in words or any(Path(word).name == "transomd" for word in words[:2]):
            found.add(pid)
    return {pid for pid in found if processes.parent(pid) not in found}


def database(spec: ClusterSpec) -> Path:
    """The SQLite file that transomd has open."""
    for pid in transomd(spec):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.endswith(".db") and os.path.isfile(target):
                return Path(target)
    raise SandboxMissing("find transomd's database", "no transomd with a SQLite database runs in this sandbox")
