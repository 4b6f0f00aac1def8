"""The launcher: holds the gate, starts the program, notices its failures, and restarts it in place when told to.

It is the batch script of an attempt. When its node dies, another one takes over inside the same allocation
(``--generation`` above 1): it finds the agents by ``launcher.json``, ends what is left, and waits for orders.
Without the daemon it does what its grant allows and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from transom_slurm.nodesets import expand, fold

from transomd.api.wire import (
    MAX_CHECKPOINTS,
    Directive,
    FailureReport,
    Grant,
    LauncherReport,
    LaunchOrder,
    LaunchReport,
)
from transomd.health.judge import judge
from transomd.health.profile import Profile
from transomd.launch import stages
from transomd.launch.aside import Aside
from transomd.launch.daemon_link import DaemonLink
from transomd.launch.hub import AgentGone, Hub
from transomd.launch.order import arrange
from transomd.launch.pairing import pair
from transomd.launch.program import LaunchPlan, Program, slurm_env
from transomd.launch.rundir import COMPLETED, RunDir
from transomd.launch.watch import LogWatch
from transomd.spec import JobSpec
from transomd.tce.catalogue import list_checkpoints, newest_epoch
from transomd.tee import detect
from transomd.tee.progress import DEFAULT_PATTERN, Progress, Stall
from transomd.tee.types import Evidence
from transomd.words import ExitCode, LauncherPhase

log = logging.getLogger("transom.launcher")

TICK_S = 0.2
FENCE_S = 10.0
PROBE_S = 12.0
AGENTS_S = 30.0
"""How long agents may take to call before the launcher goes on without those that have not."""
AGENTS_AGAIN_S = 5.0
"""How soon agents are started again after an srun for them that came to nothing."""
TAKEOVER_S = 4.0
"""How long a new launcher waits for the agents that outlived the old one before it starts new ones."""
LAST_WORD_S = 60.0
"""How long the last report is tried before the launcher leaves."""
STOP_GRACE_S = 20.0
"""How long the program has from SIGTERM to SIGKILL when its allocation ends; Slurm's KillWait is 30 s by default."""
FLUSH_S = 27.0
"""How long the agents have to bring to storage what is in memory only; a little more than they take at most."""
LOOK_S = 5.0
"""How long a look at the checkpoint folder may take before it is given up; on a dead file system it takes for ever."""
ABSENT_S = 10.0
"""A daemon that is started anew is away for seconds: no restart on the grant before, however short its time-outs."""
ASK_AGAIN_S = 1.0
"""How soon a report that was not answered is sent again where the next move is the daemon's."""
EVIDENCE_LIMIT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The site's times, in seconds; handed over by the daemon in the batch script."""

    report_s: float = 30.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 15.0
    stall_after_s: float = 600.0
    first_step_after_s: float = 1800.0
    exit_grace_s: float = 5.0
    gate_timeout_s: float = 120.0

    @classmethod
    def from_json(cls, text: str, spec: JobSpec) -> Watch:
        """Read the site's times, and let the job's own win."""
        known = {f.name for f in fields(cls)}
        site = {k: float(v) for k, v in json.loads(text).items() if k in known}
        own = {
            "stall_after_s": spec.watch.stall_after,
            "first_step_after_s": spec.watch.first_step_after,
            "heartbeat_timeout_s": spec.watch.heartbeat_timeout,
        }
        return cls(**{**site, **{k: v for k, v in own.items() if v is not None}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Who this launcher is."""

    run_dir: RunDir
    job_id: int
    attempt: int
    generation: int
    slurm_job_id: int
    nodes: tuple[str, ...]
    host: str


class Launcher:
    """One launcher from its first report to its last."""

    def __init__(self, options: Options, link: DaemonLink, spec: JobSpec, watch: Watch) -> None:
        self.options = options
        self.link = link
        self.spec = spec
        self.watch = watch
        self.hub = Hub(options.run_dir.token(), time.monotonic)
        self.phase = LauncherPhase.GATE
        self.launches: list[LaunchReport] = []
        self.failure: FailureReport | None = None
        self._past_failures: list[FailureReport] = []
        self.message = ""
        self.exit_code: int | None = None
        self._program: Program | None = None
        self._logs: LogWatch | None = None
        self._past_step: int | None = None
        self._bad_exit_at: float | None = None
        self._agents: asyncio.subprocess.Process | None = None
        self._barred: set[str] = set()
        self._unfit: dict[str, str] = {}
        self._grant: Grant | None = None
        self._restarts_left = 0
        self._stop_by_signal = ""
        self._changed = True
        self._poll_s = 0.5
        self._reported_at = 0.0
        self._checkpoint: tuple[int, int, float] | None = None
        self._checkpoints: list[list[int]] = []
        self._newest_epoch = 0
        self._store = Aside(LOOK_S)
        self._aside = False
        self._agents_at = 0.0

    # --- life ---------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Do everything; return the exit code of the batch script."""
        if not self._claim():
            return int(ExitCode.GATE_REFUSED)
        if self.options.run_dir.claimed(COMPLETED):
            log.info("the program has ended with exit code 0 before; nobody heard of it")
            self.exit_code, self.phase = 0, LauncherPhase.DONE
        await self._call_agents()
        talking = asyncio.create_task(self._keep_talking())
        try:
            if self.options.generation > 1 and self.phase is LauncherPhase.GATE:
                await self._take_over()
            while (code := await self._tick()) is None:
                await asyncio.sleep(TICK_S)
            return code
        finally:
            talking.cancel()
            await self._leave()

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
                self._changed = True

    def stop_by_signal(self, name: str) -> None:
        """Note that Slurm (or a person) wants this allocation to end."""
        self._stop_by_signal = self._stop_by_signal or name

    def _claim(self) -> bool:
        me = {"slurm_job_id": self.options.slurm_job_id, "host": self.options.host, "pid": os.getpid()}
        run, attempt = self.options.run_dir, self.options.attempt
        owner = run.claim(f"attempt-{attempt}", me)
        if owner["slurm_job_id"] != self.options.slurm_job_id:
            log.error("attempt %d belongs to Slurm job %s; this one does not start", attempt, owner["slurm_job_id"])
            return False
        generation = f"generation-{attempt}-{self.options.generation}"
        if run.claim(generation, me) != me or run.newest_generation(attempt) > self.options.generation:
            log.error("launcher %d of attempt %d was started before", self.options.generation, attempt)
            return False
        return True

    def _superseded(self) -> bool:
        return self.options.run_dir.newest_generation(self.options.attempt) > self.options.generation

    async def _leave(self) -> None:
        await self._end_program()
        if not self._aside:
            # Slurm ends an agent's step without a warning, and its keeper may hold what is not on the disk yet.
            await self.hub.ask_all(self._alive(), "flush", FLUSH_S)
        if self._agents is not None and self._agents.returncode is None:
            self._agents.terminate()
            try:
                await asyncio.wait_for(self._agents.wait(), 10)
            except asyncio.TimeoutError:
                self._agents.kill()
        await self.hub.close()

    # --- agents -------------------------------------------------------------------------------------------------

    async def _call_agents(self) -> None:
        port = await self.hub.start()
        where = {
            "host": self.options.host,
            "port": port,
            "generation": self.options.generation,
            "slurm_job_id": self.options.slurm_job_id,
        }
        self.options.run_dir.write_json(self.options.run_dir.launcher_file, where)
        if self.options.generation > 1:
            await self._wait_for_agents(self.options.nodes, TAKEOVER_S)
        missing = sorted(set(self.options.nodes) - set(self._alive()))
        if missing:
            await self._start_agents(missing)
            await self._wait_for_agents(self.options.nodes, AGENTS_S)
        log.info("agents answer on %s", fold(self._alive()))

    async def _start_agents(self, nodes: list[str]) -> None:
        count, self._agents_at = len(nodes), time.monotonic()
        argv = ["srun", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", f"--nodes={count}"]
        argv += [f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--job-name=agents"]
        argv += ["--mem=0", sys.executable, "-m", "transomd.launch.agent"]
        argv += [f"--run-dir={self.options.run_dir.root}", f"--job={self.options.job_id}"]
        argv += [f"--heartbeat={self.watch.heartbeat_s}"]
        log_file = os.open(
            self.options.run_dir.root / "logs" / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        try:
            self._agents = await asyncio.create_subprocess_exec(
                *argv,
                env=slurm_env(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        finally:
            os.close(log_file)

    async def _agents_again(self) -> None:
        """Start agents anew when the srun that started them has ended: Slurm may not have answered it."""
        missing = sorted(set(self.options.nodes) - set(self._alive()) - self._barred)
        ended = self._agents is not None and self._agents.returncode is not None
        if ended and missing and time.monotonic() - self._agents_at > AGENTS_AGAIN_S:
            log.info("no agents on %s; starting them again", fold(missing))
            await self._start_agents(missing)

    async def _wait_for_agents(self, nodes: tuple[str, ...], within_s: float) -> None:
        end = time.monotonic() + within_s
        while set(nodes) - set(self._alive()) and time.monotonic() < end and not self._stop_by_signal:
            await asyncio.sleep(0.05)

    def _alive(self) -> list[str]:
        """The nodes of this allocation whose agents answer; one of an earlier allocation may call for a moment, too."""
        return [n for n in self.hub.alive(self.watch.heartbeat_timeout_s) if n in self.options.nodes]

    async def _take_over(self) -> None:
        """End what an older launcher started, and report it as failed."""
        epochs = self.options.run_dir.epochs()
        self._changed = True
        if not epochs:
            return
        detected = time.time()
        unfenced = await self._kill(epochs[-1], list(self.options.nodes))
        self.phase = LauncherPhase.FAILED
        self.message = "its launcher was lost"
        self.failure = FailureReport(
            epoch=epochs[-1],
            detected_at=detected,
            detected_by="takeover",
            lost_nodes=self._lost(self.options.nodes),
            fenced_at=time.time(),
            unfenced=unfenced,
        )

    # --- one tick -----------------------------------------------------------------------------------------------

    async def _tick(self) -> int | None:
        if self._stop_by_signal:
            return await self._stopped(f"signal {self._stop_by_signal}", 128 + signal.SIGTERM)
        if self.phase is LauncherPhase.RUNNING:
            await self._watch_program()
        elif self.phase in (LauncherPhase.GATE, LauncherPhase.FAILED):
            await self._agents_again()
        directive = await self._report_if_due()
        if directive is not None:
            return await self._obey(directive)
        if self.phase is LauncherPhase.DONE and self.link.silent_for() > LAST_WORD_S:
            return int(ExitCode.OK)
        await self._alone()
        return None

    async def _report_if_due(self) -> Directive | None:
        waits = self.phase is not LauncherPhase.RUNNING and self.link.silent_for() > 0.0
        poll_s = min(self._poll_s, ASK_AGAIN_S) if waits else self._poll_s
        if not self._changed and time.monotonic() - self._reported_at < poll_s:
            return None
        self._changed = False
        self._reported_at = time.monotonic()
        await self._look_for_checkpoint()
        return await self.link.report(self._report())

    def _report(self) -> LauncherReport:
        alive = self._alive()
        used = self.launches[-1].nodes if self.launches else []
        step, epoch, at = self._checkpoint or (None, None, None)
        if self.failure is not None and self.phase is LauncherPhase.FAILED:
            self.failure = replace(self.failure, lost_nodes=self._lost(used or self.options.nodes))
        return LauncherReport(
            job_id=self.options.job_id,
            attempt=self.options.attempt,
            slurm_job_id=self.options.slurm_job_id,
            generation=self.options.generation,
            host=self.options.host,
            phase=self.phase.value,
            at=time.time(),
            nodes=alive,
            lost=self._lost(self.options.nodes),
            unfit=self._unfit,
            launches=self.launches,
            failure=self.failure,
            past_failures=self._past_failures,
            checkpoint_step=step,
            checkpoint_epoch=epoch,
            checkpoint_at=at,
            checkpoints=self._checkpoints,
            **self._stages(),
            exit_code=self.exit_code,
            message=self.message,
        )

    def _stages(self) -> dict[str, Any]:
        nodes = self.launches[-1].nodes if self.launches else []
        folder = os.path.abspath(self.spec.checkpoint.dir)
        told = {n: [r for r in ranks if r["directory"] == folder] for n, ranks in self.hub.checkpoints(nodes).items()}
        ranks = [rank for each in told.values() for rank in each]
        return {
            "stages": stages.newest(ranks, len(nodes) * self.spec.tasks_per_node),
            "checkpoint_trouble": stages.trouble(told),
            "checkpoints_skipped": sum(rank["skipped"] for rank in ranks),
        }

    def _lost(self, nodes: Any) -> list[str]:
        return sorted(set(nodes) - set(self._alive()))

    async def _look_for_checkpoint(self) -> None:
        try:
            listed = await self._store.ask(list_checkpoints, self.spec.checkpoint.dir)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the checkpoint folder cannot be read: %s", str(error) or "it does not answer")
            return
        whole = [c for c in listed if c.complete]
        self._checkpoints = [[c.step, c.epoch] for c in whole[:MAX_CHECKPOINTS]]
        if whole:
            self._checkpoint = (whole[0].step, whole[0].epoch, whole[0].created)

    async def _obey(self, directive: Directive) -> int | None:
        self._poll_s = directive.poll_s
        self._barred = set(directive.barred)
        if directive.grant is not None:
            # The daemon has heard by now of every restart that was made on an older grant, and counted it.
            self._grant, self._restarts_left = directive.grant, directive.grant.restarts
        if directive.gate == "refuse":
            log.error("refused: %s", directive.message)
            return await self._refused()
        if self.phase is LauncherPhase.DONE and directive.stop:
            return int(ExitCode.OK)
        if directive.stop:
            return await self._stopped(directive.stop, int(ExitCode.LAUNCH_FAILED))
        running = self.phase is LauncherPhase.RUNNING
        if running and directive.fence_epoch == self.launches[-1].epoch:
            await self._fail("asked", directive.fence_reason or "transomd asked for it")
        elif directive.launch is not None and not running and self._is_new(directive.launch):
            await self._launch(directive.launch)
        return None

    def _is_new(self, order: LaunchOrder) -> bool:
        done = self.launches[-1].epoch if self.launches else 0
        failed = self.failure.epoch if self.failure else 0
        return self.phase is not LauncherPhase.DONE and order.epoch > max(done, failed)

    async def _refused(self) -> int:
        """Leave without a trace: somebody else owns this job now."""
        if self._superseded():
            await self._step_aside()
        else:
            await self._end_program()
        return int(ExitCode.GATE_REFUSED)

    async def _step_aside(self) -> None:
        """Do nothing until Slurm ends us: another launcher has taken over, and a job ends with its batch script."""
        log.info("stepping aside for launcher %d", self.options.run_dir.newest_generation(self.options.attempt))
        self._aside = True
        await self.hub.close()
        if self._program is not None:
            self._program.abandon()
            self._program = None
        if self._agents is not None and self._agents.returncode is None:
            # They outlive an srun that is killed, as after a power loss; one that is told to end takes them along.
            os.killpg(self._agents.pid, signal.SIGKILL)
        while not self._stop_by_signal:
            await asyncio.sleep(TICK_S)

    async def _stopped(self, why: str, code: int) -> int:
        log.info("stopping: %s", why)
        await self._end_program(grace_s=STOP_GRACE_S)
        self.phase = LauncherPhase.STOPPED
        self.message = why
        await self.link.report(self._report())
        return code

    # --- without the daemon -------------------------------------------------------------------------------------

    async def _alone(self) -> None:
        """Do what the grant allows while the daemon does not answer."""
        silent = self.link.silent_for()
        if self.phase is LauncherPhase.GATE and silent > self.watch.gate_timeout_s:
            log.info("transomd has been silent for %.0f s; opening the gate", silent)
            await self._launch_alone()
        elif self.phase is LauncherPhase.FAILED and silent > self._patience_s() and self._may_restart():
            self._restarts_left -= 1
            log.info("transomd has been silent for %.0f s; restarting on the grant", silent)
            await self._launch_alone()

    def _patience_s(self) -> float:
        return max(self.watch.heartbeat_timeout_s, ABSENT_S)

    def _may_restart(self) -> bool:
        grant, failure = self._grant, self.failure
        if grant is None or failure is None or self._restarts_left < 1 or time.time() > grant.until:
            return False
        found = [Evidence.from_json(e) for e in failure.evidence]
        return not any(e.role == "root" and e.blame == "program" for e in found)

    async def _launch_alone(self) -> None:
        usable = [n for n in self._alive() if n in self.options.nodes and n not in self._barred]
        usable = await self._not_unfit(usable)
        if len(usable) < self.spec.nodes:
            return
        before = set(self.launches[-1].nodes) if self.launches else set()
        chosen = sorted(sorted(usable, key=lambda n: n not in before)[: self.spec.nodes])
        epochs = self.options.run_dir.epochs()
        steps = [x.last_step for x in self.launches if x.last_step is not None]
        epoch = (epochs[-1] if epochs else 0) + 1
        past, back = max(steps, default=None), self._still_back(epochs)
        await self._launch(LaunchOrder(epoch=epoch, nodes=chosen, past_step=past, resume_step=back))

    def _still_back(self, epochs: list[int]) -> int | None:
        """Return the step that the newest launch was told to go back to, if nothing newer was saved since."""
        claim = self.options.run_dir.owner(f"epoch-{epochs[-1]:06d}") if epochs else {}
        back = claim.get("resume_step")
        return None if any(epoch >= epochs[-1] for _, epoch in self._checkpoints) else back

    async def _not_unfit(self, nodes: list[str]) -> list[str]:
        """Leave out the nodes that their own agents find unfit; what an agent cannot see (as the user) is unknown."""
        profile = Profile()
        facts = await self.hub.ask_all(nodes, "probe", PROBE_S, options=json.loads(profile.request(PROBE_S - 4)))
        gpus = self.spec.gpus_per_node or None
        for node in nodes:
            found = facts[node]
            if isinstance(found, dict):
                result = judge(node, found, profile, now=time.time(), allocated_gpus=gpus)
                self._unfit[node] = "; ".join(f"{r.check}: {r.evidence or r.value}" for r in result.unfit)
        self._unfit = {node: why for node, why in self._unfit.items() if why}
        for node, why in self._unfit.items():
            log.warning("%s is unfit: %s", node, why)
        return [n for n in nodes if n not in self._unfit]

    # --- a launch -----------------------------------------------------------------------------------------------

    async def _launch(self, order: LaunchOrder) -> None:
        wanted = list(order.nodes)
        order = replace(order, nodes=arrange(wanted, self._nodes_before(), self.options.nodes))
        epoch = await self._claim_epoch(order)
        if epoch is None:
            return
        self._past_step = order.past_step
        started = time.time()
        report = LaunchReport(
            epoch=epoch, nodes=list(order.nodes), started_at=started, resume_step=self._resume_step(order)
        )
        self.launches = [*self.launches[-20:], report]
        if self.failure is not None:
            self._past_failures = [*self._past_failures[-20:], self.failure]
        self.failure, self._bad_exit_at, self.message = None, None, ""
        self.phase, self._changed = LauncherPhase.RUNNING, True
        if len(order.nodes) != self.spec.nodes:
            await self._fail("start", f"{fold(wanted)} are not {self.spec.nodes} nodes of this launcher's")
            return
        try:
            await pair(self.hub, epoch, order.nodes, self._alive())
            port = int(await self.hub.ask(order.nodes[0], "port", 5.0))
            await self._start(order, epoch, port)
        except (AgentGone, OSError, ValueError) as error:
            await self._fail("start", f"epoch {epoch} could not be started: {error}")

    def _nodes_before(self) -> list[str]:
        """Return the nodes of the allocation's newest launch, by their ranks; a job's own script has Slurm's order."""
        epochs = self.options.run_dir.epochs()
        claim = self.options.run_dir.owner(f"epoch-{epochs[-1]:06d}") if epochs and not self.spec.script else {}
        here = claim.get("slurm_job_id") == self.options.slurm_job_id
        return list(claim.get("nodes", [])) if here else []

    def _resume_step(self, order: LaunchOrder) -> int | None:
        if order.resume_step is not None:
            return order.resume_step
        return self._checkpoint[0] if self._checkpoint else None

    async def _claim_epoch(self, order: LaunchOrder) -> int | None:
        if self._superseded():
            log.error("another launcher has taken over; starting nothing")
            return None
        # The checkpoint folder may have been used by an earlier job, whose epochs fence ours unless ours are newer.
        try:
            found = await self._store.ask(newest_epoch, self.spec.checkpoint.dir)
            self._newest_epoch = found or 0
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the checkpoint folder cannot be read: %s", str(error) or "it does not answer")
        epoch = max(order.epoch, self._newest_epoch + 1)
        me = {
            "slurm_job_id": self.options.slurm_job_id,
            "generation": self.options.generation,
            "at": time.time(),
            "resume_step": order.resume_step,
            "nodes": order.nodes,
        }
        while self.options.run_dir.claim(f"epoch-{epoch:06d}", me) is not me:
            epoch += 1
        return epoch

    async def _start(self, order: LaunchOrder, epoch: int, port: int) -> None:
        plan = LaunchPlan(
            job_id=self.options.job_id,
            attempt=self.options.attempt,
            epoch=epoch,
            nodes=tuple(order.nodes),
            resume_step=order.resume_step,
            master_port=port,
            spec=self.spec,
            env=self.options.run_dir.environment(),
            left_out=tuple(n for n in self.options.nodes if n not in order.nodes),
            arranged=order.nodes != arrange(order.nodes, (), self.options.nodes),
        )
        self._program = Program(self.options.run_dir, plan)
        self._logs = LogWatch(self._program.logs, self.spec, plan.nodes, self._progress())
        log.info("epoch %d starts on %s", epoch, fold(order.nodes))
        await self._program.start(os.environ)

    def _progress(self) -> Progress:
        return Progress(
            self.spec.watch.progress or DEFAULT_PATTERN,
            now=time.monotonic(),
            floor_s=self.watch.stall_after_s,
            first_s=self.watch.first_step_after_s,
        )

    async def _watch_program(self) -> None:
        program, logs = self._program, self._logs
        if program is None or logs is None:
            return
        final = program.rc is not None
        await asyncio.to_thread(logs.poll, time.time(), final)
        self._note_steps(logs)
        if final:
            await self._program_ended(program)
            return
        lost = self._lost(self.launches[-1].nodes)
        if lost:
            await self._fail("heartbeat", f"{fold(lost)} stopped answering")
            return
        if logs.failing and self._bad_exit_at is None:
            self._bad_exit_at = time.time()
        if self._bad_exit_at is not None and time.time() - self._bad_exit_at > self.watch.exit_grace_s:
            await self._fail("exit", logs.failing, detected_at=self._bad_exit_at)
            return
        stall = logs.stalled()
        if stall is not None:
            await self._hang(stall)

    def _note_steps(self, logs: LogWatch) -> None:
        launch = self.launches[-1]
        if logs.step is None or logs.step == launch.last_step:
            return
        past = self._past_step
        new_at = launch.new_step_at
        if new_at is None and (past is None or logs.step > past):
            new_at = logs.step_at
            self._changed = True
        self.launches[-1] = replace(
            launch,
            first_step=launch.first_step if launch.first_step is not None else logs.first_step,
            first_step_at=launch.first_step_at or logs.first_step_at,
            last_step=logs.step,
            last_step_at=logs.step_at,
            new_step_at=new_at,
        )

    async def _program_ended(self, program: Program) -> None:
        if program.rc == 0:
            self.options.run_dir.claim(COMPLETED, {"epoch": self.launches[-1].epoch, "at": time.time()})
            self.exit_code, self.phase, self._changed = 0, LauncherPhase.DONE, True
            self.launches[-1] = replace(self.launches[-1], ended_at=time.time(), end_reason="completed")
            log.info("the program ended with exit code 0")
            return
        await self._fail("exit", f"srun ended with exit code {program.rc}", detected_at=self._bad_exit_at)

    async def _hang(self, stall: Stall) -> None:
        """Before a hung launch is killed, take down what every rank is doing."""
        answers = await self.hub.ask_all(self.launches[-1].nodes, "ranks", 5.0)
        states = [
            detect.ProcessState(rank=p["rank"], node=node, pid=p["pid"], state=p["state"])
            for node, found in answers.items()
            if isinstance(found, list)
            for p in found
            if p["rank"] is not None and p["epoch"] == self.launches[-1].epoch
        ]
        evidence = detect.no_progress(stall, time.time(), states)
        where = f" after step {stall.step}" if stall.step is not None else ""
        await self._fail("stall", f"no progress for {stall.seconds:.0f} s{where}", more=evidence)

    async def _fail(
        self, by: str, why: str, *, detected_at: float | None = None, more: list[Evidence] | None = None
    ) -> None:
        """End the launch and say how it failed."""
        detected = detected_at or time.time()
        log.info("epoch %d failed (%s): %s", self.launches[-1].epoch, by, why)
        launch = self.launches[-1]
        evidence = list(more or [])
        lost = self._lost(launch.nodes)
        for node in lost:
            evidence.append(detect.heartbeat_lost(node, time.time() - (self.hub.silent_for(node) or 0.0)))
        unfenced = await self._end_program()
        if self._logs is not None:
            await asyncio.to_thread(self._logs.poll, time.time(), True)
            self._note_steps(self._logs)
            evidence += self._logs.evidence(self.hub.addresses())
        self.launches[-1] = replace(self.launches[-1], ended_at=time.time(), end_reason=why)
        self.failure = FailureReport(
            epoch=launch.epoch,
            detected_at=detected,
            detected_by=by,
            evidence=[e.to_json() for e in evidence[:EVIDENCE_LIMIT]],
            lost_nodes=lost,
            fenced_at=time.time(),
            unfenced=unfenced,
        )
        self.phase, self.message, self._changed = LauncherPhase.FAILED, why, True

    async def _end_program(self, *, grace_s: float = 0.0) -> list[str]:
        """End every process of the launch on every node that answers; return the nodes that do not."""
        if not self.launches:
            return []
        launch = self.launches[-1]
        unfenced = await self._kill(launch.epoch, list(launch.nodes), grace_s=grace_s)
        if self._program is not None:
            await self._program.stop()
            self._program = None
        return unfenced

    async def _kill(self, epoch: int, nodes: list[str], *, grace_s: float = 0.0) -> list[str]:
        alive = [n for n in nodes if n in self._alive()]
        answers = await self.hub.ask_all(alive, "kill", FENCE_S + grace_s, epoch=epoch, grace_s=grace_s)
        stuck = [n for n, left in answers.items() if isinstance(left, Exception) or left]
        return sorted({*stuck, *(set(nodes) - set(alive))})


def _options(argv: list[str] | None) -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="transom-launcher")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--watch", default="{}")
    parser.add_argument("--nodes", default="", help="the nodes that are left, for a launcher that takes over")
    args = parser.parse_args(argv)
    names = args.nodes or os.environ["SLURM_JOB_NODELIST"]
    options = Options(
        run_dir=RunDir(args.run_dir),
        job_id=args.job,
        attempt=args.attempt,
        generation=args.generation,
        slurm_job_id=int(os.environ["SLURM_JOB_ID"]),
        nodes=tuple(expand(names)),
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0],
    )
    return options, args


async def _amain(options: Options, args: argparse.Namespace) -> int:
    spec = JobSpec.from_stored(options.run_dir.spec())
    link = DaemonLink(args.daemon, options.run_dir.token())
    launcher = Launcher(options, link, spec, Watch.from_json(args.watch, spec))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, launcher.stop_by_signal, number.name)
    return await launcher.run()


def main(argv: list[str] | None = None) -> int:
    """Run as a batch script, or as the step of a launcher that takes over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    options, args = _options(argv)
    log.info("launcher %d of attempt %d on %s", options.generation, options.attempt, options.host)
    return asyncio.run(_amain(options, args))


if __name__ == "__main__":
    sys.exit(main())
