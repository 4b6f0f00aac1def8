"""For tests of the peer copy: keepers on loopback ports that stand for nodes, paired as the launcher pairs them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tce_keepers import wait_for


class Node:
    """One keeper, as an agent runs it."""

    def __init__(self, folder: Path, name: str, memory: str = "1G") -> None:
        self.name = name
        self.socket = folder / "r" / f"{name}.sock"
        self.token = folder / f"{name}.token"
        self.log = folder / f"{name}.log"
        self.memory = memory
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the keeper, at the port that it had before."""
        argv = [sys.executable, "-m", "transomd.tce.keeper", f"--socket={self.socket}", "--stay"]
        argv += [f"--token-file={self.token}", f"--port={self.port}"]
        env = {**os.environ, "TRANSOM_CHECKPOINT_MEMORY": self.memory}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, env=env, stderr=log)
        assert wait_for(self._answers), self.log.read_text()
        self.port = self.status()["port"]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.status()["port"])
        return False

    def ask(self, **message: Any) -> dict[str, Any]:
        """One request over the keeper's socket, as an agent makes it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(str(self.socket))
            sock.sendall(json.dumps({"id": 1, **message}).encode() + b"\n")
            with sock.makefile("rb") as answer:
                return dict(json.loads(answer.readline()))

    def status(self) -> dict[str, Any]:
        """What the keeper tells of itself."""
        return self.ask(op="status")

    def copies(self, rank: int = 0) -> list[int]:
        """The steps of a rank that are held here as copies, newest first."""
        return [step for copy in self.status()["copies"] if copy["rank"] == rank for _, step in copy["steps"]]

    def kill(self) -> None:
        """Power loss: the keeper and all that it held are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@contextmanager
def nodes(folder: Path, count: int, memory: str = "1G") -> Iterator[list[Node]]:
    """Keepers of one job."""
    token = secrets.token_hex(16)
    for number in range(1, count + 1):
        (folder / f"n{number}.token").write_text(token)
    before = os.environ.get("TRANSOM_AGENT")
    found = [Node(folder, f"n{number}", memory) for number in range(1, count + 1)]
    try:
        yield found
    finally:
        for node in found:
            node.kill()
            for left in (node.socket, node.socket.with_suffix(".lock")):
                left.unlink(missing_ok=True)
        os.environ.pop("TRANSOM_AGENT", None)
        if before is not None:
            os.environ["TRANSOM_AGENT"] = before


def pair(found: list[Node], partners: dict[str, str], epoch: int = 1) -> None:
    """Tell the keepers who is there and who gets whose copies, as the launcher does through the agents."""
    keepers: dict[str, Any] = {}
    for node in found:
        status = node.status()
        ranks = {each["rank"] for each in [*status["ranks"], *status["copies"]]}
        keepers[node.name] = ["127.0.0.1", node.port, sorted(ranks)]
    for node in found:
        node.ask(op="peers", epoch=epoch, me=node.name, partner=partners.get(node.name), keepers=keepers)


def on(node: Node) -> None:
    """From now on engines are made on this node."""
    os.environ["TRANSOM_AGENT"] = str(node.socket)
