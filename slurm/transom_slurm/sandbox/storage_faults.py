"""Faults of file systems as one node sees them: a full one, and one whose server is gone."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from transom_slurm.sandbox import processes, targets
from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.daemons import run, start_script
from transom_slurm.sandbox.errors import SandboxError, SandboxUsage

_PLAIN = re.compile(r"/[A-Za-z0-9._/+@-]+")
_FILL = """\
set -e
room=$(mktemp -d /run/full.XXXXXX)
mount -t tmpfs -o size=64k tmpfs "$room"
mkdir "$room/upper" "$room/work"
mount -t overlay -o "lowerdir=$1,upperdir=$room/upper,workdir=$room/work" overlay "$1"
dd if=/dev/zero of="$room/fill" bs=4k 2>/dev/null || true
"""


def disk_full(spec: ClusterSpec, node: str, argument: str) -> str:
    """Nothing more can be written below a folder on this node; what is there stays readable."""
    folder = _folder(spec, node, argument)
    _note(spec, node, folder)
    run([f"{spec.layout.lib}/node", node, "sh", "-c", _FILL, "sh", folder], f"fill {folder} on {node}")
    return f"{folder} is full there: whatever is written ends with ENOSPC"


def mount_dead(spec: ClusterSpec, node: str, argument: str) -> str:
    """A folder's file system does not answer on this node."""
    if not Path("/dev/fuse").exists():
        raise SandboxError(f"let a mount of {node} die", "this machine has no /dev/fuse")
    folder = _folder(spec, node, argument)
    _note(spec, node, folder)
    start_script(spec, node, "dead_mount.py", folder, says="mounted")
    return f"{folder} does not answer there: who touches it waits in the kernel"


def heal(spec: ClusterSpec, node: str) -> list[str]:
    """Take away what these faults put over folders; works on a node that was switched off meanwhile, too."""
    noted = _noted(spec, node)
    if not noted.exists():
        return []
    processes.signal_each(targets.running(targets.node_pids(spec, node), ["dead_mount.py"]), signal.SIGKILL)
    folders = noted.read_text().split()
    for folder in folders:
        run([f"{spec.layout.lib}/node", node, "umount", "-l", folder], f"mend {folder} on {node}", check=False)
    noted.unlink()
    return [f"{folder} answers and has space" for folder in dict.fromkeys(folders)]


def _folder(spec: ClusterSpec, node: str, argument: str) -> str:
    folder = argument or targets.checkpoint_folder(spec, node)
    if not _PLAIN.fullmatch(folder) or not Path(folder).is_dir():
        raise SandboxUsage(f"harm {folder} on {node}", "it is no folder with a plain absolute path")
    return folder


def _noted(spec: ClusterSpec, node: str) -> Path:
    return spec.layout.node(node).root / "covered"


def _note(spec: ClusterSpec, node: str, folder: str) -> None:
    with _noted(spec, node).open("a") as file:
        file.write(folder + "\n")
