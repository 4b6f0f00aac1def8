"""Starting and ending a sandbox, so that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transom_slurm.sandbox import files, loopback, netns, processes, watch
from transom_slurm.sandbox.config import LOOPBACK, MAX_NODES, NETNS, ClusterSpec, loopback_nodes, netns_nodes
from transom_slurm.sandbox.daemons import slurm_version
from transom_slurm.sandbox.errors import SandboxError, SandboxRefused, SandboxUsage
from transom_slurm.sandbox.layout import default_directory


def existing(directory: Path | str | None) -> Path:
    """The directory of a sandbox that may be up; :class:`SandboxRefused` when it is another user's."""
    root = Path(directory).expanduser().resolve() if directory else default_directory()
    if root.exists() and os.geteuid() not in (0, root.stat().st_uid):
        raise SandboxRefused(f"use the sandbox in {root}", f"it is {root.owner()}'s", hint=f"become {root.owner()}")
    return root


def choose_mode(mode: str) -> str:
    """The wanted mode, or the better one that is possible; :class:`SandboxRefused` when the wanted one is not."""
    why_not = netns.available()
    if mode == NETNS and why_not:
        raise SandboxRefused("start a sandbox with namespaces", why_not, hint="run as root, or without --mode")
    return mode or (LOOPBACK if why_not else NETNS)


def plan(root: Path, mode: str, count: int, **settings: Any) -> ClusterSpec:
    """A sandbox of so many nodes, with the ports that it will use; ``settings`` are further fields of the spec."""
    if not 1 <= count <= MAX_NODES:
        raise SandboxUsage(
            "start a sandbox", f"{count} nodes: it can have 1 to {MAX_NODES}", hint="transom sandbox up -h"
        )
    if mode == NETNS:
        nodes, port = netns_nodes(count), 6817
    else:
        loopback.check_hostname()
        port, *ports = loopback.free_ports(2 * count + 1)
        nodes = loopback_nodes(ports, count)
    return ClusterSpec(
        root=root,
        mode=mode,
        slurm_version=slurm_version(),
        user=getpass.getuser(),
        hostname=socket.gethostname().partition(".")[0],
        controller_port=port,
        nodes=nodes,
        **settings,
    )


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep others from starting or ending the same sandbox meanwhile."""
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cause = "another command is starting or ending it"
            raise SandboxError(f"use the sandbox in {root}", cause, hint="wait for it, or end it") from None
        yield
    finally:
        os.close(held)


def start(spec: ClusterSpec, timeout_s: float) -> None:
    """Write the directory, start everything and wait until all nodes are idle; on any failure tear it down again."""
    spec.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    with files.umask(), locked(spec.root):
        files.claim(spec)
        try:
            files.write_all(spec)
            backend = netns if spec.namespaces else loopback
            backend.boot_hub(spec)
            backend.boot_nodes(spec, spec.names)
            watch.wait_started(spec, timeout_s)
        except BaseException:
            tear_down(spec)
            raise
        files.save(spec, ready=True)


def clear(root: Path) -> bool:
    """End what is in a directory, complete or not; False when there is none."""
    if not root.exists():
        return False
    with locked(root):
        if {entry.name for entry in root.iterdir()} <= {"sandbox.new"}:
            files.remove(root)
        else:
            tear_down(files.load(root)[0])
    return True


def tear_down(spec: ClusterSpec) -> None:
    """End all processes, then remove the directory."""
    left = processes.end_all(lambda: _all_pids(spec))
    if left:
        raise SandboxError(f"end the sandbox in {spec.root}", f"processes do not end: {sorted(left)}")
    loopback.clean(spec)
    files.remove(spec.root)


def _all_pids(spec: ClusterSpec) -> set[int]:
    found = processes.owned(spec.layout.conf)
    if not spec.namespaces:
        return processes.descendants(found | loopback.daemons(spec))
    return processes.descendants(found | processes.members(found, "net"))
