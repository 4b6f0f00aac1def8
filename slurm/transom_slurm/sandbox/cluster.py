"""The sandbox as an object: up, down, run, fail, heal."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_slurm.sandbox import faults, files, gpus, loopback, netns, processes
from transom_slurm.sandbox.config import LOOPBACK, MAX_NODES, NETNS, ClusterSpec, loopback_nodes, netns_nodes
from transom_slurm.sandbox.daemons import (
    SYSTEM_PATH,
    check_installed,
    daemon_environment,
    run,
    slurm_version,
    slurmctld,
)
from transom_slurm.sandbox.errors import SandboxError, SandboxMissing, SandboxRefused, SandboxUsage
from transom_slurm.sandbox.layout import Layout, check_directory, default_directory
from transom_slurm.sandbox.waiting import until

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node looks like from outside. ``slurm`` is Slurm's word for its state, empty without an answer."""

    name: str
    address: str
    power: bool
    link: bool
    slurmd: bool
    gpus: int
    slurm: str


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A private, real Slurm on this machine. Made by :meth:`up` or found again by :meth:`attach`."""

    spec: ClusterSpec

    @classmethod
    def up(
        cls,
        nodes: int = 4,
        directory: Path | str | None = None,
        *,
        gpus: int = 8,
        cpus: int = 16,
        slurmd_timeout: int = 10,
        message_timeout: int = 5,
        mode: str = "",
        extra: Sequence[str] = (),
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> Sandbox:
        """Start a sandbox and return when all its nodes are idle; nothing is left behind when that fails.

        ``mode`` is ``netns``, ``loopback``, or empty for the better one that is possible; ``extra`` are further lines
        of slurm.conf. Timeouts are in seconds. Raises :class:`SandboxError`.
        """
        root = check_directory(Path(directory) if directory else default_directory())
        check_installed()
        mode = _choose_mode(mode)
        if not 1 <= nodes <= MAX_NODES:
            raise SandboxUsage("start a sandbox", f"{nodes} nodes: it can have 1 to {MAX_NODES}")
        spec = _plan(
            root,
            mode,
            nodes,
            gpus=gpus,
            cpus=cpus,
            slurmd_timeout=slurmd_timeout,
            message_timeout=message_timeout,
            extra=tuple(extra),
        )
        with files.umask():
            return cls._start(spec, ready_timeout_s)

    @classmethod
    def _start(cls, spec: ClusterSpec, ready_timeout_s: float) -> Sandbox:
        sandbox = cls(spec)
        spec.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _locked(spec.layout):
            files.claim(spec)
            try:
                files.write_all(spec)
                backend = netns if spec.namespaces else loopback
                backend.boot_hub(spec)
                backend.boot_nodes(spec, spec.names)
                sandbox._wait_started(ready_timeout_s)
            except BaseException:
                _tear_down(spec)
                raise
            files.save(spec, ready=True)
        return sandbox

    @classmethod
    def attach(cls, directory: Path | str | None = None) -> Sandbox:
        """The sandbox that is up in a directory; :class:`SandboxError` when none is, or only the rest of one."""
        spec, ready = files.load(_existing(directory))
        if not ready:
            raise SandboxError(
                f"use the sandbox in {spec.root}",
                "its start was interrupted or is under way",
                hint="transom sandbox down",
            )
        return cls(spec)

    @staticmethod
    def clear(directory: Path | str | None = None) -> bool:
        """End whatever sandbox is in a directory, complete or not, without a trace; False when there is none."""
        root = _existing(directory)
        if not root.exists():
            return False
        with _locked(Layout(root)):
            names = {entry.name for entry in root.iterdir()}
            if names <= {"sandbox.new"}:
                files.remove(root)
                return True
            spec, _ = files.load(root)
            _tear_down(spec)
        return True

    def down(self) -> None:
        """End it without a trace."""
        self.clear(self.spec.root)

    @property
    def directory(self) -> Path:
        """Where everything of it is."""
        return self.spec.root

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of its nodes."""
        return self.spec.names

    @property
    def ssh_config(self) -> Path:
        """For ``ssh -F``, from the hub."""
        return self.spec.layout.etc / "ssh_config"

    @property
    def ssh_key(self) -> Path:
        """The private key that every node accepts."""
        return self.spec.layout.etc / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """The host keys of the nodes."""
        return self.spec.layout.etc / "known_hosts"

    def env(self) -> dict[str, str]:
        """The environment by which Slurm's commands, transom and transomd run in the hub by themselves."""
        at = self.spec.layout
        path = os.environ.get("PATH", SYSTEM_PATH)
        clean = [entry for entry in path.split(":") if entry and entry != str(at.bin)]
        return {
            "SLURM_CONF": str(at.conf),
            "TRANSOM_SANDBOX": str(self.spec.root),
            "TRANSOM_CONFIG": str(at.site),
            "TRANSOM_SOCKET": str(at.daemon_socket),
            "PATH": ":".join([str(at.bin), *clean]),
        }

    def hub_argv(self, argv: Sequence[str]) -> list[str]:
        """The command, wrapped so that it runs where slurmctld runs and the nodes can be reached."""
        return [f"{self.spec.layout.lib}/hub", *argv]

    def node_argv(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command, wrapped so that it runs on a node."""
        self._check_node(node)
        return [f"{self.spec.layout.lib}/node", node, *argv]

    def run(
        self, argv: Sequence[str], node: str | None = None, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the hub or on a node; :class:`SandboxError` when it takes too long, or fails (``check``)."""
        full = self.node_argv(node, argv) if node else self.hub_argv(argv)
        return run(full, f"run {argv[0]} on {node or 'the hub'}", check=check, timeout_s=timeout)

    def fail(self, node: str, kind: str) -> str:
        """Inject a fault (see :data:`transom_slurm.sandbox.faults.KINDS`) and say what was done."""
        self._check_node(node)
        return faults.inject(self.spec, node, kind)

    def heal(self, node: str) -> tuple[str, ...]:
        """Undo the faults of a node and say what was done. Slurm notices by itself, a mended cable after a while."""
        self._check_node(node)
        with files.umask():
            return faults.heal(self.spec, node)

    def gpu_set(self, node: str, index: int, **fields: Any) -> None:
        """Let nvidia-smi say something else of a GPU; a dot in a field's name is written as two underscores."""
        self._check_node(node)
        named = {key.replace("__", "."): value for key, value in fields.items()}
        gpus.update(self.spec.layout.node(node), index, named)

    def gpu_process(self, node: str, index: int, pid: int, used_mib: int) -> None:
        """Let a process appear on a GPU."""
        self._check_node(node)
        gpus.add_process(self.spec.layout.node(node), index, pid, used_mib)

    def kernel_line(self, node: str, text: str) -> None:
        """Append a line to a node's kernel log."""
        self._check_node(node)
        gpus.kernel_line(self.spec.layout.node(node), node, text)

    def stop_controller(self, *, kill: bool = False) -> None:
        """End slurmctld, cleanly or by SIGKILL. Within 5 s of a change SIGKILL loses state, as with every slurmctld."""
        pid = self._controller()
        if not pid:
            raise SandboxError("stop slurmctld", "it does not run")
        os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        if not until(lambda: processes.state(pid) in ("", "Z"), 30.0):
            raise SandboxError("stop slurmctld", f"process {pid} did not end")

    def start_controller(self) -> None:
        """Start slurmctld again and return when it answers."""
        start = self.hub_argv(slurmctld())
        run(start, "start slurmctld", env=daemon_environment(self.spec))
        if not until(self._answers, READY_TIMEOUT_S):
            raise SandboxError(
                "start slurmctld", "it does not answer", hint=f"see {self.spec.layout.logs}/slurmctld.log"
            )

    def slurm_states(self) -> dict[str, str]:
        """Slurm's short state of each node (``idle``, ``mix*``, ...); empty when Slurm does not answer."""
        done = self.run(["sinfo", "-h", "-N", "-o", "%N %t"], check=False)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def wait_idle(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when all nodes are idle; :class:`SandboxError` says which are not, and what the logs complain of."""
        if until(self._idle, timeout_s, 0.05):
            return
        got = self.slurm_states()
        bad = ", ".join(f"{node} {got.get(node, '?')}" for node in self.nodes if got.get(node) != "idle")
        cause = "\n".join([f"after {timeout_s:g} s not idle: {bad}", *self._complaints("error:")])
        raise SandboxError("wait for the nodes", cause, hint=f"see {self.spec.layout.logs}")

    def _idle(self) -> bool:
        return self.slurm_states() == dict.fromkeys(self.nodes, "idle")

    def _wait_started(self, timeout_s: float) -> None:
        """Wait for the first time, and no longer than until a daemon gives up."""
        until(lambda: self._idle() or bool(self._complaints("fatal:")), timeout_s, 0.05)
        if fatal := self._complaints("fatal:"):
            raise SandboxError("start Slurm", "\n".join(fatal), hint="look at the lines of slurm.conf that you added")
        self.wait_idle(0.0)

    def reset(self) -> None:
        """Make it as new between tests: no jobs, all nodes healed and resumed. Returns when all are idle for good."""
        self.run(["scancel", *self.run(["squeue", "-h", "-o", "%A"]).stdout.split()], check=False)
        broken = [node for node in self.nodes if len(self.heal(node)) > 1]
        if not until(lambda: not self.run(["squeue", "-h"]).stdout.strip(), 60.0, 0.1):
            raise SandboxError("reset", f"jobs did not end: {self.run(['squeue', '-h']).stdout}")
        for node, word in self.slurm_states().items():
            if word != "idle":
                self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        self.wait_idle()
        if broken:
            self._settle()

    def _settle(self) -> None:
        """Outlast slurmctld's last unanswered ping to a node that was away: its failure marks the node once more."""
        until(lambda: "idle*" in self.slurm_states().values(), self.spec.message_timeout + 1.0, 0.2)
        self.wait_idle()

    def status(self) -> tuple[NodeReport, ...]:
        """Each node, as seen from outside."""
        words = self.slurm_states()
        return tuple(self._report(node.name, node.address, words) for node in self.spec.nodes)

    def _report(self, name: str, address: str, words: dict[str, str]) -> NodeReport:
        power = not self.spec.namespaces or netns.powered(self.spec, name) > 0
        return NodeReport(
            name=name,
            address=address,
            power=power,
            link=power and (not self.spec.namespaces or netns.link_up(self.spec, name)),
            slurmd=bool(faults.slurmd_pids(self.spec, name)),
            gpus=gpus.shown(self.spec.layout.node(name)),
            slurm=words.get(name, ""),
        )

    def _check_node(self, node: str) -> None:
        if node not in self.nodes:
            cause = f"there is no such node; there are {self.nodes[0]} to {self.nodes[-1]}"
            raise SandboxMissing(f"use node {node}", cause, hint="transom sandbox status")

    def _controller(self) -> int:
        try:
            pid = int((self.spec.layout.run / "slurmctld.pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if processes.is_owned(pid, self.spec.layout.conf) else 0

    def _answers(self) -> bool:
        return " is UP" in self.run(["scontrol", "ping"], check=False).stdout

    def _complaints(self, word: str) -> list[str]:
        """The last lines of each of Slurm's logs that hold a word."""
        found = []
        for log in sorted(self.spec.layout.logs.glob("slurm*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if word in line]
            found += [f"{log.name}: {line}" for line in lines[-3:]]
        return found


def _existing(directory: Path | str | None) -> Path:
    """The directory of a sandbox that may be up; :class:`SandboxRefused` when it is another user's."""
    root = Path(directory).expanduser().resolve() if directory else default_directory()
    if root.exists() and os.geteuid() not in (0, root.stat().st_uid):
        raise SandboxRefused(f"use the sandbox in {root}", f"it is {root.owner()}'s", hint=f"become {root.owner()}")
    return root


def _choose_mode(mode: str) -> str:
    why_not = netns.available()
    if mode == NETNS and why_not:
        raise SandboxRefused("start a sandbox with namespaces", why_not, hint="run as root, or without --mode")
    return mode or (LOOPBACK if why_not else NETNS)


def _plan(root: Path, mode: str, count: int, **settings: Any) -> ClusterSpec:
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
def _locked(at: Layout) -> Iterator[None]:
    """Keep others from starting or ending the same sandbox meanwhile."""
    held = os.open(at.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            cause = "another command is starting or ending it"
            raise SandboxError(f"use the sandbox in {at.root}", cause, hint="wait for it, or end it") from None
        yield
    finally:
        os.close(held)


def _tear_down(spec: ClusterSpec) -> None:
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
