"""The program's launches: claimed, started, watched, and ended, one at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from transom_slurm.nodesets import fold

from transomd.api.wire import FailureReport, LaunchOrder, LaunchReport
from transomd.launch.agents import Agents
from transomd.launch.agreeing import Agreement
from transomd.launch.aside import Aside
from transomd.launch.claims import DISK_S, Claims
from transomd.launch.course import Course
from transomd.launch.ending import Ending, NoEndError
from transomd.launch.folder import CheckpointFolder
from transomd.launch.hub import AgentGone
from transomd.launch.options import Options, Watch
from transomd.launch.order import arrange
from transomd.launch.pairing import Pairing
from transomd.launch.program import LaunchPlan, Program
from transomd.launch.reading import Reading, Sighted
from transomd.launch.storing import LostError
from transomd.launch.stuck import Stuck
from transomd.launch.watch import LogWatch
from transomd.spec import JobSpec
from transomd.tee import detect
from transomd.tee.progress import DEFAULT_PATTERN, Progress, Stall
from transomd.tee.types import Evidence

log = logging.getLogger("transom.launcher")

EVIDENCE_LIMIT = 200
RANKS_S = 5.0
"""How long the agents have to say what the ranks of a hung launch are doing."""
AGAIN_S = 0.5
"""How long after the first look at the ranks of a hung launch comes the second."""
PORT_S = 5.0
"""How long an agent has to name a free port."""


class Runs:
    """Starts the program and ends it; what becomes of it is written to ``course``.

    By ``clock`` (seconds) it is measured how long the program stands still.
    """

    def __init__(
        self,
        options: Options,
        spec: JobSpec,
        watch: Watch,
        agents: Agents,
        folder: CheckpointFolder,
        course: Course,
        claims: Claims,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._options = options
        self._spec = spec
        self._watch = watch
        self._agents = agents
        self._folder = folder
        self._course = course
        self._claims = claims
        self._program: Program | None = None
        self._pairing: Pairing | None = None
        self.agreement = Agreement(agents, folder, spec.nodes * spec.tasks_per_node)
        self._reading: Reading | None = None
        self._stuck = Stuck(agents)
        self._disk = Aside(DISK_S)
        self._ending = self._new_ending()
        self._bad_exit_at: float | None = None
        self._bad_exit_seen = 0.0

    # --- start ------------------------------------------------------------------------------------------------------

    async def launch(self, order: LaunchOrder) -> bool:
        """Start the program as ordered; that it could not be is a failure like another.

        False where the launch could not even be claimed: nothing has happened, and it may be tried again.
        """
        wanted = list(order.nodes)
        try:
            before = await self._nodes_before()
            order = replace(order, nodes=arrange(wanted, before, self._options.nodes))
            epoch = await self.claim_epoch(order)
        except OSError as error:
            self._course.tell("folder", f"epoch {order.epoch} cannot be claimed in the run folder: {error}")
            return False
        self._course.tell("folder", "")
        if epoch is None:
            return False
        began = LaunchReport(
            epoch=epoch, nodes=list(order.nodes), started_at=time.time(), resume_step=self._resume_step(order)
        )
        self._course.begin(began, order.past_step)
        # What the launch before has left is nothing of this one's, should it fail before it has logs.
        self._bad_exit_at = self._reading = None
        self._ending = self._new_ending()
        self._course.tell("logs", "")
        self._course.tell("storing", "")
        if len(order.nodes) != self._spec.nodes:
            await self.fail("start", f"{fold(wanted)} are not {self._spec.nodes} nodes of this launcher's")
            return True
        try:
            self._pairing = Pairing(self._agents.hub, epoch, order.nodes, self._agents.alive)
            await self._pairing.start()
            self.agreement.start()
            port = int(await self._agents.hub.ask(order.nodes[0], "port", PORT_S))
            await self._start(order, epoch, port)
        except (AgentGone, OSError, ValueError) as error:
            await self.fail("start", f"epoch {epoch} could not be started: {error}")
        return True

    async def _nodes_before(self) -> list[str]:
        """Return the nodes of the allocation's newest launch, by their ranks; a job's own script has Slurm's order."""
        if self._spec.script:
            return []
        _, claim = await self._claims.newest()
        here = claim.get("slurm_job_id") == self._options.slurm_job_id
        return list(claim.get("nodes", [])) if here else []

    def _resume_step(self, order: LaunchOrder) -> int | None:
        if order.resume_step is not None:
            return order.resume_step
        return self._folder.newest[0] if self._folder.newest else None

    async def claim_epoch(self, order: LaunchOrder) -> int | None:
        """Claim the order's epoch, or the next that is free and newer than any in the checkpoint folder.

        None where another launcher has taken over. Raises OSError where the run folder does not answer.
        """
        if await self._claims.taken_over_by():
            log.error("another launcher has taken over; starting nothing")
            return None
        await self._folder.look_for_epochs()
        return await self._claims.epoch(max(order.epoch, self._folder.newest_epoch + 1), order)

    async def _start(self, order: LaunchOrder, epoch: int, port: int) -> None:
        plan = LaunchPlan(
            job_id=self._options.job_id,
            attempt=self._options.attempt,
            epoch=epoch,
            nodes=tuple(order.nodes),
            resume_step=order.resume_step,
            master_port=port,
            spec=self._spec,
            env=await self._disk.ask(self._options.run_dir.environment),
            left_out=tuple(n for n in self._options.nodes if n not in order.nodes),
            arranged=order.nodes != arrange(order.nodes, (), self._options.nodes),
        )
        self._program = await self._disk.ask(Program, self._options.run_dir, plan)
        sighted = Sighted(self._clock)
        progress, slurm_job = self._progress(sighted()), self._options.slurm_job_id
        logs = LogWatch(self._program.logs, self._spec, plan.nodes, progress, sighted, slurm_job)
        self._reading = Reading(logs, self._clock, sighted)
        log.info("epoch %d starts on %s", epoch, fold(order.nodes))
        await self._program.start(os.environ, self._disk)

    def _new_ending(self) -> Ending:
        return Ending(self._options.run_dir, self._agents, self._course, self._disk, self._clock)

    def _progress(self, now: float) -> Progress:
        return Progress(
            self._spec.watch.progress or DEFAULT_PATTERN,
            now=now,
            floor_s=self._watch.stall_after_s,
            first_s=self._watch.first_step_after_s,
        )

    @property
    def storing(self) -> bool:
        """Whether the program has ended well, and storage gets what it saved last: no signal keeps it from that."""
        return self._course.running and self._ending.storing

    # --- watch ------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """See how the program that runs is doing; what went wrong ends it."""
        program, reading = self._program, self._reading
        if program is None or reading is None:
            return
        if program.rc is not None:
            await self._ended(program, reading)
            return
        await reading.poll()
        logs = reading.logs
        self._course.note_steps(logs)
        self._course.tell("logs", reading.trouble)
        lost = self._agents.lost(self._course.nodes)
        if lost:
            await self.fail("heartbeat", f"{fold(lost)} stopped answering")
            return
        if logs.failing and self._bad_exit_at is None:
            self._bad_exit_at, self._bad_exit_seen = time.time(), time.monotonic()
            await self._stuck.look(self._course.newest.epoch, self._course.nodes)
        if self._bad_exit_at is not None and time.monotonic() - self._bad_exit_seen > self._watch.exit_grace_s:
            await self.fail("exit", logs.failing, detected_at=self._bad_exit_at)
            return
        stall = reading.stalled()
        if stall is not None:
            await self._hang(stall)

    async def _ended(self, program: Program, reading: Reading) -> None:
        if program.rc != 0:
            if self._bad_exit_at is not None:
                await reading.poll()  # a rank whose end is told by now is not stuck
            await self.fail("exit", f"srun ended with exit code {program.rc}", detected_at=self._bad_exit_at)
            return
        try:
            await self._ending.look(program, reading)
        except NoEndError as error:
            await self.fail("exit", str(error))
        except LostError as error:
            await self.fail("heartbeat", str(error))

    async def _hang(self, stall: Stall) -> None:
        """Before a hung launch is killed, take down what every rank is doing."""
        launch = self._course.newest
        await self._stuck.look(launch.epoch, launch.nodes, RANKS_S)
        await asyncio.sleep(AGAIN_S)
        states = await self._stuck.look(launch.epoch, launch.nodes, RANKS_S)
        evidence = detect.no_progress(stall, time.time(), states)
        where = f" after step {stall.step}" if stall.step is not None else ""
        await self.fail("stall", f"no progress for {stall.seconds:.0f} s{where}", more=evidence)

    # --- end --------------------------------------------------------------------------------------------------------

    async def fail(
        self, by: str, why: str, *, detected_at: float | None = None, more: list[Evidence] | None = None
    ) -> None:
        """End the launch and say how it failed."""
        detected = detected_at or time.time()
        launch, hub = self._course.newest, self._agents.hub
        log.info("epoch %d failed (%s): %s", launch.epoch, by, why)
        evidence = list(more or [])
        if by == "exit":  # who cannot go on is seen only until all are ended
            evidence += detect.stuck(await self._stuck.look(launch.epoch, launch.nodes), time.time())
        lost = self._agents.lost(launch.nodes)
        since = {node: time.time() - (hub.silent_for(node) or 0.0) for node in lost}
        evidence += detect.silent(since, self._options.host)
        unfenced = await self.end()
        if self._reading is not None:
            read = await self._reading.finish()
            self._course.note_steps(self._reading.logs)
            self._course.tell("logs", self._reading.trouble)
            evidence += [] if read else [detect.logs_unread(self._reading.trouble, time.time())]
            evidence += self._reading.logs.evidence(hub.addresses())
        failure = FailureReport(
            epoch=launch.epoch,
            detected_at=detected,
            detected_by=by,
            evidence=[e.to_json() for e in evidence[:EVIDENCE_LIMIT]],
            lost_nodes=lost,
            fenced_at=time.time(),
            unfenced=unfenced,
        )
        self._course.fail(failure, why, time.time())

    async def take_over(self) -> None:
        """End what an older launcher started, and report it as failed."""
        epochs, nodes = self._options.run_dir.epochs(), self._options.nodes
        self._course.changed = True
        if not epochs:
            return
        detected = time.time()
        unfenced = await self._agents.kill(epochs[-1], nodes)
        failure = FailureReport(
            epoch=epochs[-1],
            detected_at=detected,
            detected_by="takeover",
            lost_nodes=self._agents.lost(nodes),
            fenced_at=time.time(),
            unfenced=unfenced,
        )
        self._course.fail(failure, "its launcher was lost", time.time())

    async def end(self, *, grace_s: float = 0.0) -> list[str]:
        """End every process of the launch on every node that answers; return the nodes that do not."""
        self._unpair()
        if not self._course.launches:
            return []
        launch = self._course.newest
        unfenced = await self._agents.kill(launch.epoch, launch.nodes, grace_s=grace_s)
        if self._program is not None:
            await self._program.stop()
            self._program = None
        return unfenced

    def abandon(self) -> None:
        """Leave the program to another launcher."""
        self._unpair()
        if self._program is not None:
            self._program.abandon()
            self._program = None

    def _unpair(self) -> None:
        self.agreement.stop()
        if self._pairing is not None:
            self._pairing.stop()
            self._pairing = None
