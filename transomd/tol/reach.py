"""Into the nodes: probes, the all-reduce and fencing over SSH, a launcher started as the job's user. Effects only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from transom_slurm.runner import clean_env
from transom_slurm.types import SubmitRequest

from transomd.health.checker import ProbeOptions, probe
from transomd.health.collective import CollectiveOptions, all_reduce
from transomd.health.fence import fence_all
from transomd.health.profile import Profile
from transomd.health.ssh import SshPool, SshSettings
from transomd.health.types import CollectiveReport, NodeReport
from transomd.settings import Settings
from transomd.tol.manual import identity
from transomd.tol.submission import launcher_argv, submit_request
from transomd.tol.view import JobView
from transomd.words import CheckMode

FENCE_TIMEOUT_S = 10.0
STARTER_PATIENCE_S = 1.0
"""How long a starting launcher is watched for an immediate failure of its srun."""


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


class Reach:
    """Implements what observing and acting need on nodes."""

    def __init__(self, settings: Settings, clock: Callable[[], float], daemon_url: str) -> None:
        self._settings = settings
        self._clock = clock
        self._daemon_url = daemon_url
        self._pool = SshPool(ssh_settings(settings))
        self._profile = settings.health.profile()

    def use(self, settings: Settings) -> None:
        """Go on with other settings; how nodes are reached stays as it is."""
        self._settings = settings
        self._profile = settings.health.profile()

    async def probe(self, nodes: Iterable[str], view: JobView, told: Callable[[NodeReport], None]) -> None:
        """Probe nodes of a job's allocation; every node gets a report, unknown if it cannot be looked at."""
        profile = _without(self._profile, view.spec.health.skip)
        options = ProbeOptions(
            allocated_gpus=view.spec.gpus_per_node or None,
            slurm_job=view.attempt.slurm_job_id,
            deadline=self._settings.health.probe_timeout_s,
        )
        await probe(self._pool, nodes, profile, options, on_report=told, clock=self._clock)

    async def check(self, nodes: Iterable[str], told: Callable[[NodeReport], None]) -> None:
        """Probe nodes for a person, whatever runs on them: their GPUs are not held against an allocation."""
        options = ProbeOptions(deadline=self._settings.health.probe_timeout_s)
        await probe(self._pool, nodes, self._profile, options, on_report=told, clock=self._clock)

    async def collective(self, nodes: tuple[str, ...], view: JobView) -> CollectiveReport:
        """Run the all-reduce as the job's user; as the login user where that is the same, or the job is root's."""
        user = None if view.job.uid in (0, os.geteuid()) else view.job.user
        options = CollectiveOptions(
            python=self._settings.daemon.python, user=user, timeout=self._settings.health.collective_timeout_s
        )
        return await all_reduce(self._pool, nodes, options, clock=self._clock)

    async def fence(self, nodes: list[str], job_id: int, epoch: int) -> Mapping[str, str]:
        """End a job's processes on nodes; one word, or the error, for each."""
        done = await fence_all(self._pool, nodes, str(job_id), epoch, timeout=FENCE_TIMEOUT_S)
        return {node: "fenced" if report.clean else report.error or "not fenced" for node, report in done.items()}

    def submission(self, view: JobView, attempt: int) -> SubmitRequest:
        """Return the sbatch call of an attempt."""
        record = next(a for a in view.attempts if a.number == attempt)
        return submit_request(view.job, view.spec, record, self._daemon_url, self._settings, identity(view.job.uid))

    async def start_launcher(self, view: JobView, host: str, generation: int) -> None:
        """Start a launcher in the allocation by ``srun --jobid``, in a session of its own that outlives this daemon.

        Raises OSError or RuntimeError when srun ends at once.
        """
        attempt = view.attempt
        left = [n for n in attempt.nodes if n not in attempt.barred]
        launcher = launcher_argv(
            view.job.id, view.job.run_dir, attempt.number, generation, self._daemon_url, self._settings
        )
        argv = ["srun", f"--jobid={attempt.slurm_job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        argv += ["--no-kill", "--kill-on-bad-exit=0", "--mem=0", f"--job-name=launcher-{generation}"]
        argv += [*launcher, f"--nodes={','.join(left)}"]
        process = await asyncio.to_thread(self._spawn, view, argv)
        await asyncio.sleep(STARTER_PATIENCE_S)
        if process.poll() is not None and process.returncode != 0:
            raise RuntimeError(f"srun for the new launcher ended with exit code {process.returncode}")

    def _spawn(self, view: JobView, argv: list[str]) -> subprocess.Popen[bytes]:
        """Run as the user, output appended to the launcher's log, which is opened with the user's rights."""
        log = f"{view.job.run_dir}/logs/launcher.log"
        shell = ["/bin/sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "sh", log, *argv]
        who = identity(view.job.uid)
        rights: dict[str, object] = {}
        if who is not None:
            rights = {"user": who.uid, "group": who.gid, "extra_groups": list(who.groups)}
        home = {"HOME": who.home, "USER": who.name} if who else {"HOME": pwd.getpwuid(os.geteuid()).pw_dir}
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            shell, stdin=subprocess.DEVNULL, env=clean_env(home), cwd="/", start_new_session=True, **rights
        )

    async def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(Exception):
            await self._pool.close()


def _without(profile: Profile, skip: Iterable[str]) -> Profile:
    return replace(profile, modes={**profile.modes, **dict.fromkeys(skip, CheckMode.OFF)})
