"""Where things lie by default, for a site and for a user who runs a transomd of their own. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SITE_SOCKET = "/run/transom/transomd.sock"
SITE_STATE = "/var/lib/transom"
SITE_CONFIG = Path("/etc/transom/transomd.toml")


def personal_config(env: Mapping[str, str] = os.environ) -> Path:
    """Return where a user's own site file lies: ``~/.config/transom/transomd.toml``."""
    return _below(env, "XDG_CONFIG_HOME", ".config") / "transom" / "transomd.toml"


def personal_state(env: Mapping[str, str] = os.environ) -> Path:
    """Return the state directory of a user's own daemon: ``~/.local/state/transom``."""
    return _below(env, "XDG_STATE_HOME", ".local/state") / "transom"


def personal_socket(env: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of a user's own daemon: below ``$XDG_RUNTIME_DIR``, or in its state directory."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "transom" if runtime.startswith("/") else personal_state(env)
    return folder / "transomd.sock"


def _below(env: Mapping[str, str], name: str, usual: str) -> Path:
    """A folder of the XDG base directory specification; a relative value counts as none."""
    given = env.get(name, "")
    return Path(given) if given.startswith("/") else Path(env.get("HOME") or os.path.expanduser("~")) / usual
