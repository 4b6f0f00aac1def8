"""The launcher: holds the gate, starts the program, notices its failures, and restarts it in place when told to.

It is the batch script of an attempt. When its node dies, another one takes over inside the same allocation
(``--generation`` above 1): it finds the agents by ``launcher.json``, ends what is left, and waits for orders.
Without the daemon it does what its grant allows and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from transomd.api.wire import Directive, LauncherReport
from transomd.launch import stages
from transomd.launch.agents import Agents
from transomd.launch.awake import ASLEEP_S, Awake
from transomd.launch.claims import Claims
from transomd.launch.course import Course
from transomd.launch.daemon_link import DaemonLink
from transomd.launch.deputy import Deputy
from transomd.launch.folder import CheckpointFolder
from transomd.launch.keeping import END_S
from transomd.launch.options import Options, Watch, command_line, options
from transomd.launch.rundir import COMPLETED
from transomd.launch.runs import Runs
from transomd.log import set_up
from transomd.spec import JobSpec
from transomd.words import ExitCode, LauncherPhase

log = logging.getLogger("transom.launcher")

TICK_S = 0.2
LAST_WORD_S = 60.0
"""How long the last report is tried before the launcher leaves."""
STOP_GRACE_S = 20.0
"""How long the program has from SIGTERM to SIGKILL when its allocation ends; Slurm's KillWait is 30 s by default."""
LAST_FLUSH_S = 600.0
"""How long keepers may take where it is Slurm that ends the allocation: until then, and no longer than they try."""
ASK_AGAIN_S = 1.0
"""How soon a report that was not answered is sent again where the next move is the daemon's."""


