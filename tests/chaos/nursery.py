"""A process that forks keepers, so that hundreds of them can be had: an interpreter is started once, not for each.

What runs in them is ``transomd.tce.keeper.main`` as it stands. Import this, and make the nursery, before torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transomd.tce import keeper


class Nursery:
    """``start`` may be called by any process that was forked from the one that made it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._path = folder / "nursery"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._path))
        listener.listen(16)
        self.pid = os.fork()
        if self.pid == 0:
            end_with_parent()
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
            _serve(listener)
        listener.close()

    def start(self, argv: Sequence[str], agent: bool = False) -> int:
        """Start a keeper; its process, once it listens. ``agent``: it is the child of a process of its own, as an
        agent's is. Raises OSError with the exit code of one that did not come to listen.
        """
        told = self._ask({"argv": list(argv), "agent": agent})
        if not told["pid"]:
            raise OSError(f"exit code {told['code']}")
        return int(told["pid"])

    def ensure(self, path: Path) -> None:
        """Do what the engine does where no keeper is: start one, or find that another was faster."""
        with contextlib.suppress(OSError):
            self.start([f"--socket={path}", "--daemon"])

    def living(self, folder: Path) -> list[int]:
        """The keepers that listen below ``folder`` and are still there."""
        told = self._ask({})["keepers"]
        return [pid for pid, argv in told if any(str(folder) in part for part in argv) and alive(pid)]

    def agents(self) -> list[int]:
        """The agents that are still there."""
        return [pid for pid in self._ask({})["agents"] if alive(pid)]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(60)
            sock.connect(str(self._path))
            sock.send(json.dumps(message).encode())
            return dict(json.loads(sock.recv(1 << 20)))

    def close(self) -> None:
        """End the nursery; what it started is killed."""
        told = self._ask({})
        kill([*told["agents"], *(pid for pid, _ in told["keepers"]), self.pid])
        os.waitpid(self.pid, 0)
        self._path.unlink()


def end_with_parent() -> None:
    """Nothing is left of a run that was itself killed (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pids: Sequence[int]) -> None:
    """``kill -9``."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(pids: Sequence[int], seconds: float = 60.0) -> bool:
    """Whether all these processes have ended in time."""
    end = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if not select.select([pidfd], [], [], max(0.0, end - time.monotonic()))[0]:
                    return False
            finally:
                os.close(pidfd)
    return True


def _serve(listener: socket.socket) -> None:
    keepers: list[tuple[int, list[str]]] = []
    agents: list[int] = []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        keepers = [one for one in keepers if alive(one[0])]
        agents = [pid for pid in agents if alive(pid)]
        sock, _ = listener.accept()
        with sock:
            asked = json.loads(sock.recv(1 << 16) or b"{}")
            answer: dict[str, Any] = {"keepers": keepers, "agents": agents}
            if asked:
                child, answer["pid"], answer["code"] = _forked(listener, sock, asked["argv"], asked["agent"])
                if answer["pid"]:
                    keepers.append((answer["pid"], asked["argv"]))
                    agents += [child] if asked["agent"] else []
            # Whoever asked may have been killed meanwhile.
            with contextlib.suppress(OSError):
                sock.send(json.dumps(answer).encode())


def _forked(listener: socket.socket, sock: socket.socket, argv: list[str], agent: bool) -> tuple[int, int, int]:
    """The child, the keeper (0: it did not come to listen) and the child's exit code."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        end_with_parent()
        listener.close()
        sock.close()
        os.close(ready)
        os.setsid()
        if agent and os.fork():
            os.close(tell)
            os.wait()
            os._exit(0)
        _keep(argv, tell)
    os.close(tell)
    with os.fdopen(ready) as pipe:
        told = pipe.readline()
    return child, int(told or 0), 0 if told else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _keep(argv: list[str], tell: int) -> None:
    """Be a keeper. It is in the background already; it lowers its priority right after it has begun to listen."""
    lower = keeper.lower_priority

    def listening() -> None:
        lower()
        os.write(tell, b"%d\n" % os.getpid())
        os.close(tell)

    keeper._detach = lambda: None
    keeper.lower_priority = listening
    code = 1
    try:
        code = keeper.main(argv)
    finally:
        os._exit(code)
