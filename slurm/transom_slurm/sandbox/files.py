"""Writing a sandbox's directory, and removing it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from transom_slurm.sandbox import config, gpus, scripts
from transom_slurm.sandbox.config import ClusterSpec, NodeSpec
from transom_slurm.sandbox.daemons import python, run
from transom_slurm.sandbox.errors import SandboxError, SandboxMissing, SandboxRefused
from transom_slurm.sandbox.layout import Layout, command
from transom_slurm.sandbox.site import transomd_toml

_NULL_DEVICE = os.makedev(1, 3)


def claim(spec: ClusterSpec) -> None:
    """Make the directory and mark it as a sandbox's; :class:`SandboxError` when it is somebody's already."""
    at = spec.layout
    at.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    about = at.root.stat()
    if about.st_uid != os.geteuid():
        raise SandboxRefused(f"use {at.root} for a sandbox", "another user owns it", hint="choose another with --dir")
    if at.marker.exists():
        raise SandboxError(f"start a sandbox in {at.root}", "one is there", hint=command(at.root, "down"))
    if any(at.root.iterdir()):
        raise SandboxError(f"use {at.root} for a sandbox", "it is not empty", hint="choose another with --dir")
    at.root.chmod(0o755)
    save(spec, ready=False)


def save(spec: ClusterSpec, *, ready: bool) -> None:
    """Write the marker."""
    about = {**asdict(spec), "root": str(spec.root), "ready": ready}
    new = spec.layout.marker.with_suffix(".new")
    new.write_text(json.dumps(about, indent=1))
    os.replace(new, spec.layout.marker)


def load(root: Path) -> tuple[ClusterSpec, bool]:
    """The sandbox in a directory and whether it came up completely; :class:`SandboxError` when there is none."""
    try:
        about: dict[str, Any] = json.loads((root / Layout(root).marker.name).read_text())
    except FileNotFoundError:
        raise SandboxMissing(f"find a sandbox in {root}", "nothing is up", hint=command(root, "up")) from None
    ready = bool(about.pop("ready"))
    about["nodes"] = tuple(NodeSpec(**node) for node in about["nodes"])
    about["slurm_version"] = tuple(about["slurm_version"])
    about["extra"] = tuple(about["extra"])
    return ClusterSpec(**{**about, "root": root}), ready


def write_all(spec: ClusterSpec) -> None:
    """Write everything that the daemons need."""
    at = spec.layout
    for directory in (at.etc, at.bin, at.lib, at.run, at.logs, at.hub.root, at.root / "state", at.root / "dev"):
        directory.mkdir(mode=0o755, exist_ok=True)
    _write(at.conf, config.slurm_conf(spec))
    _write(at.etc / "gres.conf", config.gres_conf(spec))
    _write(at.etc / "cgroup.conf", config.cgroup_conf(spec))
    _write(at.etc / "hosts", config.hosts(spec))
    _write(at.site, transomd_toml(spec))
    _write(at.etc / "shadow", config.shadow(user.pw_name for user in pwd.getpwall()), 0o600)
    _write_secret(at.etc / "munge.key", secrets.token_bytes(128))
    _write_scripts(spec)
    for index in range(spec.gpus):
        _device(at.root / "dev" / f"nvidia{index}")
    for name in spec.names:
        _write_node(spec, name)
    _write_ssh(spec)


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)


def _write_secret(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
        file.write(data)


def _write_scripts(spec: ClusterSpec) -> None:
    at, own_bin = spec.layout, str(Path(sys.executable).parent)
    _write(at.lib / "hub", scripts.hub_script(spec, own_bin), 0o755)
    _write(at.lib / "node", scripts.node_script(spec, own_bin), 0o755)
    for word in scripts.HUB_WORDS:
        _write(at.bin / word, scripts.wrapper(spec, word), 0o755)
    _write(at.bin / "transom", scripts.transom_wrapper(spec, own_bin), 0o755)
    (at.lib / "simulated").mkdir(mode=0o755, exist_ok=True)
    for word in ("nvidia-smi", "dmesg"):
        _write(at.lib / "simulated" / word, scripts.dispatcher(spec, word), 0o755)
    for name in ("node_init.py", "nvidia_smi.py", "dmesg.py", "duty.py", "dead_mount.py", "hold_db.py"):
        _write(at.lib / name, (files("transom_slurm.sandbox.simulated") / name).read_text())


def _device(path: Path) -> None:
    """A device file for gres.conf: a null device as root, else a plain file, about which slurmd grumbles in its log."""
    if os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, _NULL_DEVICE)
    else:
        path.touch()


def _write_node(spec: ClusterSpec, name: str) -> None:
    at, own = spec.layout, spec.layout.node(name)
    for directory in (own.root, own.bin, own.log, own.root / "spool"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    for word, script, state in (("nvidia-smi", "nvidia_smi.py", own.gpus), ("dmesg", "dmesg.py", own.kern_log)):
        _write(own.bin / word, scripts.simulated_wrapper(python(), str(at.lib / script), str(state)), 0o755)
    gpus.boot(own, name, spec.gpus)


def _write_ssh(spec: ClusterSpec) -> None:
    at = spec.layout
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "transom-sandbox", "-f"]
    run([*keygen, str(at.etc / "id_ed25519")], "make an SSH key")
    _write(at.etc / "authorized_keys", (at.etc / "id_ed25519.pub").read_text())
    public = {}
    for node in spec.nodes:
        own = at.node(node.name)
        run([*keygen, str(own.host_key)], f"make a host key for {node.name}")
        public[node.name] = Path(f"{own.host_key}.pub").read_text()
        _write(own.sshd_config, config.sshd_config(spec, node))
    _write(at.etc / "known_hosts", config.known_hosts(spec, public))
    _write(at.etc / "ssh_config", config.ssh_config(spec))


def remove(root: Path) -> None:
    """Remove the directory, the marker last, so that an interrupted removal can be taken up again."""
    at = Layout(root)
    for entry in sorted(root.iterdir()):
        if entry == at.marker:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    at.marker.unlink(missing_ok=True)
    root.rmdir()


@contextlib.contextmanager
def umask() -> Iterator[None]:
    """Let new files be readable by the jobs of every user, whatever the caller's umask."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)