class Launcher:
    """One launcher from its first report to its last."""

    def __init__(self, options: Options, link: DaemonLink, spec: JobSpec, watch: Watch) -> None:
        self.options = options
        self.link = link
        self.spec = spec
        self.watch = watch
        # A stop of half the time that an agent may be silent is not yet silence; a longer one must not become it.
        self._awake = Awake(asleep_s=max(5 * TICK_S, min(ASLEEP_S, watch.heartbeat_timeout_s / 2)))
        self.agents = Agents(options, watch, self._awake)
        self.folder = CheckpointFolder(spec.checkpoint.dir)
        self.course = Course()
        self.claims = Claims(options)
        parts = self.agents, self.folder, self.course, self.claims
        self.runs = Runs(options, spec, watch, *parts, self._awake)
        self.deputy = Deputy(spec, watch, *parts, self.runs)
        self._stop_by_signal = ""
        self._poll_s = 0.5
        self._reported_at = 0.0
        self._aside = False

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Do everything; return the exit code of the batch script."""
        if not self.claims.begin():
            return int(ExitCode.GATE_REFUSED)
        if self.options.run_dir.claimed(COMPLETED):
            log.info("the program has ended with exit code 0 before; nobody heard of it")
            self.course.complete(time.time())
        await self.agents.call(lambda: self._stop_by_signal)
        beside = [asyncio.create_task(self._keep_talking()), asyncio.create_task(self._stay_awake())]
        try:
            if self.options.generation > 1 and self.course.phase is LauncherPhase.GATE:
                await self.runs.take_over()
            while (code := await self._tick()) is None:
                await asyncio.sleep(TICK_S)
            return code
        finally:
            for task in beside:
                task.cancel()
            await self._leave()

    async def _stay_awake(self) -> None:
        """Look at the clock that stands still while this process does."""
        while True:
            self._awake()
            await asyncio.sleep(TICK_S)

    async def _keep_talking(self) -> None:
        """Report on time also while a tick takes long (fencing waits for nodes that do not answer).

        Silence would be taken for the loss of this launcher's node. The answer is left for the next tick to ask again.
        """
        while not self._aside:
            await asyncio.sleep(TICK_S)
            overdue = max(self.watch.report_s, self._poll_s) + 1.0
            if time.monotonic() - self._reported_at > overdue:
                self._reported_at = time.monotonic()
                await self.link.report(self._report())
                self.course.changed = True

    def stop_by_signal(self, name: str) -> None:
        """Note that Slurm (or a person) wants this allocation to end."""
        self._stop_by_signal = self._stop_by_signal or name

    async def _leave(self) -> None:
        await self.runs.end()
        if not self._aside:
            await self.agents.flush(LAST_FLUSH_S if self._stop_by_signal else END_S)
        await self.agents.end()

    # --- one tick -----------------------------------------------------------------------------------------------

    async def _tick(self) -> int | None:
        if self._stop_by_signal and not self.runs.storing:
            return await self._stopped(f"signal {self._stop_by_signal}", 128 + signal.SIGTERM)
        if self.course.running or self.course.phase in (LauncherPhase.GATE, LauncherPhase.FAILED):
            await self.agents.again(self.deputy.barred)
        if self.course.running:
            await self.runs.look()
        directive = await self._report_if_due()
        if directive is not None:
            return await self._obey(directive)
        if self.course.phase is LauncherPhase.DONE and self.link.silent_for() > LAST_WORD_S:
            return int(ExitCode.OK)
        await self.deputy.act(self.link.silent_for())
        return None

    async def _report_if_due(self) -> Directive | None:
        waits = not self.course.running and self.link.silent_for() > 0.0
        poll_s = min(self._poll_s, ASK_AGAIN_S) if waits else self._poll_s
        if not self.course.changed and time.monotonic() - self._reported_at < poll_s:
            return None
        self.course.changed = False
        self._reported_at = time.monotonic()
        await self.folder.look()
        return await self.link.report(self._report())

    def _report(self) -> LauncherReport:
        course, options = self.course, self.options
        step, epoch, at = self.folder.newest or (None, None, None)
        if course.failure is not None and course.phase is LauncherPhase.FAILED:
            course.failure = replace(course.failure, lost_nodes=self.agents.lost(course.nodes or options.nodes))
        return LauncherReport(
            job_id=options.job_id,
            attempt=options.attempt,
            slurm_job_id=options.slurm_job_id,
            generation=options.generation,
            host=options.host,
            phase=course.phase.value,
            at=time.time(),
            nodes=self.agents.alive(),
            lost=self.agents.lost(options.nodes),
            unfit=self.deputy.unfit,
            launches=course.launches,
            failure=course.failure,
            past_failures=course.past_failures,
            checkpoint_step=step,
            checkpoint_epoch=epoch,
            checkpoint_at=at,
            checkpoints=self.folder.listed,
            **self._stages(),
            exit_code=course.exit_code,
            message="; ".join(filter(None, (course.message, *course.troubles.values()))),
        )

    def _stages(self) -> dict[str, Any]:
        nodes, folder = self.course.nodes, self.folder.real
        heard = self.agents.hub.checkpoints(nodes)
        told = {n: [r for r in ranks if r["directory"] == folder] for n, ranks in heard.items()}
        ranks = [rank for each in told.values() for rank in each]
        copies = self.agents.hub.copies(node for node in nodes if told[node])
        return {
            "stages": stages.newest(ranks, len(nodes) * self.spec.tasks_per_node, self.runs.agreement.newest),
            "checkpoint_trouble": stages.trouble(told),
            "copies": stages.holders(copies),
            "copies_trouble": stages.copies_trouble(copies),
            "checkpoints_skipped": sum(rank["skipped"] for rank in ranks),
        }

    # --- what the daemon wants ----------------------------------------------------------------------------------

    async def _obey(self, directive: Directive) -> int | None:
        self._poll_s = directive.poll_s
        self.deputy.told(directive)
        if directive.gate == "refuse":
            log.error("refused: %s", directive.message)
            return await self._refused()
        if self.course.phase is LauncherPhase.DONE and directive.stop:
            return int(ExitCode.OK)
        if directive.stop:
            return await self._stopped(directive.stop, int(ExitCode.LAUNCH_FAILED))
        running = self.course.running
        if running and directive.fence_epoch == self.course.newest.epoch:
            await self.runs.fail("asked", directive.fence_reason or "transomd asked for it")
        elif directive.launch is not None and not running and self.course.is_new(directive.launch.epoch):
            await self.runs.launch(directive.launch)
        return None

    async def _refused(self) -> int | None:
        """Leave without a trace: somebody else owns this job now. None where nobody can say yet who does."""
        try:
            newest = await self.claims.taken_over_by()
        except OSError as error:
            self.course.tell("owner", f"who owns the job cannot be read in the run folder: {error}")
            return None
        if newest:
            await self._step_aside(newest)
        else:
            await self.runs.end()
        return int(ExitCode.GATE_REFUSED)

    async def _step_aside(self, newest: int) -> None:
        """Do nothing until Slurm ends us: another launcher has taken over, and a job ends with its batch script."""
        log.info("stepping aside for launcher %d", newest)
        self._aside = True
        self.runs.abandon()
        await self.agents.abandon()
        while not self._stop_by_signal:
            await asyncio.sleep(TICK_S)

    async def _stopped(self, why: str, code: int) -> int:
        log.info("stopping: %s", why)
        if self.course.phase is LauncherPhase.DONE:
            # It is noted already. As a failure, or a person's scancel, it would be the end of nothing that still ran.
            await self.link.report(self._report())
            return int(ExitCode.OK)
        await self.runs.end(grace_s=STOP_GRACE_S)
        self.course.phase, self.course.message = LauncherPhase.STOPPED, why
        await self.link.report(self._report())
        return code


async def _amain(who: Options, args: argparse.Namespace) -> int:
    spec = JobSpec.from_stored(who.run_dir.spec())
    link = DaemonLink(args.daemon, who.run_dir.token())
    launcher = Launcher(who, link, spec, Watch.from_json(args.watch, spec))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, launcher.stop_by_signal, number.name)
    return await launcher.run()


def main(argv: list[str] | None = None) -> int:
    """Run as a batch script, or as the step of a launcher that takes over."""
    # By a thread of its own: the log lies on a file system that may die, and what writes there hangs.
    set_up()
    args = command_line(argv)
    who = options(args, os.environ)
    log.info("launcher %d of attempt %d on %s", who.generation, who.attempt, who.host)
    return asyncio.run(_amain(who, args))


if __name__ == "__main__":
    sys.exit(main())
