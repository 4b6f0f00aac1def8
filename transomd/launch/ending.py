"""A launch whose srun ended with exit code 0: whether that is the end of the program, and all that belongs to one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from transomd.launch.agents import Agents
from transomd.launch.aside import Aside
from transomd.launch.course import Course
from transomd.launch.program import Program
from transomd.launch.reading import Reading
from transomd.launch.rundir import COMPLETED, RunDir
from transomd.launch.storing import Storing

log = logging.getLogger("transom.launcher")


class NoEndError(Exception):
    """srun's exit code 0 is no end of the program."""


class Ending:
    """Of one launch of ``course``. ``storing``: it is believed, and storage gets what the program saved last.

    ``clock`` gives seconds.
    """

    def __init__(
        self, run_dir: RunDir, agents: Agents, course: Course, disk: Aside, clock: Callable[[], float]
    ) -> None:
        self._run_dir = run_dir
        self._agents = agents
        self._course = course
        self._disk = disk
        self._clock = clock
        self._storing: Storing | None = None

    @property
    def storing(self) -> bool:
        """Whether the end is believed, and only storage is waited for."""
        return self._storing is not None

    async def look(self, program: Program, reading: Reading) -> None:
        """Go on as far as possible now; at last note in the course, and in the run folder, that the program is done.

        Raises NoEndError and, where what was saved last is lost, LostError.
        """
        if self._storing is None:
            if not await self._is_believed(program, reading):
                return
            self._storing = Storing(self._agents, self._course.nodes, self._clock)
        stored = await self._storing.look()
        self._course.tell("storing", self._storing.told)
        if stored:
            await self._completed(reading)

    async def _is_believed(self, program: Program, reading: Reading) -> bool:
        """Whether the logs tell of no task that srun did not wait for or Slurm ended, or exit code 0 proves nothing."""
        if not await reading.finish():
            if await self._gone(program):
                raise NoEndError("srun ended with exit code 0, which is not believed: its logs were removed")
            self._course.tell("logs", f"srun ended with exit code 0, which is not believed yet: {reading.trouble}")
            return False
        self._course.tell("logs", "")
        if reading.logs.left:
            raise NoEndError(f"exit code 0 is no end of the program here: {reading.logs.left}")
        return True

    async def _gone(self, program: Program) -> bool:
        """Whether somebody removed the logs: they come back no more, where a file system that does not answer may."""
        try:
            return not await self._disk.ask(program.logs.exists)
        except OSError:
            return False

    async def _completed(self, reading: Reading) -> None:
        now = time.time()
        # First of all: what is not noted when the allocation ends is run again.
        try:
            await self._disk.ask(self._run_dir.claim, COMPLETED, {"epoch": self._course.newest.epoch, "at": now})
        except OSError as error:
            log.warning("that the program has ended cannot be noted in the run folder: %s", error)
        self._course.note_steps(reading.logs)
        self._course.complete(now)
        log.info("the program ended with exit code 0")
