"""Run commands on nodes over SSH: bounded, with deadlines, host keys always checked.

One connection a node is kept and shared. A command is a list of words and never meets a shell unquoted. Its process
group is killed on the node when its time is up (by ``timeout`` there, so that a cut cable does not matter), and
when the caller gives up. The latter takes a session of its own: sshd passes no signals on in a session of root's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import asyncssh

from transomd.errors import TransomError

FailureKind = Literal["refused", "unreachable", "timeout", "host-key", "auth", "other"]

KILLED = 137
"""What ``timeout -s KILL`` exits with when it had to kill."""
_GRACE = 2.0
"""Seconds beyond a command's own deadline before the connection's silence counts as the deadline passed."""
_CHUNK = 1 << 16
_KEEPALIVE = 5.0
_MARK = 64
_SESSIONS = 8
"""Sessions at once on one connection; sshd's MaxSessions is 10 unless a site lowers it."""
_SESSION_S, _AGAIN_S = 2.0, 0.05
"""How long a session that sshd refuses is asked for again: what has ended here may not have ended there yet."""

_Process = asyncssh.SSHClientProcess[bytes]

_AS_ITSELF = 'echo "transom-group:$$" >&2; exec timeout -s KILL "$@"'
"""$1 seconds, then the command. The first line on standard error says which process group it is."""

_GROUP = re.compile(rb"^transom-group:(\d+)\n", re.MULTILINE)

_AS_USER = """\
echo "transom-group:$$" >&2
uid=$(id -u -- "$1") && gid=$(id -g -- "$1") || exit 126
[ "$uid" -ne 0 ] || { echo "refused: $1 is root" >&2; exit 126; }
home=$(getent passwd "$uid" | cut -d: -f6)
user=$1; seconds=$2; shift 2; cd /; ulimit -l unlimited 2>/dev/null
exec timeout -s KILL "$seconds" setpriv --reuid "$uid" --regid "$gid" --init-groups --inh-caps=-all -- \
env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 USER="$user" LOGNAME="$user" HOME="${home:-/}" SHELL=/bin/sh "$@"
"""
"""$1 user, $2 seconds, then the command. timeout keeps root's rights, so that the user cannot stop it. Locked memory is
not limited, as under Slurm: InfiniBand needs it."""


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


@dataclass(frozen=True, slots=True)
class SshResult:
    """A command that ended. ``rc`` is its exit status, 128 plus the number for a signal (-1 if not known)."""

    node: str
    rc: int
    stdout: str
    stderr: str
    seconds: float
    sent: float
    """When standard input was sent, after the command's shell had said that it runs: the caller's clock."""
    ended: float
    truncated: bool = False


class SshFailure(TransomError):
    """A command could not be run on a node, or did not end in time. Says nothing about the node's health."""

    def __init__(self, node: str, kind: FailureKind, cause: str, *, hint: str = "") -> None:
        super().__init__(f"ssh {node}: {cause}", hint=hint)
        self.node = node
        self.kind: FailureKind = kind


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


