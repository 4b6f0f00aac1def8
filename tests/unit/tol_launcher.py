"""A launcher, its agents and its program in virtual time: it does with directives what the real launcher does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transomd.api.wire import Directive, FailureReport, Grant, LauncherReport, LaunchOrder, LaunchReport
from transomd.launch.deputy import ABSENT_S
from transomd.launch.launcher import ASK_AGAIN_S
from transomd.tee import detect
from transomd.tee.types import Evidence
from transomd.words import ExitCode, LauncherPhase

if TYPE_CHECKING:
    from tol_world import SimWorld

TOKEN = "t" * 32


@dataclass
class SimRun:
    """What the launchers of one job share through the run folder, and what the program has saved."""

    claims: dict[str, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    saved: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False


class SimLauncher:
    """One launcher. ``left`` is its exit code once it has gone; a lost node takes it without one."""

    def __init__(self, world: SimWorld, job_id: int, attempt: int, slurm_id: int, generation: int, host: str) -> None:
        self.world, self.job_id, self.attempt, self.slurm_id = world, job_id, attempt, slurm_id
        self.generation, self.host = generation, host
        self.nodes = list(world.slurm.all_jobs()[slurm_id].nodes)
        self.phase = LauncherPhase.DONE if world.runs[job_id].ended else LauncherPhase.GATE
        self.past_failures: list[FailureReport] = []
        self.launches: list[LaunchReport] = []
        self.failure: FailureReport | None = None
        self.message = ""
        self.left: int | None = None
        self.gone = False
        self.deaf_until = 0.0
        self.obedient = True
        self.idle = False
        self._beats = dict.fromkeys(self.nodes, -1e9)
        self._ready_at = world.now + world.boot_s
        self._taken_over = generation == 1
        self._order: LaunchOrder | None = None
        self._step_at = 0.0
        self._reported_at = -1e9
        self._unanswered_at: float | None = None
        self._poll_s = 0.5
        self._changed = True
        self._grant: Grant | None = None
        self._granted_at = 0.0
        self._restarts_left = 0
        self._barred: set[str] = set()

    @property
    def run(self) -> SimRun:
        return self.world.runs[self.job_id]

    # --- one moment -------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        if self.gone:
            return
        if self.host in self.world.off:
            self.gone = True
            return
        job = self.world.slurm.all_jobs().get(self.slurm_id)
        if job is not None and job.end_time is not None:
            await self._leave(143, "signal SIGTERM")
            return
        self._beat()
        if self.world.now < self._ready_at or self.idle:
            return
        if not self._taken_over:
            self._take_over()
        if self.phase is LauncherPhase.RUNNING:
            self._watch()
        directive = await self._report_if_due()
        if directive is not None:
            await self._obey(directive)
        elif self.phase is LauncherPhase.DONE and self._silent() > 60:
            await self._leave(0, "")
        else:
            self._alone()

    def _beat(self) -> None:
        for node in self.nodes:
            if self.world.agent_answers(self.host, node):
                self._beats[node] = self.world.now

    def alive(self) -> list[str]:
        return [
            n for n in self.nodes if self.world.now - self._beats[n] <= self.world.settings.watch.heartbeat_timeout_s
        ]

    def _lost(self, nodes: Iterable[str]) -> list[str]:
        return sorted(set(nodes) - set(self.alive()))

    def _take_over(self) -> None:
        self._taken_over = True
        if self.run.epochs and self.phase is LauncherPhase.GATE:
            epoch = max(self.run.epochs)
            unfenced = self._kill(epoch, self.nodes)
            self.phase, self.message = LauncherPhase.FAILED, "its launcher was lost"
            self._failed(epoch, "takeover", [], unfenced, self.world.now)

    # --- the daemon -------------------------------------------------------------------------------------------------

    def _silent(self) -> float:
        return 0.0 if self._unanswered_at is None else self.world.now - self._unanswered_at

    async def _report_if_due(self) -> Directive | None:
        waits = self.phase is not LauncherPhase.RUNNING and self._unanswered_at is not None
        poll_s = min(self._poll_s, ASK_AGAIN_S) if waits else self._poll_s
        if not self._changed and self.world.now - self._reported_at < poll_s:
            return None
        self._changed, self._reported_at = False, self.world.now
        return await self._send()

    async def _send(self) -> Directive | None:
        directive = None
        if self.world.now >= self.deaf_until and self.host not in self.world.cut:
            directive = await self.world.deliver(self.report())
        if directive is not None:
            self._unanswered_at = None
        elif self._unanswered_at is None:
            self._unanswered_at = self.world.now
        return directive

    def report(self) -> LauncherReport:
        if self.failure is not None:
            used = self.launches[-1].nodes if self.launches else self.nodes
            self.failure = replace(self.failure, lost_nodes=self._lost(used))
        return LauncherReport(
            job_id=self.job_id,
            attempt=self.attempt,
            slurm_job_id=self.slurm_id,
            generation=self.generation,
            host=self.host,
            phase=self.phase.value,
            at=self.world.now,
            nodes=self.alive(),
            lost=self._lost(self.nodes),
            launches=list(self.launches),
            failure=self.failure if self.phase is LauncherPhase.FAILED else None,
            past_failures=list(self.past_failures),
            checkpoint_step=self.run.saved or None,
            checkpoints=[[step, epoch] for epoch, step in sorted(self.run.checkpoints, reverse=True)],
            message=self.message,
        )

    async def _obey(self, directive: Directive) -> None:
        self._poll_s, self._barred = directive.poll_s, set(directive.barred)
        if directive.grant is not None:
            self._grant, self._restarts_left = directive.grant, directive.grant.restarts
            self._granted_at = self.world.now
        if directive.gate == "refuse" and self._superseded():
            # The end of the batch script would end the Slurm job, and with it the launcher that took over.
            self.idle = True
        elif directive.gate == "refuse":
            await self._leave(int(ExitCode.GATE_REFUSED), "refused", tell=False)
        elif self.phase is LauncherPhase.DONE and directive.stop:
            await self._leave(0, "", tell=False)
        elif directive.stop:
            await self._leave(int(ExitCode.LAUNCH_FAILED), directive.stop)
        elif not self.obedient:
            return
        elif self.phase is LauncherPhase.RUNNING:
            if directive.fence_epoch == self.launches[-1].epoch:
                self.fail("asked", directive.fence_reason)
        elif directive.launch is not None and self._is_new(directive.launch):
            self._launch(directive.launch)

    def _superseded(self) -> bool:
        newer = f"generation-{self.attempt}-{self.generation + 1}"
        return newer in self.run.claims

    def _is_new(self, order: LaunchOrder) -> bool:
        done = self.launches[-1].epoch if self.launches else 0
        failed = self.failure.epoch if self.failure else 0
        return self.phase is not LauncherPhase.DONE and order.epoch > max(done, failed)

    def _alone(self) -> None:
        gate = self.phase is LauncherPhase.GATE and self._silent() > self.world.settings.health.gate_timeout_s
        waits = self._silent() > max(self.world.settings.watch.heartbeat_timeout_s, ABSENT_S)
        granted = (
            self._grant is not None
            and self._restarts_left > 0
            and self.world.now - self._granted_at < self._grant.for_s
        )
        if self.phase is LauncherPhase.FAILED and waits and granted:
            self._restarts_left -= 1
        elif not gate:
            return
        usable = [n for n in self.alive() if n not in self._barred]
        need = self.world.specs[self.job_id].nodes
        if len(usable) >= need:
            before = set(self.launches[-1].nodes) if self.launches else set()
            chosen = sorted(sorted(usable, key=lambda n: n not in before)[:need])
            self._launch(LaunchOrder(epoch=max(self.run.epochs, default=0) + 1, nodes=chosen))

    async def _leave(self, code: int, why: str, *, tell: bool = True) -> None:
        if self.launches:
            self._kill(self.launches[-1].epoch, self.launches[-1].nodes)
        self.left, self.message = code, why
        if tell:
            self.phase = LauncherPhase.STOPPED
            await self._send()
        self.gone = True
        job = self.world.slurm.all_jobs().get(self.slurm_id)
        if self.generation == 1 and job is not None and job.end_time is None:
            self.world.slurm.finish(self.slurm_id, code)

    # --- the program ------------------------------------------------------------------------------------------------

    def _launch(self, order: LaunchOrder) -> None:
        epoch = order.epoch
        while epoch in self.run.epochs:
            epoch += 1
        self.run.epochs[epoch] = self.slurm_id
        self._order = order
        nodes = [n for n in self.nodes if n in order.nodes]
        resumed = self._resume(order)
        self.launches.append(LaunchReport(epoch=epoch, nodes=nodes, started_at=self.world.now, resume_step=resumed))
        self.past_failures += [self.failure] if self.failure is not None else []
        self.failure, self.message, self.phase, self._changed = None, "", LauncherPhase.RUNNING, True
        self._step_at = self.world.now
        self.world.program_starts(self.job_id, epoch, nodes)
        if self._lost(nodes):
            self.fail("start", f"epoch {epoch} could not be started")

    def _resume(self, order: LaunchOrder) -> int | None:
        """Where the site saves only now and then, go back to the newest checkpoint that the order allows."""
        if not self.world.save_every:
            return None
        limit = order.resume_step
        allowed = [(epoch, step) for epoch, step in self.run.checkpoints if limit is None or step <= limit]
        self.run.saved = max(allowed)[1] if allowed else 0
        return self.run.saved or None

    def _save(self, step: int) -> None:
        """Keep the three newest checkpoints, as retention does."""
        if self.world.save_every and step % self.world.save_every == 0:
            self.run.checkpoints = sorted([*self.run.checkpoints, (self.launches[-1].epoch, step)])[-3:]

    def _watch(self) -> None:
        launch = self.launches[-1]
        lost = self._lost(launch.nodes)
        if lost:
            self.fail("heartbeat", f"{','.join(lost)} stopped answering")
            return
        whole = all(self.world.agent_answers(self.host, n) for n in launch.nodes)
        while whole and self.world.now - self._step_at >= 1.0 and self.phase is LauncherPhase.RUNNING:
            self._step_at += 1.0
            self._step(self.run.saved + 1)

    def _step(self, step: int) -> None:
        launch, at = self.launches[-1], self._step_at
        past = self._order.past_step if self._order else None
        new = launch.new_step_at is None and (past is None or step > past)
        self._changed = self._changed or new
        self.run.saved = step
        self._save(step)
        self.launches[-1] = replace(
            launch,
            first_step=launch.first_step or step,
            first_step_at=launch.first_step_at or at,
            last_step=step,
            last_step_at=at,
            new_step_at=at if new else launch.new_step_at,
        )
        if step >= self.world.steps:
            self.phase, self._changed, self.run.ended = LauncherPhase.DONE, True, True
            self.launches[-1] = replace(self.launches[-1], ended_at=at, end_reason="completed")
            self._kill(launch.epoch, launch.nodes)
        self.world.stepped(self, step)

    def fail(self, by: str, why: str, evidence: Sequence[Evidence] = ()) -> None:
        """End the launch and say how it failed."""
        launch = self.launches[-1]
        found = [*evidence, *detect.silent({n: self._beats[n] for n in self._lost(launch.nodes)}, self.host)]
        unfenced = self._kill(launch.epoch, launch.nodes)
        self.launches[-1] = replace(launch, ended_at=self.world.now, end_reason=why)
        self.phase, self.message, self._changed = LauncherPhase.FAILED, why, True
        self._failed(launch.epoch, by, found, unfenced, self.world.now)

    def _failed(self, epoch: int, by: str, found: list[Evidence], unfenced: list[str], at: float) -> None:
        self.failure = FailureReport(
            epoch=epoch,
            detected_at=at,
            detected_by=by,
            evidence=[e.to_json() for e in found],
            lost_nodes=self._lost(self.launches[-1].nodes if self.launches else self.nodes),
            fenced_at=at,
            unfenced=unfenced,
        )

    def _kill(self, epoch: int, nodes: Iterable[str]) -> list[str]:
        reached = [n for n in nodes if n in self.alive() and self.world.agent_answers(self.host, n)]
        stuck = self.world.end_processes(self.job_id, epoch, reached)
        return sorted({*stuck, *(set(nodes) - set(reached))})
