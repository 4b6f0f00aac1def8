"""Write the hooks' folder, ready to be copied to every node: programs, probe, configuration and key."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOOK = Path(__file__).with_name("hook.py")
KINDS = ("prolog", "epilog", "healthcheck")
SPOOL = "/run/transom-hooks"
"""Where a node keeps what it could not tell: in memory, because what was so before a boot matters no more."""
PARTS: Mapping[str, frozenset[str] | None] = {
    "prolog": frozenset({"gpus", "kernel", "disk", "mounts", "memory", "host"}),
    "epilog": frozenset({"gpus", "kernel", "processes", "host"}),
    "healthcheck": None,
}
"""The probe's parts that each hook runs (None: all that the site's checks need): a prolog must be quick."""


def configuration(url: str, request: Mapping[str, Any], spool: str = SPOOL) -> dict[str, Any]:
    """Return ``hooks.json``: where transomd is, and what the probe is asked by each hook."""
    asked = {kind: _asked(kind, request) for kind in KINDS}
    return {"version": 1, "url": url, "spool": spool, "probe": asked}


def _asked(kind: str, request: Mapping[str, Any]) -> dict[str, Any]:
    parts = PARTS[kind]
    return {**request, "parts": [part for part in request["parts"] if parts is None or part in parts]}


def make_key(path: Path) -> str:
    """Return the key that hooks and transomd share; made, with mode 0600, where there is none yet. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    key = secrets.token_hex(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
    return key


def install(folder: Path, probe: bytes, config: Mapping[str, Any], key: str) -> list[Path]:
    """Write the folder, each file whole or not at all, and return the files. Raises OSError.

    A hook that Slurm starts meanwhile finds either the old or the new file under each name.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    text = json.dumps(config, indent=1, sort_keys=True).encode() + b"\n"
    files = [("hooks.key", key.encode() + b"\n", 0o600), ("hooks.json", text, 0o644), ("probe.py", probe, 0o755)]
    files += [(kind, HOOK.read_bytes(), 0o755) for kind in KINDS]
    return [_write(folder / name, data, mode) for name, data, mode in files]


def _write(path: Path, data: bytes, mode: int) -> Path:
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
    os.replace(part, path)
    return path


def slurm_conf(folder: Path) -> str:
    """Return the lines for slurm.conf."""
    return (
        f"Prolog={folder}/prolog\nEpilog={folder}/epilog\nHealthCheckProgram={folder}/healthcheck\n"
        "HealthCheckInterval=300\nHealthCheckNodeState=ANY,CYCLE\nPrologFlags=Alloc\n"
    )
