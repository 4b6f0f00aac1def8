"""A real sshd on loopback addresses: what the SSH tests talk to. One sshd is one node."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transomd.health.ssh import SshSettings


class Sshd:
    """Nodes ``n1`` to ``nN``, each an sshd of its own with its own host key, and the files a client needs."""

    def __init__(self, root: Path, nodes: int = 1) -> None:
        self.root = root
        self.extra = ""
        """Further lines of sshd_config."""
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.addresses = {name: f"127.88.0.{i}" for i, name in enumerate(self.names, 1)}
        self.ports = {name: free_port(self.addresses[name]) for name in self.names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.known_hosts = root / "known_hosts"
        self.config = root / "ssh_config"
        self.key = root / "id_ed25519"
        keygen(self.key)
        (root / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        os.makedirs("/run/sshd", exist_ok=True)
        for name in self.names:
            keygen(root / f"host_{name}")
        self.write_client_files()

    def write_client_files(self) -> None:
        """ssh_config and known_hosts for all nodes."""
        lines, keys = [], []
        for name in self.names:
            lines.append(f"Host {name}\n  HostName {self.addresses[name]}\n  Port {self.ports[name]}\n")
            key = (self.root / f"host_{name}.pub").read_text().strip()
            keys.append(f"[{self.addresses[name]}]:{self.ports[name]} {key}")
        self.config.write_text("".join(lines))
        self.known_hosts.write_text("\n".join(keys) + "\n")

    def start(self, name: str) -> None:
        """Start one node's sshd and wait until it listens."""
        config = self.root / f"sshd_{name}"
        config.write_text(
            f"ListenAddress {self.addresses[name]}\nPort {self.ports[name]}\nHostKey {self.root}/host_{name}\n"
            f"AuthorizedKeysFile {self.root}/authorized_keys\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PasswordAuthentication no\nPermitRootLogin yes\nLogLevel ERROR\n"
            # bash reads its start-up file in every login, and nobody knows what the host's makes it run
            f"SetEnv HOME={self.root}\n" + self.extra
        )
        argv = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
        self.processes[name] = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not listens(self.addresses[name], self.ports[name]):
            assert time.monotonic() < deadline, f"sshd of {name} does not listen"
            time.sleep(0.01)

    def stop(self, name: str) -> None:
        """End one node's sshd; sessions under way go on, as with the real one."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait(60)

    def settings(self, **changes: object) -> SshSettings:
        """Client settings that reach every node."""
        wanted: dict[str, object] = {
            "known_hosts": self.known_hosts,
            "config": self.config,
            "client_keys": (self.key,),
            "user": "root",
            "connect_timeout": 30.0,
        }
        return SshSettings(**(wanted | changes))  # type: ignore[arg-type]

    def __enter__(self) -> Sshd:
        try:
            for name in self.names:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.stop(name)


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user may write to; pytest's own are closed to all but their owner."""
    with tempfile.TemporaryDirectory(prefix="transom-test-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def keygen(path: Path) -> None:
    """A new ed25519 key without a passphrase, in place of what was there."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def free_port(address: str) -> int:
    """A port nobody listens on at this address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def listens(address: str, port: int) -> bool:
    """Whether a connection is accepted."""
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0
