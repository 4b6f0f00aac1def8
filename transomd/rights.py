"""The one seam for what needs root on the head node: run a command as a user, look into a node, fence a node.

Everything else of transomd works with the rights of a service user that is a Slurm Administrator. In personal mode the
same acts are done with the owner's own rights: the commands as they are, the logins as the owner, who sees and ends no
more than that account may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from transom_slurm.runner import CommandNotStarted, Completed, clean_env, run, user_identity
from transom_slurm.types import UserIdentity

from transomd.errors import RefusedError
from transomd.health.checker import ProbeOptions, probe
from transomd.health.collective import CollectiveOptions, all_reduce
from transomd.health.fence import fence_all
from transomd.health.profile import Profile
from transomd.health.ssh import SshPool, SshSettings
from transomd.health.types import CollectiveReport, NodeReport
from transomd.modes import user_name
from transomd.settings import Settings

FENCE_TIMEOUT_S = 10.0
_UMASK = 0o022


def ssh_settings(settings: Settings) -> SshSettings:
    """Return how nodes are reached, from the site file."""
    ssh = settings.ssh
    return SshSettings(
        known_hosts=Path(ssh.known_hosts or "~/.ssh/known_hosts").expanduser(),
        config=Path(ssh.config) if ssh.config else None,
        client_keys=(Path(ssh.key),) if ssh.key else (),
        user=ssh.user,
        connect_timeout=ssh.connect_timeout_s,
        fan_out=ssh.fanout,
    )


class Rights:
    """The acts. Whatever is run as a user has that user's uid, gid and groups and nothing of this process."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.personal = settings.personal
        self._clock = clock
        self._pool = SshPool(ssh_settings(settings))

    def check(self, uid: int) -> None:
        """Raise RefusedError for a user whom this daemon cannot act for."""
        if self.personal and uid != os.geteuid():
            who, owner = user_name(uid), user_name(os.geteuid())
            raise RefusedError(f"this transomd is {owner}'s own and does nothing for {who}", hint="id; transom status")

    def identity(self, uid: int) -> UserIdentity | None:
        """Return who to run as; None when that is this process's own user. Raises RefusedError or KeyError (nobody)."""
        self.check(uid)
        return None if uid == os.geteuid() else user_identity(uid)

    # --- run as a user ------------------------------------------------------------------------------------------

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str],
        timeout: float,
        cwd: str | None = None,
        user: UserIdentity | None = None,
    ) -> Completed:
        """Run a command to its end; this is the :class:`transom_slurm.runner.Runner` of the daemon's Slurm client."""
        if user is not None:
            try:
                self.check(user.uid)
            except RefusedError as error:
                raise CommandNotStarted(argv, error.message) from None
        return await run(argv, stdin=stdin, env=env, timeout=timeout, cwd=cwd, user=user)

    async def start(self, uid: int, argv: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start a command as a user, in a session of its own that outlives this daemon.

        What it prints is appended to ``log``, which the user's own rights open. Raises OSError.
        """
        return await asyncio.to_thread(self._start, uid, list(argv), log)

    def _start(self, uid: int, argv: list[str], log: str) -> subprocess.Popen[bytes]:
        shell = ["/bin/sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "sh", log, *argv]
        who = self.identity(uid)
        rights: dict[str, object] = {}
        if who is not None:
            rights = {"user": who.uid, "group": who.gid, "extra_groups": list(who.groups)}
        about = who or user_identity(uid)
        env = clean_env({"HOME": about.home, "USER": about.name, "LOGNAME": about.name})
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            shell, stdin=subprocess.DEVNULL, env=env, cwd="/", start_new_session=True, umask=_UMASK, **rights
        )

    async def all_reduce(self, nodes: Sequence[str], uid: int, python: str, timeout: float) -> CollectiveReport:
        """Run the all-reduce on nodes as a user; as the login user where that is the same, or the job is root's."""
        self.check(uid)
        user = None if uid in (0, os.geteuid()) else user_name(uid)
        options = CollectiveOptions(python=python, user=user, timeout=timeout)
        return await all_reduce(self._pool, nodes, options, clock=self._clock)

    # --- look into a node, fence a node -------------------------------------------------------------------------

    async def probe(
        self, nodes: Iterable[str], profile: Profile, options: ProbeOptions, told: Callable[[NodeReport], None]
    ) -> None:
        """Probe nodes; every node gets a report, unknown where it cannot be looked at."""
        await probe(self._pool, nodes, profile, options, on_report=told, clock=self._clock)

    async def fence(self, nodes: Iterable[str], job_id: int, epoch: int) -> Mapping[str, str]:
        """End a job's processes of launches up to ``epoch``; one word, or the error, for each node."""
        done = await fence_all(self._pool, nodes, str(job_id), epoch, timeout=FENCE_TIMEOUT_S)
        return {node: "fenced" if report.clean else report.error or "not fenced" for node, report in done.items()}

    async def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(Exception):
            await self._pool.close()
