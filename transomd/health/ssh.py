"""Connections to nodes over SSH: bounded, with deadlines, host keys always checked.

One connection a node is kept and shared; what runs over it is a :mod:`session`. A command that its caller gives up is
killed on the node, which takes a session of its own: sshd passes no signals on in a session of root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from transomd.health.session import KILLED, Session, SshResult, command_line
from transomd.health.sshfailure import SshFailure, failure_of, host_key_failure

_GRACE = 2.0
"""Seconds beyond a command's own deadline before the connection's silence counts as the deadline passed."""
_KEEPALIVE = 5.0
_SESSIONS = 8
"""Sessions at once on one connection; sshd's MaxSessions is 10 unless a site lowers it."""
_SESSION_S, _AGAIN_S = 2.0, 0.05
"""How long a session that sshd refuses is asked for again: what has ended here may not have ended there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How nodes are reached. ``None`` leaves a choice to ``config`` and to OpenSSH's defaults; times in seconds."""

    known_hosts: Path = Path("~/.ssh/known_hosts")
    """Nodes' host keys. They are always checked: nothing turns that off."""
    config: Path | None = None
    """An OpenSSH client configuration; none is read unless named."""
    client_keys: tuple[Path, ...] = ()
    user: str | None = None
    connect_timeout: float = 5.0
    fan_out: int = 64
    """Commands at once."""
    keep: int = 256
    """Connections kept open between commands."""
    output_limit: int = 1 << 20
    """Bytes kept of each stream of one command; the rest is read and dropped."""


