"""One command on a node: the line that starts it there, what it has written so far, and how it ended.

A command is a list of words and never meets a shell unquoted. Its process group is killed on the node when its time is
up, by ``timeout`` there, so that a cut cable does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncssh

KILLED = 137
"""What ``timeout -s KILL`` exits with when it had to kill."""
_CHUNK = 1 << 16
_MARK = 64

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


class Session:
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

    async def left(self, patience: float) -> int:
        """The process group that is to be killed on the node; 0: none, or it does not say within so many seconds."""
        if self.closed:
            return 0
        with contextlib.suppress(asyncssh.Error, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._hear_group(), patience)
        return self.group

    async def _hear_group(self) -> None:
        """It may run already while its first words are still on their way."""
        while not self.group and (block := await self.process.stderr.read(_CHUNK)):
            self._err += block

    def result(self, node: str, seconds: float) -> SshResult:
        """The outcome of a command that has ended."""
        out, err = bytes(self._out), _GROUP.sub(b"", bytes(self._err), count=1)
        cut = len(out) > self._limit or len(err) > self._limit
        out_text, err_text = (data[: self._limit].decode("utf-8", "replace") for data in (out, err))
        return SshResult(node, self.status, out_text, err_text, seconds, self._sent, time.time(), cut)


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
