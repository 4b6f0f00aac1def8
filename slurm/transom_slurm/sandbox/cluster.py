"""The sandbox as an object: up, down, run, fail, heal."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_slurm.sandbox import faults, files, gpus, lifecycle, processes, targets, watch
from transom_slurm.sandbox.config import HUB, ClusterSpec
from transom_slurm.sandbox.daemons import SYSTEM_PATH, check_installed, run
from transom_slurm.sandbox.errors import SandboxError, SandboxMissing
from transom_slurm.sandbox.layout import check_directory, command, default_directory
from transom_slurm.sandbox.waiting import until

READY_TIMEOUT_S = 60.0


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
        slurmd_timeout: int = 18,
        message_timeout: int = 5,
        mode: str = "",
        extra: Sequence[str] = (),
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> Sandbox:
        """Start a sandbox and return when all its nodes are idle; nothing is left behind when that fails.

        ``mode`` is ``netns``, ``loopback``, or empty for the better one that is possible; ``extra`` are further lines
        of slurm.conf. Timeouts are in seconds; a ``slurmd_timeout`` of less than three times ``message_timeout`` and 3
        more may take healthy nodes for lost beside a dead one: a look at that one takes twice ``message_timeout``, the
        next follows after a third of ``slurmd_timeout``, and 24.11 notes what others answer when a look is over.
        Raises :class:`SandboxError`.
        """
        root = check_directory(Path(directory) if directory else default_directory())
        check_installed()
        spec = lifecycle.plan(
            root,
            lifecycle.choose_mode(mode),
            nodes,
            gpus=gpus,
            cpus=cpus,
            slurmd_timeout=slurmd_timeout,
            message_timeout=message_timeout,
            extra=tuple(extra),
        )
        lifecycle.start(spec, ready_timeout_s)
        return cls(spec)

    @classmethod
    def attach(cls, directory: Path | str | None = None) -> Sandbox:
        """The sandbox that is up in a directory; :class:`SandboxError` when none is, or only the rest of one."""
        spec, ready = files.load(lifecycle.existing(directory))
        if not ready:
            raise SandboxError(
                f"use the sandbox in {spec.root}",
                "its start was interrupted or is under way",
                hint=command(spec.root, "down"),
            )
        return cls(spec)

    @staticmethod
    def clear(directory: Path | str | None = None) -> bool:
        """End whatever sandbox is in a directory, complete or not, without a trace; False when there is none."""
        return lifecycle.clear(lifecycle.existing(directory))

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
        """Inject a fault (see :data:`transom_slurm.sandbox.faults.KINDS`) and say what was done.

        ``node`` is ``hub`` for the faults of slurmctld and transomd.
        """
        self._check_node(node, or_hub=True)
        with files.umask():
            return faults.inject(self.spec, node, kind)

    def heal(self, node: str) -> tuple[str, ...]:
        """Undo the faults of a node, or of the ``hub``, and say what was done. Slurm notices after a while."""
        self._check_node(node, or_hub=True)
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
        watch.stop_controller(self.spec, signal.SIGKILL if kill else signal.SIGTERM)

    def start_controller(self) -> None:
        """Start slurmctld again and return when it answers."""
        watch.start_controller(self.spec, READY_TIMEOUT_S)

    def slurm_states(self) -> dict[str, str]:
        """Slurm's short state of each node (``idle``, ``mix*``, ...); empty when Slurm does not answer."""
        return watch.states(self.spec)

    def wait_idle(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when all nodes are idle; :class:`SandboxError` says which are not, and what the logs complain of."""
        watch.wait_idle(self.spec, timeout_s)

    def reset(self) -> None:
        """Make it as new between tests: no jobs, all nodes healed and resumed. Returns when all are idle for good."""
        self.run(["scancel", *self.run(["squeue", "-h", "-o", "%A"]).stdout.split()], check=False)
        broken = [node for node in self.nodes if len(self.heal(node)) > 1]
        if not until(lambda: not self.run(["squeue", "-h"]).stdout.strip(), 60.0, 0.1):
            raise SandboxError("reset", f"jobs did not end: {self.run(['squeue', '-h']).stdout}")
        # A slurmstepd that was killed has left its tasks behind, and Slurm knows nothing of them.
        left = [pid for node in self.nodes for pid in targets.job_pids(self.spec, node)]
        processes.signal_each(left, signal.SIGKILL)
        for node, word in self.slurm_states().items():
            if word != "idle":
                self.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        self.wait_idle()
        if broken:
            watch.settle(self.spec)

    def status(self) -> tuple[watch.NodeReport, ...]:
        """Each node, as seen from outside."""
        words = watch.states(self.spec)
        return tuple(watch.report(self.spec, node, words.get(node.name, "")) for node in self.spec.nodes)

    def _check_node(self, node: str, *, or_hub: bool = False) -> None:
        if node not in self.nodes and not (or_hub and node == HUB):
            cause = (
                f"there is no such node; there are {self.nodes[0]} to {self.nodes[-1]}{' and hub' if or_hub else ''}"
            )
            raise SandboxMissing(f"use node {node}", cause, hint=command(self.directory, "status"))