class _Client(asyncssh.SSHClient):
    """Trusts no key that is not in the known hosts, and remembers for whom one was missing."""

    asked: tuple[str, str, int] | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Refuse; asyncssh asks only for keys that the known hosts do not hold."""
        self.asked = (host, addr, port)
        return False


class _Node:
    """What the pool holds for one node: its connection, who may make it, and how many sessions may be open on it."""

    def __init__(self) -> None:
        self.connecting = asyncio.Lock()
        self.sessions = asyncio.Semaphore(_SESSIONS)
        self.connection: asyncssh.SSHClientConnection | None = None
        self.commands = 0

    def usable(self) -> asyncssh.SSHClientConnection | None:
        """The connection, if it is not known to be closed."""
        return None if self.connection is None or self.connection.is_closed() else self.connection

    def drop(self, connection: asyncssh.SSHClientConnection) -> None:
        """Give up a connection and all that runs over it; the next command makes a new one."""
        connection.abort()
        if self.connection is connection:
            self.connection = None


class SshPool:
    """Connections to nodes, shared by everything that runs on them. Close it when done (``async with``)."""

    def __init__(self, settings: SshSettings) -> None:
        self._settings = settings
        self._known_hosts = settings.known_hosts.expanduser()
        self._slots = asyncio.Semaphore(settings.fan_out)
        self._nodes: dict[str, _Node] = {}
        self._connected: set[str] = set()
        """Nodes with a connection, which may have died meanwhile."""

    async def __aenter__(self) -> SshPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return sum(held.usable() is not None for held in self._nodes.values())

    async def close(self) -> None:
        """Close every connection, and with it what runs over it; does not wait for a node that does not answer."""
        held = [node for node in self._nodes.values() if node.connection is not None]
        connections = [node.connection for node in held if node.connection is not None]
        for node, connection in zip(held, connections, strict=True):
            node.drop(connection)
        await asyncio.gather(*(connection.wait_closed() for connection in connections), return_exceptions=True)

    async def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        stdin: str | bytes | None = None,
        timeout: float,
        user: str | None = None,
        together: bool = False,
    ) -> SshResult:
        """Run one command and return how it ended; raises SshFailure.

        ``timeout`` bounds the command, not the wait for a free slot nor the connecting (``connect_timeout``). With
        ``user`` it runs with that user's uid, gid and groups, in ``/``, with a clean environment; root is refused.
        A command that waits for others (``together``) keeps no slot once it is started: it would wait for ever.
        """
        line = command_line(argv, timeout, user)
        data = stdin.encode() if isinstance(stdin, str) else stdin
        held = self._nodes.setdefault(node, _Node())
        async with self._use(node, held):
            if together:
                async with self._slots:
                    running = await self._start(node, held, line)
                return await self._attend(node, held, running, data, timeout)
            async with self._slots:
                running = await self._start(node, held, line)
                return await self._attend(node, held, running, data, timeout)

    @contextlib.asynccontextmanager
    async def _use(self, node: str, held: _Node) -> AsyncIterator[None]:
        """One session on a node; its connection is closed afterwards when enough others are kept."""
        held.commands += 1
        try:
            async with held.sessions:
                yield
        finally:
            held.commands -= 1
            if not held.commands and held.connection and len(self._connected) > self._settings.keep:
                held.drop(held.connection)
                self._connected.discard(node)

    async def _attend(self, node: str, held: _Node, running: Session, stdin: bytes | None, timeout: float) -> SshResult:
        """See a command through to its end, and leave nothing of it on the node."""
        try:
            return await self._finish(node, held, running, stdin, timeout)
        finally:
            await self._end(held, running)

    async def _end(self, held: _Node, running: Session) -> None:
        """Kill a command that is given up. What cannot be reached is left to ``timeout`` on the node."""
        try:
            group = await running.left(_GRACE)
        finally:
            running.process.close()
        connection = held.usable()
        if connection is not None and group:
            with contextlib.suppress(asyncssh.Error, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(connection.run(f"kill -KILL -- -{group}"), _GRACE)

    async def _start(self, node: str, held: _Node, line: str) -> Session:
        """Open a session; a kept connection that turns out to be dead is replaced once, unless others still use it."""
        kept = held.usable()
        try:
            if kept is not None:
                try:
                    return await self._open(kept, line)
                except (asyncssh.Error, OSError, asyncio.TimeoutError) as exc:
                    answered = isinstance(exc, asyncssh.ChannelOpenError)
                    if not kept.is_closed() and (answered or held.commands > 1):
                        raise
                    held.drop(kept)
            return await self._open(await self._connect(node, held), line)
        except (asyncssh.Error, OSError, ValueError, asyncio.TimeoutError) as exc:
            raise failure_of(node, exc, self._settings.connect_timeout) from exc

    async def _open(self, connection: asyncssh.SSHClientConnection, line: str) -> Session:
        end = time.monotonic() + min(_SESSION_S, self._settings.connect_timeout)
        while True:
            opening = connection.create_process(line, encoding=None)
            try:
                process = await asyncio.wait_for(opening, self._settings.connect_timeout)
            except asyncssh.ChannelOpenError:
                if connection.is_closed() or time.monotonic() > end:
                    raise
                await asyncio.sleep(_AGAIN_S)
            else:
                return Session(connection, process, self._settings.output_limit)

    async def _connect(self, node: str, held: _Node) -> asyncssh.SSHClientConnection:
        async with held.connecting:
            connection = held.usable()
            if connection is None:
                connection = held.connection = await self._login(node)
                self._connected.add(node)
            return connection

    async def _login(self, node: str) -> asyncssh.SSHClientConnection:
        client = _Client()
        connecting = asyncssh.connect(node, client_factory=lambda: client, **self._options(node))
        try:
            return await asyncio.wait_for(connecting, self._settings.connect_timeout)
        except asyncssh.HostKeyNotVerifiable as exc:
            file, asked = self._known_hosts, client.asked
            known = asked is not None and any(asyncssh.match_known_hosts(str(file), *asked)[:2])
            raise host_key_failure(node, str(exc), file, known) from exc

    def _options(self, node: str) -> dict[str, Any]:
        """What asyncssh is told. The host keys are always passed, so that no configuration can leave them unchecked."""
        chosen = self._settings
        if not os.access(self._known_hosts, os.R_OK):
            cause = f"cannot read the known hosts {self._known_hosts}"
            raise SshFailure(node, "host-key", cause, hint=f"ssh-keyscan {node} >> {self._known_hosts}")
        options: dict[str, Any] = {
            "known_hosts": str(self._known_hosts),
            "config": None if chosen.config is None else [str(chosen.config.expanduser())],
            "keepalive_interval": _KEEPALIVE,
            "keepalive_count_max": 2,
        }
        if chosen.client_keys:
            options["client_keys"] = [str(key.expanduser()) for key in chosen.client_keys]
        if chosen.user is not None:
            options["username"] = chosen.user
        return options

    async def _finish(self, node: str, held: _Node, running: Session, stdin: bytes | None, timeout: float) -> SshResult:
        """Wait for the end of a command; a connection that broke is given up."""
        began = time.monotonic()
        try:
            await asyncio.wait_for(running.collect(stdin), timeout + _GRACE)
        except asyncio.TimeoutError:
            raise SshFailure(node, "timeout", f"the command did not end within {timeout:g} s") from None
        except (asyncssh.Error, OSError) as exc:
            held.drop(running.connection)
            raise failure_of(node, exc, self._settings.connect_timeout) from exc
        seconds = time.monotonic() - began
        if running.status == KILLED and seconds >= timeout:
            raise SshFailure(node, "timeout", f"the command was killed after {timeout:g} s")
        if not running.ended:
            held.drop(running.connection)
            raise SshFailure(node, "unreachable", "the connection was lost while the command ran")
        return running.result(node, seconds)
