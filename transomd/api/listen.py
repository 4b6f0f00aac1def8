"""The daemon's sockets: one of the file system for users, one of the network for launchers and users elsewhere."""

from __future__ import annotations

import socket
from pathlib import Path

from aiohttp import web

from transomd.api.server import Api
from transomd.errors import TransomError
from transomd.settings import Settings


class Server:
    """The listening sockets. A site's socket file is for everybody: who may do what is decided by SO_PEERCRED."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._runner = web.AppRunner(api.app, access_log=None, shutdown_timeout=1.0)
        self._settings = settings

    async def start(self, port: int) -> None:
        """Listen for launchers on TCP (where the site file says so) and for users on the Unix socket."""
        await self._runner.setup()
        where = self._settings.daemon.listen_address
        if where is not None:
            await web.TCPSite(self._runner, where[0] or None, port).start()
        await self._start_unix()

    async def _start_unix(self) -> None:
        path = Path(self._settings.daemon.socket)
        self._make_folder(path.parent)
        if path.is_socket() and not _served(path):
            path.unlink()
        elif path.exists():
            raise TransomError(
                f"listening on {path}: another transomd serves it", hint=f"transom --socket {path} status"
            )
        await web.UnixSite(self._runner, str(path)).start()
        path.chmod(0o600 if self._settings.personal else 0o666)

    def _make_folder(self, folder: Path) -> None:
        """Make the socket's folder where there is none: for the owner alone, or for everybody to pass."""
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(0o700 if self._settings.personal else 0o755)

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()
        Path(self._settings.daemon.socket).unlink(missing_ok=True)


def _served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
