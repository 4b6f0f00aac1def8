"""The agents of an allocation, a step of their own: started, waited for, asked to end processes, ended at last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable

from transom_slurm.nodesets import fold

from transomd.launch.aside import Aside
from transomd.launch.hub import Hub
from transomd.launch.options import Options, Watch
from transomd.launch.program import slurm_env

log = logging.getLogger("transom.launcher")

FENCE_S = 10.0
LOG_S = 5.0
"""How long the agents' log may take to open."""
AGENTS_S = 30.0
"""How long agents may take to call before the launcher goes on without those that have not."""
AGENTS_AGAIN_S = 5.0
"""How soon agents are started again after an srun for them that came to nothing."""
TAKEOVER_S = 4.0
"""How long a new launcher waits for the agents that outlived the old one before it starts new ones."""
ANSWER_S = 2.0
"""How long an agent may take to answer, beyond the time that it was given to do what it was asked."""
LEAVE_S = 10.0
"""How long the srun of the agents has from SIGTERM to SIGKILL."""


class Agents:
    """Starts the agents of ``options.nodes`` and knows which answer; they are asked through ``hub``.

    By ``clock`` (seconds) it is measured how long an agent is silent.
    """

    def __init__(self, options: Options, watch: Watch, clock: Callable[[], float]) -> None:
        self.hub = Hub(options.run_dir.token(), clock)
        self._options = options
        self._watch = watch
        self._step: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._disk = Aside(LOG_S)

    async def call(self, give_up: Callable[[], object]) -> None:
        """Listen, say where, and start the agents that have not outlived an earlier launcher.

        Waits for them until they all answer, a time-out, or ``give_up``.
        """
        port = await self.hub.start()
        options = self._options
        where = {
            "host": options.host,
            "port": port,
            "generation": options.generation,
            "slurm_job_id": options.slurm_job_id,
        }
        options.run_dir.write_json(options.run_dir.launcher_file, where)
        if options.generation > 1:
            await self._wait(TAKEOVER_S, give_up)
        missing = self.lost(options.nodes)
        if missing:
            await self.start(missing)
            await self._wait(AGENTS_S, give_up)
        log.info("agents answer on %s", fold(self.alive()))

    async def start(self, nodes: list[str]) -> None:
        """Start agents on these nodes, as one step that outlives the program and the loss of nodes."""
        count, self._started_at = len(nodes), time.monotonic()
        argv = ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", f"--nodes={count}"]
        argv += [f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--job-name=agents"]
        argv += ["--mem=0", sys.executable, "-m", "transomd.launch.agent"]
        argv += [f"--run-dir={self._options.run_dir.root}", f"--job={self._options.job_id}"]
        argv += [f"--heartbeat={self._watch.heartbeat_s}"]
        log_file = await self._log_file()
        try:
            self._step = await asyncio.create_subprocess_exec(
                *argv,
                env=slurm_env(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        finally:
            os.close(log_file)

    async def _log_file(self) -> int:
        """Open the agents' log; where its file system is dead, they go without one."""
        path, flags = self._options.run_dir.root / "logs" / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            return await self._disk.ask(os.open, path, flags, 0o600)
        except OSError as error:
            log.warning("the agents start without a log: %s", error)
            return os.open(os.devnull, os.O_WRONLY)

    async def again(self, barred: Collection[str]) -> None:
        """Start agents anew where they ended with the srun that started them.

        Slurm may not have answered it, or have ended the step: srun gives up all of it when a node of it that was lost
        comes back ("step missing and io error", and others in step_launch.c). The program may well go on meanwhile.
        """
        gone = {n for n in self._options.nodes if not self.hub.connected(n)}
        missing = sorted(gone.union(self.lost(self._options.nodes)).difference(barred))
        ended = self._step is not None and self._step.returncode is not None
        if ended and missing and time.monotonic() - self._started_at > AGENTS_AGAIN_S:
            log.info("no agents on %s; starting them again", fold(missing))
            await self.start(missing)

    async def _wait(self, within_s: float, give_up: Callable[[], object]) -> None:
        end = time.monotonic() + within_s
        while self.lost(self._options.nodes) and time.monotonic() < end and not give_up():
            await asyncio.sleep(0.05)

    def alive(self) -> list[str]:
        """The nodes of this allocation whose agents answer; one of an earlier allocation may call for a moment, too."""
        return [n for n in self.hub.alive(self._watch.heartbeat_timeout_s) if n in self._options.nodes]

    def lost(self, nodes: Iterable[str]) -> list[str]:
        """Those of these nodes whose agents do not answer, in order."""
        return sorted(set(nodes) - set(self.alive()))

    async def kill(self, epoch: int, nodes: Collection[str], *, grace_s: float = 0.0) -> list[str]:
        """End every process of an epoch on these nodes; return those where that is not known to be done."""
        alive = [n for n in nodes if n in self.alive()]
        answers = await self.hub.ask_all(alive, "kill", FENCE_S + grace_s, epoch=epoch, grace_s=grace_s)
        stuck = [n for n, left in answers.items() if isinstance(left, Exception) or left]
        return sorted({*stuck, *(set(nodes) - set(alive))})

    async def flush(self, within_s: float) -> None:
        """Have what is in memory only brought to storage, and the keepers end: Slurm ends an agent's step any time.

        Agents that Slurm asks to end give it less time.
        """
        answers = await self.hub.ask_all(self.alive(), "flush", within_s + ANSWER_S, within_s=within_s)
        late = [node for node, done in answers.items() if done is not True]
        if late:
            log.warning("not everything that %s had in memory is known to be in storage", fold(late))

    async def abandon(self) -> None:
        """Leave the agents to another launcher: they outlive an srun that is killed, as after a power loss.

        One that is told to end takes them along.
        """
        await self.hub.close()
        if self._step is not None and self._step.returncode is None:
            os.killpg(self._step.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End the agents' step, and hang up."""
        if self._step is not None and self._step.returncode is None:
            self._step.terminate()
            try:
                await asyncio.wait_for(self._step.wait(), LEAVE_S)
            except asyncio.TimeoutError:
                self._step.kill()
        await self.hub.close()
