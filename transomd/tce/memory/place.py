"""Where a keeper listens, and that there is one keeper at a place and no more."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from transomd.tce.files import digest

VARIABLE = "TRANSOM_AGENT"
"""Where the agent's keeper listens; ``%n`` stands for the node."""


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """This node as Slurm calls it, else as it calls itself."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def job_socket(run_dir: Path, slurm_job_id: str) -> str:
    """Where the keepers of an allocation listen, with ``%n`` for the node: known to the launcher and to every agent."""
    return f"/tmp/transom-{os.getuid()}/{digest(os.fsencode(os.path.abspath(run_dir)))[:12]}-{slurm_job_id}-%n.sock"


def own_socket(directory: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the keeper of a program without an agent listens: one for each checkpoint directory."""
    base = environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"transom-{os.getuid()}" / f"{digest(os.fsencode(real(directory)))[:16]}.sock"


@functools.cache
def real(directory: Path) -> str:
    """The name of a checkpoint directory behind all links, as keepers know it.

    The store is asked once a process: later it may hang, and a save must not. The keeper itself never asks it.
    """
    return os.path.realpath(directory)


def agent_socket(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the agent's keeper listens; None where there is no agent."""
    told = environ.get(VARIABLE, "")
    return on_node(told, environ) if told else None


def on_node(told: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The place on this node."""
    return Path(told.replace("%n", node_name(environ)))


def private_folder(folder: Path) -> None:
    """Make ``folder``, or see that it is ours alone; PermissionError otherwise."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not this user's alone (a folder of mode 0700)")


class Claim:
    """The right to listen at a place, held as long as the process lives."""

    def __init__(self, path: Path) -> None:
        """Claim ``path``; BlockingIOError if another keeper has it, OSError if it cannot be had."""
        self.path = path
        self._file = path.with_suffix(".lock")
        self._descriptor = _lock(self._file)
        self._sweep()

    def listen(self) -> socket.socket:
        """The listening socket."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(self.path))
        sock.listen(128)
        sock.setblocking(False)
        return sock

    def give_up(self) -> None:
        """Leave nothing behind."""
        for path in (self.path, self._file):
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(self.path.parent)

    def _sweep(self) -> None:
        """Remove what keepers left that were killed."""
        for file in self.path.parent.glob("*.lock"):
            if file != self._file:
                with contextlib.suppress(OSError):
                    descriptor = _lock(file, make=False)
                    for path in (file.with_suffix(".sock"), file):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(path)
                    os.close(descriptor)


def _lock(file: Path, make: bool = True) -> int:
    """Lock the file at this path; BlockingIOError if somebody else has it locked."""
    while True:
        try:
            if make:
                private_folder(file.parent)
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
            descriptor = os.open(file, flags, 0o600)
        except FileNotFoundError:
            if make and file.parent.parent.is_dir():
                continue  # the keeper before us has just removed the folder
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The keeper before us may have removed the file between our opening and our locking it.
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise
        os.close(descriptor)
