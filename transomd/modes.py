"""Site mode and personal mode: which one a daemon runs in, and what then goes without saying."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from transomd.errors import UsageError
from transomd.places import personal_config, personal_socket, personal_state
from transomd.settings import DEFAULT_PATH, ENV_PATH, Settings, load_settings


def load(path: Path | None = None, env: Mapping[str, str] = os.environ, *, uid: int | None = None) -> Settings:
    """Return the settings of ``path``, else of :func:`site_file`, else the defaults.

    ``daemon.mode`` is settled for ``uid`` (None: this process's). Raises what :func:`load_settings` and :func:`settle`
    raise.
    """
    uid = os.geteuid() if uid is None else uid
    found = path or site_file(env, uid=uid)
    return settle(load_settings(found, env) if found else Settings(), uid, env)


def site_file(env: Mapping[str, str] = os.environ, *, uid: int | None = None) -> Path | None:
    """Return the site file that a daemon of ``uid`` (None: this process's) reads; None where there is none.

    That is the one ``$TRANSOM_CONFIG`` names, else /etc/transom/transomd.toml for root (nobody else may be able to look
    there) and ~/.config/transom/transomd.toml for anybody else.
    """
    if named := env.get(ENV_PATH):
        return Path(named)
    usual = personal_config(env) if (os.geteuid() if uid is None else uid) else DEFAULT_PATH
    return usual if usual.exists() else None


def settle(settings: Settings, uid: int, env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings with the mode of a daemon that runs as ``uid``, and that mode's defaults.

    A personal daemon has its owner as its one administrator, logs in to nodes as the owner, and drains nothing. Raises
    UsageError for site mode without root.
    """
    mode = settings.daemon.mode
    if mode == "site" and uid:
        hint = 'start it as root, or leave "mode" out'
        raise UsageError("daemon.mode: site mode needs root on the head node", hint=hint)
    if mode == "site" or (mode == "auto" and not uid):
        return settings.model_copy(update={"daemon": settings.daemon.model_copy(update={"mode": "site"})})
    name = user_name(uid)
    usual = {"socket": str(personal_socket(env)), "state_dir": str(personal_state(env)), "listen": ":0"}
    open_ones = {key: value for key, value in usual.items() if key not in settings.daemon.model_fields_set}
    ssh = {} if "user" in settings.ssh.model_fields_set else {"user": name}
    daemon = {**open_ones, "mode": "personal", "admins": (name,)}
    return settings.model_copy(
        update={
            "daemon": settings.daemon.model_copy(update=daemon),
            "ssh": settings.ssh.model_copy(update=ssh),
            "drain": settings.drain.model_copy(update={"enabled": False}),
        }
    )


def user_name(uid: int) -> str:
    """Return the login name of a uid, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
