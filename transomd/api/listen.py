"""The daemon's sockets: one of the file system for users, one of the network for launchers and users elsewhere."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from aiohttp import web

from transomd.api.binding import listening
from transomd.api.server import Api
from transomd.errors import TransomError
from transomd.settings import Settings


class Server:
    """The listening sockets. A site's socket file is for everybody: who may do what is decided by SO_PEERCRED."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._runner = web.AppRunner(api.app, access_log=None, shutdown_timeout=1.0)
        self._settings = settings
        self._bound: tuple[int, int] | None = None

    async def start(self, port: int) -> None:
        """Listen for launchers on TCP (where the site file says so) and for users on the Unix socket.

        Raises TransomError for an address or a socket that cannot be had.
        """
        await self._runner.setup()
        where = self._settings.daemon.listen_address
        if where is not None:
            with listening("listen", (where[0], port)):
                await web.TCPSite(self._runner, where[0] or None, port).start()
        await self._start_unix()

    async def _start_unix(self) -> None:
        path = Path(self._settings.daemon.socket)
        try:
            self._make_folder(path.parent)
            _clear(path)
            await web.UnixSite(self._runner, str(path)).start()
            self._bound = _identity(path)
            path.chmod(0o600 if self._settings.personal else 0o666)
        except OSError as error:
            cause = error.strerror or str(error)
            raise TransomError(f"listening on {path} (daemon.socket): {cause}", hint=f"ls -ld {path.parent}") from error

    def _make_folder(self, folder: Path) -> None:
        """Make the socket's folder where there is none: for the owner alone, or for everybody to pass."""
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o700 if self._settings.personal else 0o755)

    async def close(self) -> None:
        """Stop listening. What is at the socket's path and is not ours stays: it may be another daemon's."""
        path = Path(self._settings.daemon.socket)
        if self._bound is not None and _identity(path) == self._bound:
            path.unlink(missing_ok=True)
        await self._runner.cleanup()


def _clear(path: Path) -> None:
    """Remove the socket of a daemon that is dead; raise TransomError for anything else that is in the way."""
    if not os.path.lexists(path):
        return
    doing = f"listening on {path} (daemon.socket)"
    if not path.is_socket():
        raise TransomError(f"{doing}: what is there is no socket, and is left alone", hint=f"ls -ld {path}")
    if _served(path):
        raise TransomError(f"{doing}: another transomd serves it", hint=f"transom --socket {path} status")
    path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
