"""Where everything of one sandbox lies: one directory, nothing outside it."""

from __future__ import annotations

import getpass
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transom_slurm.sandbox.errors import SandboxUsage

_PLAIN = re.compile(r"[A-Za-z0-9._/+@-]+")
_HIDDEN_ON_NODES = ("/run", "/var/run", "/dev", "/proc", "/sys", "/var/log", "/usr/bin", "/bin")
_SOCKET_LIMIT = 107
"""Longest path of a Unix socket, bytes (``sun_path`` in sys/un.h, less the final zero)."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The files of one node."""

    root: Path

    @property
    def init(self) -> Path:
        """What the node's first process is to do."""
        return self.root / "init.json"

    @property
    def pid(self) -> Path:
        """The node's first process, as the host numbers it."""
        return self.root / "init.pid"

    @property
    def boot(self) -> Path:
        """``starting``, ``ready``, or ``failed: why``."""
        return self.root / "boot"

    @property
    def bin(self) -> Path:
        """Commands that hide the host's own: nvidia-smi and dmesg."""
        return self.root / "bin"

    @property
    def gpus(self) -> Path:
        """The state of the simulated GPUs."""
        return self.root / "gpus.json"

    @property
    def log(self) -> Path:
        """The node's own /var/log."""
        return self.root / "log"

    @property
    def kern_log(self) -> Path:
        """The node's kernel log."""
        return self.log / "kern.log"

    @property
    def host_key(self) -> Path:
        """The private host key of the node's sshd."""
        return self.root / "ssh_host_ed25519_key"

    @property
    def sshd_config(self) -> Path:
        """The configuration of the node's sshd."""
        return self.root / "sshd_config"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one sandbox."""

    root: Path

    @property
    def marker(self) -> Path:
        """Says that the directory is a sandbox, and which; written first and removed last."""
        return self.root / "sandbox.json"

    @property
    def etc(self) -> Path:
        """Configuration."""
        return self.root / "etc"

    @property
    def conf(self) -> Path:
        """slurm.conf; its path in a process's environment marks the process as this sandbox's."""
        return self.etc / "slurm.conf"

    @property
    def site(self) -> Path:
        """transomd's site file."""
        return self.etc / "transomd.toml"

    @property
    def daemon_socket(self) -> Path:
        """Where transomd listens when it is started with that site file."""
        return self.run / "transomd.sock"

    @property
    def bin(self) -> Path:
        """Wrappers that run in the hub by themselves; meant for PATH."""
        return self.root / "bin"

    @property
    def lib(self) -> Path:
        """Scripts that enter the hub or a node, and what the nodes run."""
        return self.root / "lib"

    @property
    def run(self) -> Path:
        """Pid files and sockets."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """Logs of the daemons."""
        return self.root / "log"

    @property
    def hub(self) -> NodeLayout:
        """The hub, where slurmctld runs."""
        return NodeLayout(self.root / "hub")

    def node(self, name: str) -> NodeLayout:
        """One node's files."""
        return NodeLayout(self.root / "nodes" / name)


def default_directory() -> Path:
    """Where a sandbox is kept unless told otherwise."""
    return Path(tempfile.gettempdir()) / f"transom-sandbox-{getpass.getuser()}"


def command(root: Path, words: str) -> str:
    """What to type to do something with the sandbox in a directory."""
    where = "" if root == default_directory() else f" --dir {root}"
    verb, *rest = words.split()
    return " ".join([f"transom sandbox {verb}{where}", *rest])


def check_directory(directory: Path) -> Path:
    """Return the directory's real path; :class:`SandboxUsage` names every reason why it cannot hold a sandbox."""
    root = directory.expanduser().resolve()
    faults = []
    if not _PLAIN.fullmatch(str(root)):
        faults.append("its path has characters that slurm.conf or a mount option cannot hold")
    if len(f"{root}/run/munge.socket.lock") > _SOCKET_LIMIT:
        faults.append("its path is too long for a Unix socket")
    hidden = [top for top in _HIDDEN_ON_NODES if root.is_relative_to(top)]
    if hidden:
        faults.append(f"{hidden[0]} is private to each node")
    if faults:
        raise SandboxUsage(f"use {root} for a sandbox", "; ".join(faults), hint="choose another with --dir, as /tmp/sb")
    return root
