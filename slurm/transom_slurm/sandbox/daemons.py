"""The command lines of a sandbox's daemons, and running them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.scripts import TAG
from transom_slurm.sandbox.waiting import until

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRIPT_TIMEOUT_S = 60.0
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge openssh-server iproute2 util-linux"
_NEEDED = ("slurmctld", "slurmd", "sinfo", "munged", "sshd", "ssh-keygen", "setsid")
_NEEDED_AS_ROOT = ("ip", "mount", "unshare", "nsenter", "setpriv")


def find(program: str) -> str | None:
    """Where a program is, looking where daemons live as well."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def check_installed() -> None:
    """:class:`SandboxError` names every missing program and what to type."""
    missing = [word for word in (*_NEEDED, *(_NEEDED_AS_ROOT if os.geteuid() == 0 else ())) if not find(word)]
    if missing:
        raise SandboxError("start a sandbox", f"not installed: {', '.join(missing)}", hint=INSTALL)


def slurm_version() -> tuple[int, int]:
    """The installed Slurm, as ``(22, 5)``."""
    said = run(["slurmctld", "-V"], "ask for Slurm's version").stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if not found:
        raise SandboxError("ask for Slurm's version", f"slurmctld -V said {said!r}")
    return int(found[1]), int(found[2])


def python() -> str:
    """A Python that every user of the machine can run, for what runs on nodes."""
    system = Path("/usr/bin/python3")
    return str(system) if system.exists() else sys.executable


def daemon_environment(spec: ClusterSpec) -> dict[str, str]:
    """What a daemon sees: nothing of the caller's environment."""
    conf = str(spec.layout.conf)
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "SLURM_CONF": conf, TAG: conf}


def munged(spec: ClusterSpec, name: str, socket: Path) -> list[str]:
    """munged with the sandbox's key."""
    at = spec.layout
    return [
        "munged",
        "--num-threads=2",
        f"--key-file={at.etc}/munge.key",
        f"--socket={socket}",
        f"--pid-file={at.run}/munged.{name}.pid",
        f"--log-file={at.logs}/munged.{name}.log",
        f"--seed-file={at.run}/munged.{name}.seed",
    ]


def slurmctld() -> list[str]:
    """slurmctld; finds its configuration in SLURM_CONF."""
    return ["slurmctld"]


def slurmd(name: str) -> list[str]:
    """slurmd of one node."""
    return ["slurmd", "-N", name]


def sshd(spec: ClusterSpec, name: str) -> list[str]:
    """sshd of one node; it insists on an absolute path."""
    log = spec.layout.logs / f"sshd.{name}.log"
    return [find("sshd") or "/usr/sbin/sshd", "-f", str(spec.layout.node(name).sshd_config), "-E", str(log)]


def run(
    argv: Sequence[str],
    operation: str,
    *,
    text: str | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout_s: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; :class:`SandboxError` with what it said when it fails."""
    full = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"} if env is None else env
    stdin = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, env=full, timeout=timeout_s, check=False, umask=0o022, **stdin
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(operation, f"no answer within {timeout_s:g} s: {' '.join(argv)}") from None
    except OSError as error:
        raise SandboxError(operation, str(error)) from error
    if check and done.returncode:
        raise SandboxError(operation, f"{argv[0]}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done


def spawn(argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    """Start a program that goes on without us; its output goes to the log."""
    with log.open("ab") as out:
        subprocess.run(
            ["setsid", "--fork", *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd="/",
            umask=0o022,
            check=True,
        )


def start_script(spec: ClusterSpec, node: str, script: str, *words: str, says: str) -> None:
    """Start one of the sandbox's scripts on a node or in the hub (``""``), and wait until it says that it is at work.

    Raises SandboxError when it does not: what undoes a fault looks for the script's process, and must find it.
    """
    log = spec.layout.logs / f"{script}.{node or 'hub'}.log"
    log.unlink(missing_ok=True)
    where = [f"{spec.layout.lib}/node", node] if node else [f"{spec.layout.lib}/hub"]
    argv = [*where, python(), "-I", "-S", f"{spec.layout.lib}/{script}", *words]
    spawn(argv, daemon_environment(spec), log)
    if not until(lambda: says in log.read_text(), SCRIPT_TIMEOUT_S):
        raise SandboxError(f"start {script} on {node or 'the hub'}", log.read_text().strip() or "it does not answer")
