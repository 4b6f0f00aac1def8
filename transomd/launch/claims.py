"""What a launcher owns in the run folder: its attempt, its number, and the epochs that it starts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from transomd.api.wire import LaunchOrder
from transomd.launch.aside import Aside
from transomd.launch.options import Options

log = logging.getLogger("transom.launcher")

DISK_S = 10.0
"""How long the run folder may take to answer; on a dead file system it takes for ever."""


class Claims:
    """One launcher's. What is asked raises OSError where the run folder does not answer."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._run_dir = options.run_dir
        self._disk = Aside(DISK_S)

    def begin(self) -> bool:
        """Claim the attempt for its Slurm job, and the launcher's number in it; False where it is somebody else's."""
        options = self._options
        me = {"slurm_job_id": options.slurm_job_id, "host": options.host, "pid": os.getpid()}
        owner = self._run_dir.claim(f"attempt-{options.attempt}", me)
        if owner["slurm_job_id"] != options.slurm_job_id:
            log.error(
                "attempt %d belongs to Slurm job %s; this one does not start", options.attempt, owner["slurm_job_id"]
            )
            return False
        first = self._run_dir.claim(f"generation-{options.attempt}-{options.generation}", me) == me
        if not first or self._run_dir.newest_generation(options.attempt) > options.generation:
            log.error("launcher %d of attempt %d was started before", options.generation, options.attempt)
            return False
        return True

    async def taken_over_by(self) -> int:
        """Return the number of the launcher that has taken over; 0 where none has."""
        newest = await self._disk.ask(self._run_dir.newest_generation, self._options.attempt)
        return newest if newest > self._options.generation else 0

    async def newest(self) -> tuple[int, Mapping[str, Any]]:
        """Return the newest epoch that anybody has claimed, with that claim; 0 and nothing where there is none."""
        return await self._disk.ask(self._newest)

    def _newest(self) -> tuple[int, Mapping[str, Any]]:
        epochs = self._run_dir.epochs()
        return (epochs[-1], self._run_dir.owner(f"epoch-{epochs[-1]:06d}")) if epochs else (0, {})

    async def epoch(self, epoch: int, order: LaunchOrder) -> int:
        """Claim an epoch, or the next that is free, for a launch as ordered; return it."""
        me = {
            "slurm_job_id": self._options.slurm_job_id,
            "generation": self._options.generation,
            "at": time.time(),
            "resume_step": order.resume_step,
            "nodes": order.nodes,
        }
        return await self._disk.ask(self._first_free, epoch, me)

    def _first_free(self, epoch: int, me: Mapping[str, Any]) -> int:
        while self._run_dir.claim(f"epoch-{epoch:06d}", me) is not me:
            epoch += 1
        return epoch
