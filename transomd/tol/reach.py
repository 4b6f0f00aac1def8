"""What a job needs done on nodes, and its submissions, put in terms of :mod:`transomd.rights`. Effects only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from transom_slurm.types import SubmitRequest

from transomd.health.checker import ProbeOptions
from transomd.health.profile import Profile
from transomd.health.types import CollectiveReport, NodeReport
from transomd.rights import Rights
from transomd.settings import Settings
from transomd.tol.submission import launcher_argv, submit_request
from transomd.tol.view import JobView
from transomd.words import CheckMode, ExitCode

STARTER_PATIENCE_S = 1.0
"""How long a starting launcher is watched for an immediate failure of its srun."""


class Reach:
    """Implements what observing and acting need on nodes.

    ``cleared_at`` is when each was put back into service; kernel messages from before do not count against it.
    """

    def __init__(self, settings: Settings, rights: Rights, daemon_url: str) -> None:
        self._settings = settings
        self._rights = rights
        self._daemon_url = daemon_url
        self._profile = settings.health.profile()
        self.cleared_at: Mapping[str, float] = {}

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
            cleared_at=self.cleared_at,
            deadline=self._settings.health.probe_timeout_s,
        )
        await self._rights.probe(nodes, profile, options, told)

    async def check(self, nodes: Iterable[str], told: Callable[[NodeReport], None]) -> None:
        """Probe nodes for a person, whatever runs on them: their GPUs are not held against an allocation."""
        options = ProbeOptions(cleared_at=self.cleared_at, deadline=self._settings.health.probe_timeout_s)
        await self._rights.probe(nodes, self._profile, options, told)

    async def collective(self, nodes: tuple[str, ...], view: JobView) -> CollectiveReport:
        """Run the all-reduce as the job's user."""
        timeout = self._settings.health.collective_timeout_s
        return await self._rights.all_reduce(nodes, view.job.uid, self._settings.daemon.python, timeout)

    async def fence(self, nodes: list[str], job_id: int, epoch: int) -> Mapping[str, str]:
        """End a job's processes on nodes; one word, or the error, for each."""
        return await self._rights.fence(nodes, job_id, epoch)

    def submission(self, view: JobView, attempt: int) -> SubmitRequest:
        """Return the sbatch call of an attempt."""
        record = next(a for a in view.attempts if a.number == attempt)
        user = self._rights.identity(view.job.uid)
        return submit_request(view.job, view.spec, record, self._daemon_url, self._settings, user)

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
        process = await self._rights.start(view.job.uid, argv, f"{view.job.run_dir}/logs/launcher.log")
        await asyncio.sleep(STARTER_PATIENCE_S)
        # A launcher that finds its generation claimed leaves with this code: it was started before, as was wanted.
        if process.poll() not in (None, int(ExitCode.OK), int(ExitCode.GATE_REFUSED)):
            raise RuntimeError(f"srun for the new launcher ended with exit code {process.returncode}")


def _without(profile: Profile, skip: Iterable[str]) -> Profile:
    return replace(profile, modes={**profile.modes, **dict.fromkeys(skip, CheckMode.OFF)})