class _Running:
    """A command under way, and what it has written so far."""

    def __init__(self, connection: asyncssh.SSHClientConnection, process: _Process, limit: int) -> None:
        self.connection = connection
        self.process = process
        self.closed = False
        """Whether its session came to its end, with nothing left that holds its output."""
        self._limit = limit
        self._out, self._err = bytearray(), bytearray()
        self._runs = asyncio.Event()
        self._sent = time.time()

    @property
    def ended(self) -> bool:
        """Whether the node said how it ended."""
        return self.process.returncode is not None

    @property
    def status(self) -> int:
        """Exit status, 128 plus the signal, or -1 when neither was told."""
        code = self.process.returncode
        if code is None:
            return -1
        return code if code >= 0 else 128 - code

    @property
    def group(self) -> int:
        """Its process group on the node; 0 while it has not said so."""
        found = _GROUP.search(self._err)
        return int(found.group(1)) if found else 0

    async def collect(self, stdin: bytes | None) -> None:
        """Feed it and read both of its streams to their ends."""
        feeding = asyncio.ensure_future(self._feed(stdin))
        try:
            await asyncio.gather(self._read(self.process.stdout, self._out), self._read(self.process.stderr, self._err))
            await self.process.wait_closed()
            self.closed = True
        finally:
            feeding.cancel()

    async def _feed(self, stdin: bytes | None) -> None:
        """Write standard input and close it, once the shell runs; a command that does not want it is no error."""
        await self._runs.wait()
        self._sent = time.time()
        with contextlib.suppress(OSError, asyncssh.Error):
            if stdin:
                self.process.stdin.write(stdin)
                await self.process.stdin.drain()
            self.process.stdin.write_eof()

    async def _read(self, stream: asyncssh.SSHReader[bytes], kept: bytearray) -> None:
        """A stream to its end; what is over the limit is dropped, but for enough to tell that there was more."""
        while block := await stream.read(_CHUNK):
            kept += block[: max(0, self._limit + _MARK - len(kept))]
            if not self._runs.is_set() and self.group:
                self._runs.set()

    def result(self, node: str, seconds: float) -> SshResult:
        """The outcome of a command that has ended."""
        out, err = bytes(self._out), _GROUP.sub(b"", bytes(self._err), count=1)
        cut = len(out) > self._limit or len(err) > self._limit
        out_text, err_text = (data[: self._limit].decode("utf-8", "replace") for data in (out, err))
        return SshResult(node, self.status, out_text, err_text, seconds, self._sent, time.time(), cut)


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

    async def _attend(
        self, node: str, held: _Node, running: _Running, stdin: bytes | None, timeout: float
    ) -> SshResult:
        """See a command through to its end, and leave nothing of it on the node."""
        try:
            return await self._finish(node, held, running, stdin, timeout)
        finally:
            running.process.close()
            if not running.closed:
                await self._kill(held, running)

    async def _kill(self, held: _Node, running: _Running) -> None:
        """Kill a command that is given up. What cannot be reached is left to ``timeout`` on the node."""
        connection, group = held.usable(), running.group
        if connection is not None and group:
            with contextlib.suppress(asyncssh.Error, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(connection.run(f"kill -KILL -- -{group}"), _GRACE)

    async def _start(self, node: str, held: _Node, line: str) -> _Running:
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
            raise self._failure(node, exc) from exc

    async def _open(self, connection: asyncssh.SSHClientConnection, line: str) -> _Running:
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
                return _Running(connection, process, self._settings.output_limit)

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
            raise self._host_key(node, str(exc), client.asked) from exc

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

    async def _finish(
        self, node: str, held: _Node, running: _Running, stdin: bytes | None, timeout: float
    ) -> SshResult:
        """Wait for the end of a command; a connection that broke is given up."""
        began = time.monotonic()
        try:
            await asyncio.wait_for(running.collect(stdin), timeout + _GRACE)
        except asyncio.TimeoutError:
            raise SshFailure(node, "timeout", f"the command did not end within {timeout:g} s") from None
        except (asyncssh.Error, OSError) as exc:
            held.drop(running.connection)
            raise self._failure(node, exc) from exc
        seconds = time.monotonic() - began
        if running.status == KILLED and seconds >= timeout:
            raise SshFailure(node, "timeout", f"the command was killed after {timeout:g} s")
        if not running.ended:
            held.drop(running.connection)
            raise SshFailure(node, "unreachable", "the connection was lost while the command ran")
        return running.result(node, seconds)

    def _failure(self, node: str, exc: BaseException) -> SshFailure:
        """What an exception means, and what to do about it."""
        if isinstance(exc, asyncssh.PermissionDenied):
            return SshFailure(node, "auth", f"the node refused the login: {exc}", hint=f"ssh -v {node} true")
        if isinstance(exc, FileNotFoundError | PermissionError):
            return SshFailure(node, "auth", f"cannot use {exc.filename}: {exc.strerror}")
        hint = f"ssh {node} true"
        if isinstance(exc, ConnectionRefusedError):
            return SshFailure(node, "refused", "connection refused: no sshd listens there", hint=hint)
        if isinstance(exc, asyncio.TimeoutError) and not getattr(exc, "errno", None):
            return SshFailure(node, "unreachable", f"no answer after {self._settings.connect_timeout:g} s", hint=hint)
        if isinstance(exc, asyncssh.ChannelOpenError):
            return SshFailure(node, "other", f"the node opens no session: {exc}", hint=hint)
        if isinstance(exc, OSError | asyncssh.ConnectionLost):
            return SshFailure(node, "unreachable", str(exc) or type(exc).__name__, hint=hint)
        return SshFailure(node, "other", f"{type(exc).__name__}: {exc}", hint=hint)

    def _host_key(self, node: str, cause: str, asked: tuple[str, str, int] | None) -> SshFailure:
        """Unknown and changed keys need different answers; both name the file."""
        file = self._known_hosts
        known = asked is not None and any(asyncssh.match_known_hosts(str(file), *asked)[:2])
        if known:
            hint = f"if the node was installed anew: ssh-keygen -R {node} -f {file}; ssh-keyscan {node} >> {file}"
            return SshFailure(node, "host-key", f"its host key is not the one in {file}: {cause}", hint=hint)
        hint = f"ssh-keyscan {node} >> {file}, then compare the fingerprint with the node's own"
        return SshFailure(node, "host-key", f"its host key is not in {file}: {cause}", hint=hint)


def command_line(argv: Sequence[str], timeout: float, user: str | None) -> str:
    """The line for the node's login shell: every word quoted, under ``timeout``, as ``user`` if one is given.

    Raises ValueError for what no command line can hold.
    """
    words = [str(word) for word in argv]
    if not words or any("\0" in word for word in words):
        raise ValueError(f"no command line: {words!r}")
    seconds = f"{timeout:.3f}"
    if user is None:
        return shlex.join(["exec", "/bin/sh", "-c", _AS_ITSELF, "sh", seconds, *words])
    if not user or user.startswith("-") or "\0" in user or user == "root":
        raise ValueError(f"not a user to run a command as: {user!r}")
    return shlex.join(["exec", "/bin/sh", "-c", _AS_USER, "sh", user, seconds, *words])
