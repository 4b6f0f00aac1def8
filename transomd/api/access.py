"""Who asks, and what they may: SO_PEERCRED on the Unix socket, a munge credential over TCP, administrators by uid."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import pwd
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from aiohttp import web
from transom_slurm.runner import CommandError, CommandNotStarted, Runner, clean_env, run

from transomd.api import munge
from transomd.api.limits import Buckets
from transomd.errors import RefusedError, UnreachableError
from transomd.modes import user_name
from transomd.settings import Settings

log = logging.getLogger("transom.api")

UNMUNGE_AT_ONCE = 8
REQUESTS_PER_S, REQUESTS_AT_ONCE = 50.0, 500.0
"""What one user who is no administrator may ask: on the average, and in a burst."""
MAX_WAITING = 64
"""Requests of one user that are being answered at a time, long polls included."""


def peer_uid(request: web.Request) -> int | None:
    """Return the uid of the process at the other end of the Unix socket (SO_PEERCRED); None over TCP."""
    transport = request.transport
    sock: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", raw)[1]
    return uid


class Access:
    """Settles who sent a request before anything of it is read, and what they may."""

    def __init__(
        self, settings: Settings, *, runner: Runner = run, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._personal = settings.personal
        self._admins = frozenset({0, os.geteuid(), *_uids(settings.daemon.admins)})
        self._runner = runner
        self._slots = asyncio.Semaphore(UNMUNGE_AT_ONCE)
        self._buckets = Buckets(REQUESTS_PER_S, REQUESTS_AT_ONCE, clock)
        self._answering: Counter[int] = Counter()

    def use(self, settings: Settings) -> None:
        """Go on with other administrators."""
        self._admins = frozenset({0, os.geteuid(), *_uids(settings.daemon.admins)})

    def admin(self, uid: int) -> bool:
        """Whether a user administers this transom."""
        return uid in self._admins

    @contextlib.asynccontextmanager
    async def entered(self, request: web.Request) -> AsyncIterator[int]:
        """The uid of the sender, while the request is answered. Raises RefusedError or UnreachableError."""
        uid = peer_uid(request)
        if uid is None:
            uid = await self._vouched(request)
        if self._personal and uid not in (0, os.geteuid()):
            owner = user_name(os.geteuid())
            raise RefusedError(f"this transomd is {owner}'s own", hint="start one of your own: transomd")
        if not self.admin(uid) and (self._answering[uid] >= MAX_WAITING or not self._buckets.take(uid)):
            raise UnreachableError("you ask too much at once", hint="wait a second and ask again")
        self._answering[uid] += 1
        try:
            yield uid
        finally:
            self._answering[uid] -= 1
            if not self._answering[uid]:
                del self._answering[uid]

    async def _vouched(self, request: web.Request) -> int:
        """Ask munged who made the credential of a request, then read the request and compare."""
        credential = munge.read_header(request.headers.get("Authorization", ""))
        async with self._slots:
            try:
                done = await self._runner(munge.UNMUNGE, stdin=credential, env=clean_env(), timeout=munge.TIMEOUT_S)
            except CommandNotStarted:
                raise RefusedError("requests over TCP need munge on the head node", hint="use the socket") from None
            except CommandError as error:
                raise UnreachableError(f"munged does not answer: {error.cause}", hint="munge -n | unmunge") from None
        sender = munge.read_metadata(done.rc, done.stdout)
        expected = munge.digest(request.method, request.raw_path, await request.read())
        if not hmac.compare_digest(expected.encode(), sender.payload.encode("utf-8", "replace")):
            log.warning("a munge credential of uid %d was shown for another request than it was made for", sender.uid)
            raise RefusedError("the munge credential was made for another request")
        return sender.uid


def _uids(names: Iterable[str]) -> Iterator[int]:
    """The administrators' uids; looked up once, since a name service may be slow, and names may be given anew."""
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except KeyError:
            log.warning("daemon.admins: there is no user %s", name)
