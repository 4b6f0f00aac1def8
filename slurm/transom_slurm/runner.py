"""Run one command: own process group, a deadline that kills all of it, bounded output, another user's rights if asked.

Nothing here knows Slurm but :func:`clean_env`. Tests pass a scripted :class:`Runner` instead of :func:`run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from transom_slurm.types import UserIdentity

OUTPUT_LIMIT = 256 * 1024 * 1024
"""Bytes kept of standard output; 10,000 nodes are 6 MB. A command that says more is ended and counts as failed."""
TERM_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL to a group that is past its deadline."""
_STDERR_LIMIT = 1024 * 1024
_KILL_WAIT_S = 2.0
_ENV = "/usr/bin/env"

_SCRUBBED = ("SLURM", "SBATCH_", "SQUEUE_", "SINFO_", "SCONTROL_", "SRUN_", "SACCT_", "SALLOC_", "SCANCEL_", "PMI")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended by itself. ``rc`` is minus the signal's number if one killed it."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def end(self) -> str:
        """How it ended, for people: ``exit code 2``, ``killed by SIGPIPE``."""
        if self.rc >= 0:
            return f"exit code {self.rc}"
        try:
            return f"killed by {signal.Signals(-self.rc).name}"
        except ValueError:
            return f"killed by signal {-self.rc}"


class CommandError(Exception):
    """A command did not come to its own end."""

    def __init__(self, argv: Sequence[str], cause: str) -> None:
        super().__init__(f"{argv[0]}: {cause}")
        self.argv = tuple(argv)
        self.cause = cause


class CommandTimeout(CommandError):
    """The deadline passed; the whole process group was killed. What the command did before that is unknown."""


class CommandOverflow(CommandError):
    """The command printed more than is kept; it was killed."""


class CommandNotStarted(CommandError):
    """The program could not be executed, or the user's rights not be taken: it certainly did nothing."""


class Runner(Protocol):
    """What :func:`run` is; a test passes its own."""

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str],
        timeout: float,
        cwd: str | None = None,
        user: UserIdentity | None = None,
    ) -> Completed:
        """Run ``argv`` to its end within ``timeout`` seconds; raises CommandError."""
        ...


def user_identity(user: int | str) -> UserIdentity:
    """Who this uid or login name is, with all groups, from the name service. Raises KeyError for nobody known."""
    entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    groups = tuple(sorted({*os.getgrouplist(entry.pw_name, entry.pw_gid), entry.pw_gid}))
    return UserIdentity(uid=entry.pw_uid, gid=entry.pw_gid, groups=groups, name=entry.pw_name, home=entry.pw_dir)


def clean_env(extra: Mapping[str, str] | None = None, *, slurm_conf: str | None = None) -> dict[str, str]:
    """An environment for Slurm's commands in which nothing of an allocation or of a user changes what they print.

    Times come out as Unix seconds (``SLURM_TIME_FORMAT=%s``: squeue, scontrol, sacct and sinfo alike, 22.05 to 26.05).
    ``slurm_conf`` is the SLURM_CONF to use, else the caller's own is kept. ``extra`` is not scrubbed.
    """
    env = {"PATH": os.environ.get("PATH", _PATH), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    conf = slurm_conf if slurm_conf is not None else os.environ.get("SLURM_CONF", "")
    if conf:
        env["SLURM_CONF"] = conf
    return env | dict(extra or {})


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """A user's environment without what belongs to another allocation or would change sbatch's options unseen."""
    return {name: value for name, value in env.items() if not name.startswith(_SCRUBBED) or name == "SLURM_CONF"}


async def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str],
    timeout: float,
    cwd: str | None = None,
    user: UserIdentity | None = None,
) -> Completed:
    """Run ``argv`` to its end within ``timeout`` seconds, in a session and process group of its own.

    With ``user`` the child takes that uid, gid and exactly those groups before it executes, and ``cwd`` is entered with
    these rights. Raises CommandTimeout, CommandOverflow, CommandNotStarted. Cancelling the caller kills the group too.
    """
    began = time.monotonic()
    starting = asyncio.ensure_future(_start(argv, stdin, env, cwd, user))
    try:
        transport, output = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio alone would kill the child but not its group, and then wait for the group's pipes.
        with contextlib.suppress(CommandNotStarted):
            await _end_group(*await starting)
        raise
    try:
        await asyncio.wait({output.ended}, timeout=timeout)
        if not output.ended.done():
            raise CommandTimeout(argv, f"no end within {timeout:g} s")
        if output.overflow:
            raise CommandOverflow(argv, f"more than {OUTPUT_LIMIT} bytes of output")
    finally:
        await _end_group(transport, output)
    # coreutils 9.1 calls env by the path that it was started by, 9.7 by its name alone.
    if output.rc == 125 and output.text(2).startswith((f"{_ENV}:", "env:")):
        raise CommandNotStarted(argv, output.text(2).strip())
    return Completed(tuple(argv), output.rc, output.text(1), output.text(2), time.monotonic() - began)


class _Output(asyncio.SubprocessProtocol):
    """Gathers a child's output; ``ended`` is done when it has exited and closed its pipes, or said too much."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exited = asyncio.Event()
        self.overflow = False
        self.rc = 0
        self._data = {1: bytearray(), 2: bytearray()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self._data[fd]
        if fd == 2:
            kept += data[: _STDERR_LIMIT - len(kept)]
        elif len(kept) + len(data) <= OUTPUT_LIMIT:
            kept += data
        else:
            self.overflow = True
            self._end()

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def text(self, fd: int) -> str:
        return self._data[fd].decode("utf-8", errors="surrogateescape")

    def _end(self) -> None:
        assert isinstance(self._transport, asyncio.SubprocessTransport)
        self.rc = self._transport.get_returncode() or 0
        if not self.ended.done():
            self.ended.set_result(None)


async def _start(
    argv: Sequence[str], stdin: str | None, env: Mapping[str, str], cwd: str | None, user: UserIdentity | None
) -> tuple[asyncio.SubprocessTransport, _Output]:
    """Start the child; raises CommandNotStarted when it certainly did not execute."""
    # A job gets the umask that sbatch had, which must not be a daemon's.
    rights: dict[str, object] = {"umask": 0o022}
    words = list(argv)
    if user is not None and (user.uid != os.geteuid() or os.geteuid() == 0):
        rights |= {"user": user.uid, "group": user.gid, "extra_groups": list(user.groups)}
        # subprocess enters cwd before it gives up its rights; env does it after.
        words, cwd = ([_ENV, "-C", cwd, *argv] if cwd else words), "/"
    try:
        transport, output = await asyncio.get_running_loop().subprocess_exec(
            _Output,
            *words,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            **rights,  # type: ignore[arg-type]
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CommandNotStarted(argv, str(error)) from error
    if stdin is not None:
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        pipe.write(stdin.encode("utf-8", errors="surrogateescape"))
        pipe.write_eof()
    return transport, output


async def _end_group(transport: asyncio.SubprocessTransport, output: _Output) -> None:
    """Leave nothing of a command that is not over: SIGTERM to its group, SIGKILL a second later."""
    try:
        for number, patience in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
            if output.ended.done() and not output.overflow:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(transport.get_pid(), number)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(output.exited.wait(), patience)
    finally:
        transport.close()
