"""A whole site in virtual time: Slurm in memory, a real store, the real daemon's parts, launchers and nodes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any

from tol_launcher import TOKEN, SimLauncher, SimRun
from transom_slurm.errors import SlurmRejected, SlurmUnavailable
from transom_slurm.fake import FakeSlurm
from transom_slurm.types import SlurmJob, SubmitRequest
from transom_sql.engine import memory_store
from transom_sql.records import Event, Incident, Job

from transomd.api.wire import Directive, LauncherReport
from transomd.health.types import CheckResult, CollectiveReport, NodeReport
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.act import Actor
from transomd.tol.loop import Operator
from transomd.tol.observe import Observer
from transomd.tol.submission import submit_request
from transomd.tol.view import JobView
from transomd.words import JobState, Outcome

WRITES = frozenset({"add_job", "commit", "finish_intent", "retry_intent", "add_events"})
EFFECTS = frozenset({"submit", "cancel", "drain", "resume", "fence", "start_launcher"})


def quick_settings(**sections: Mapping[str, Any]) -> Settings:
    """Return a site with short times, where lost nodes and failed checks are drained."""
    base: dict[str, dict[str, Any]] = {
        "daemon": {"cycle_s": 2.0},
        "watch": {
            "report_s": 4.0,
            "heartbeat_timeout_s": 4.0,
            "launcher_silence_s": 12.0,
            "launcher_start_s": 40.0,
        },
        "health": {"interval_s": 10.0, "gate_timeout_s": 20.0, "modes": {"xid": "drain", "gpu-count": "drain"}},
        "drain": {"node_loss": "drain", "max_fraction": 0.5},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Settings.model_validate(base)


class Killed(BaseException):
    """The daemon was ended by SIGKILL at this point: nothing in it may catch this."""


class Inline(Executor):
    """Runs a call at once, so that virtual time is all the time there is."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Cluster(FakeSlurm):
    """The fake, with looks into it that are no queries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accepted: list[str] = []
        self.refuses_to_leave_out = False

    async def submit(self, request: SubmitRequest) -> int:
        if self.refuses_to_leave_out and any(option.startswith("--exclude=") for option in request.options):
            raise SlurmRejected("sbatch", "Requested node configuration is not available")
        return await super().submit(request)

    def _accept(self, request: SubmitRequest) -> int:
        self.accepted.append(request.name)
        return super()._accept(request)

    def all_jobs(self) -> dict[int, SlurmJob]:
        return {job_id: job.view() for job_id, job in self._jobs.items()}

    def powered(self, node: str) -> bool:
        return self._nodes[node].responding


class Points:
    """Every place at which the daemon can be killed: before and after each write and each effect."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.passed: list[str] = []
        self.kill_at = kill_at

    def reach(self, name: str) -> bool:
        """Count a point; return whether the daemon dies here."""
        self.passed.append(name)
        return len(self.passed) - 1 == self.kill_at


class Guarded:
    """A part of the world as one daemon sees it: a dead daemon sees nothing and does nothing."""

    def __init__(self, target: Any, world: SimWorld, daemon: int) -> None:
        self._target, self._world, self._daemon = target, world, daemon

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._target, name)
        if not callable(call):
            return call
        if asyncio.iscoroutinefunction(call):
            return lambda *a, **k: self._asynchronous(name, call, a, k)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._synchronous(name, call, args, kwargs)

        guarded.__name__ = name
        return guarded

    def _pass(self, name: str, where: str) -> None:
        if self._world.daemon != self._daemon or self._world.dead:
            raise Killed(name)
        if name in WRITES | EFFECTS and self._world.points.reach(f"{where} {name}"):
            self._world.dead = True
            raise Killed(name)

    def _synchronous(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._pass(name, "before")
        try:
            return call(*args, **kwargs)
        finally:
            self._pass(name, "after")

    async def _asynchronous(self, name: str, call: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> Any:
        self._pass(name, "before")
        if isinstance(self._target, FakeSlurm) and self._world.now < self._world.hang_until:
            await self._world.sleep(self._world.hang_s)
            raise SlurmUnavailable(name, f"no answer within {self._world.hang_s:.0f} s")
        try:
            return await call(*args, **kwargs)
        finally:
            self._pass(name, "after")


class SimWorld:
    """The site. ``off`` nodes have no power, ``cut`` ones no network, ``unheard`` ones no agent.

    ``unfit`` maps nodes to checks that fail there, each with its signature after a colon, if it has one.
    """

    def __init__(
        self, nodes: int = 5, *, settings: Settings | None = None, kill_at: int | None = None, **slurm: Any
    ) -> None:
        self.settings = settings or quick_settings()
        self.slurm = Cluster(nodes, **slurm)
        self.store = memory_store()
        self.points = Points(kill_at)
        self.runs: dict[int, SimRun] = {}
        self.specs: dict[int, JobSpec] = {}
        self.launchers: list[SimLauncher] = []
        self.off: set[str] = set()
        self.cut: set[str] = set()
        self.unfit: dict[str, list[str]] = {}
        self.unfenceable: set[str] = set()
        self.unprobed: set[str] = set()
        self.unheard: set[str] = set()
        self.processes: dict[str, set[tuple[int, int]]] = {}
        self.launched: list[tuple[int, int, tuple[str, ...]]] = []
        self.overlaps: list[str] = []
        self.steps = 30
        self.save_every = 0
        self.boot_s = 1.0
        self.restart_after = 2.0
        self.daemon = 0
        self.dead = True
        self.kills = 0
        self.operator: Operator | None = None
        self._observer: Observer | None = None
        self._restart_at: float | None = None
        self._sleeping: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stepping: asyncio.Task[str] | None = None
        self.hang_until = 0.0
        self.hang_s = 0.0
        self._seen: set[int] = set()
        self._on_step: dict[int, Callable[[SimLauncher], None]] = {}

    @property
    def now(self) -> float:
        return self.slurm.now

    # --- the daemon -------------------------------------------------------------------------------------------------

    async def start_daemon(self) -> None:
        self.daemon += 1
        self.dead = False
        slurm, reach = Guarded(self.slurm, self, self.daemon), Guarded(SimReach(self), self, self.daemon)
        self._observer = Observer(slurm, reach, self.slurm.clock, changed=lambda: None)
        actor = Actor(slurm, reach, self.settings, self.slurm.clock)
        store: Any = Guarded(self.store, self, self.daemon)
        self.operator = Operator(store, self._observer, actor, self.settings, self.slurm.clock, executor=Inline())
        await self.operator.start()

    async def stop_daemon(self, *, restart_after: float | None = None) -> None:
        """End it as SIGKILL does: whatever is under way ends where it stands."""
        operator, self.operator = self.operator, None
        self.dead = True
        self.kills += 1
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
            self._stepping = None
        if operator is not None:
            await operator.close()
        self._sleeping = {task for task in self._sleeping if not task.done()}
        self._restart_at = None if restart_after is None else self.now + restart_after

    async def deliver(self, report: LauncherReport) -> Directive | None:
        if self.operator is None or self.dead:
            return None
        try:
            return await self.operator.report(LauncherReport.from_json(report.to_json()), TOKEN)
        except Killed:
            return None

    async def submit(self, spec: Mapping[str, Any] | None = None) -> int:
        """Hand a job to the daemon, and again if the daemon dies before it has answered."""
        values = {"name": "train", "command": "true", "nodes": 3, "spares": 1, **(spec or {})}
        values.setdefault("health", {"collective": False})
        read = JobSpec.from_stored(values)
        job = Job(
            name=read.name,
            user="root",
            uid=0,
            spec=read.model_dump(mode="json"),
            run_dir="/run/job",
            cwd="/",
            token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest(),
            state=JobState.SUBMITTED.value,
            reason="recorded",
            created_at=self.now,
            changed_at=self.now,
        )
        number = len(self.runs) + 1
        self.runs[number], self.specs[number] = SimRun(), read
        assert self.operator is not None
        try:
            await self.operator.submit(job)
        except Killed:
            if self.store.job(number) is None:
                await self.stop_daemon()
                await self.start_daemon()
                assert self.operator is not None
                await self.operator.submit(job)
        return number

    # --- time -------------------------------------------------------------------------------------------------------

    async def tick(self, seconds: float = 0.5) -> None:
        self.slurm.advance(seconds)
        self._slurm_starts_launchers()
        self._slurm_ends_processes()
        for launcher in list(self.launchers):
            await launcher.tick()
        await self._quiet()
        if self.operator is not None and not self.dead and self._stepping is None:
            self._stepping = asyncio.create_task(self.operator.step())
            await self._quiet()
        self._note_deaths()
        if self._stepping is not None and self._stepping.done():
            stepped, self._stepping = self._stepping, None
            with contextlib.suppress(Killed):
                stepped.result()
        if self.operator is not None and self.dead:
            await self.stop_daemon(restart_after=self.restart_after)
        if self._restart_at is not None and self.now >= self._restart_at:
            self._restart_at = None
            await self.start_daemon()

    def _note_deaths(self) -> None:
        """Tasks of a killed daemon end with Killed; that is seen here, and nowhere else."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self._tasks = {task for task in self._tasks if not task.done()}

    async def _quiet(self) -> None:
        """Let every task run until only those are left that wait for virtual time."""
        me = asyncio.current_task()
        while {task for task in asyncio.all_tasks() if task is not me} - self._sleeping:
            self._tasks |= {task for task in asyncio.all_tasks() if task is not me}
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def sleep(self, seconds: float) -> None:
        """Wait for virtual time."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.current_task()
        assert task is not None

        def wake() -> None:
            self._sleeping.discard(task)
            if not done.done():
                done.set_result(None)

        self.slurm.at(seconds, wake)
        self._sleeping.add(task)
        try:
            await done
        finally:
            self._sleeping.discard(task)

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until:
            await self.tick()

    async def until(self, ready: Callable[[], object], what: str = "", within_s: float = 600.0) -> None:
        """Let time pass until something is so; fail with the story so far."""
        until = self.now + within_s
        while not ready():
            if self.now > until:
                raise AssertionError(f"not within {within_s:.0f} s: {what}\n{self.story()}")
            await self.tick()

    async def end(self, job: int = 1, within_s: float = 900.0) -> JobState:
        """Let time pass until the job is over and nothing is left to do; return how it ended."""
        await self.until(lambda: self.state(job).final, "the job ends", within_s)
        await self.until(lambda: not self.store.intents(states=["pending"]), "every act is done", within_s)
        return self.state(job)

    # --- Slurm and the nodes ----------------------------------------------------------------------------------------

    def _slurm_starts_launchers(self) -> None:
        for slurm_id, job in self.slurm.all_jobs().items():
            over = job.end_time is not None
            if slurm_id in self._seen or not job.nodes or over or not job.comment.startswith("transom:"):
                continue
            self._seen.add(slurm_id)
            _, number, attempt = job.comment.split(":")
            self._claim_and_start(int(number), int(attempt), slurm_id, 1, job.batch_host)

    def _claim_and_start(self, number: int, attempt: int, slurm_id: int, generation: int, host: str) -> bool:
        claims = self.runs[number].claims
        if claims.setdefault(f"attempt-{attempt}", slurm_id) != slurm_id:
            self.slurm.finish(slurm_id, 93)
            return False
        if f"generation-{attempt}-{generation}" in claims:
            return False
        claims[f"generation-{attempt}-{generation}"] = slurm_id
        self.launchers.append(SimLauncher(self, number, attempt, slurm_id, generation, host))
        return True

    def start_launcher(self, number: int, attempt: int, slurm_id: int, generation: int, host: str) -> None:
        if host in self.off or host in self.cut:
            raise RuntimeError(f"srun: no answer from {host}")
        self._claim_and_start(number, attempt, slurm_id, generation, host)

    def _slurm_ends_processes(self) -> None:
        """slurmd ends what a job leaves behind, where slurmctld reaches it."""
        jobs = [job for job in self.slurm.all_jobs().values() if job.comment.startswith("transom:")]
        running = {job.comment.split(":")[1] for job in jobs if job.nodes and job.end_time is None}
        for node, found in self.processes.items():
            if self.slurm.powered(node) and node not in self.cut:
                found -= {p for p in found if str(p[0]) not in running and not self.slurm_forgot}

    slurm_forgot = False

    def agent_answers(self, host: str, node: str) -> bool:
        """Whether the agent on ``node`` is heard by a launcher on ``host``."""
        apart = host != node and (node in self.cut or host in self.cut)
        return node not in self.off | self.unheard and not apart

    def hang(self, seconds: float, each_s: float) -> None:
        """Let every question to Slurm of this span go unanswered, each after so many seconds."""
        self.hang_until, self.hang_s = self.now + seconds, each_s

    async def stranger(self) -> int:
        """Submit somebody else's job that runs for ever; return its id."""
        request = SubmitRequest(script="#!/bin/sh", options=("--nodes=1",), name="other", comment="", cwd="/")
        number = await self.slurm.submit(request)
        self.slurm.advance()
        return number

    def power_loss(self, node: str) -> None:
        self.off.add(node)
        self.processes.pop(node, None)
        self.slurm.fail_node(node)

    def cable_cut(self, node: str) -> None:
        self.cut.add(node)
        self.slurm.fail_node(node)

    def at_step(self, step: int, act: Callable[[SimLauncher], None]) -> None:
        """Do something when the program has done a step for the first time."""
        self._on_step[step] = act

    def stepped(self, launcher: SimLauncher, step: int) -> None:
        for due in sorted(s for s in self._on_step if s <= step):
            self._on_step.pop(due)(launcher)

    def program_starts(self, job: int, epoch: int, nodes: Iterable[str]) -> None:
        self.launched.append((job, epoch, tuple(nodes)))
        for node in nodes:
            if node in self.off:
                continue
            here = self.processes.setdefault(node, set())
            self.overlaps += [f"{node}: {p} still runs beside epoch {epoch}" for p in here if p[0] == job]
            here.add((job, epoch))

    def end_processes(self, job: int, epoch: int, nodes: Iterable[str]) -> list[str]:
        """End a job's processes up to an epoch; return the nodes where that was not possible."""
        stuck = []
        for node in nodes:
            if node in self.unfenceable:
                stuck.append(node)
            else:
                here = self.processes.get(node, set())
                here -= {p for p in here if p[0] == job and p[1] <= epoch}
        return stuck

    # --- what came of it --------------------------------------------------------------------------------------------

    def view(self, job: int = 1) -> JobView:
        assert self.operator is not None
        found = self.operator.view(job) or self.operator.read(job)
        assert found is not None
        return found

    def job(self, job: int = 1) -> Job:
        found = self.store.job(job)
        assert found is not None
        return found

    def state(self, job: int = 1) -> JobState:
        known = self.operator.view(job) if self.operator is not None else None
        return known.state if known is not None else JobState(self.job(job).state)

    def incidents(self, job: int = 1) -> list[Incident]:
        return list(self.store.incidents(job))

    def events(self, kind: str = "") -> list[Event]:
        return [e for e in self.store.events() if not kind or e.kind == kind]

    def calls(self, verb: str) -> list[tuple[Any, ...]]:
        """Return the arguments of each answered call of a verb."""
        return [call.args for call in self.slurm.calls if call.verb == verb and call.answered]

    def drained(self) -> list[str]:
        """Return the node of each drain that was carried out, in order."""
        return [str(args[0]) for args in self.calls("drain")]

    def story(self) -> str:
        """Return what a person would look at."""
        start = self.store.events()[0].at if self.store.events() else 0.0
        lines = [f"{e.at - start:8.1f} {e.kind:14} {e.message}" for e in self.store.events()]
        jobs = [f"job {j.id}: {j.state}: {j.reason}" for j in self.store.jobs()]
        intents = [f"{i.key}: {i.state} {dict(i.outcome)}" for i in self.store.intents()]
        return "\n".join([*lines, *jobs, *intents, f"now {self.now - start:.1f}, killed at {self.points.kill_at}"])

    def check(self) -> None:
        """Assert what must hold however a story goes."""
        tags = {attempt.tag for number in self.runs for attempt in self.store.attempts(number)}
        submitted = self.slurm.accepted
        assert sorted(submitted) == sorted(set(submitted)), f"submitted twice: {submitted}\n{self.story()}"
        assert set(submitted) <= tags, f"{submitted}: not all of them are recorded"
        for number in self.runs:
            epochs = [epoch for job, epoch, _ in self.launched if job == number]
            assert epochs == sorted(set(epochs)), f"epochs of job {number}: {epochs}\n{self.story()}"
        assert not self.overlaps, f"{self.overlaps}\n{self.story()}"
        drained = self.drained()
        assert sorted(drained) == sorted(set(drained)), f"drained twice: {drained}"

    async def close(self) -> None:
        await self.stop_daemon()
        self.store.close()


class SimReach:
    """The nodes as the daemon reaches them over SSH."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def _reaches(self, node: str) -> bool:
        return node not in self._world.off | self._world.cut | self._world.unprobed

    async def probe(self, nodes: Iterable[str], view: JobView, told: Callable[[NodeReport], None]) -> None:
        apart = [node for node in nodes if not self._reaches(node)]
        for node in nodes:
            if node not in apart:
                told(self._report(node))
        if apart:
            await self._world.sleep(5.0)
        for node in apart:
            told(NodeReport(node=node, at=self._world.now, reached=False, error="no route to host"))

    def _report(self, node: str) -> NodeReport:
        failed = [told.partition(":") for told in self._world.unfit.get(node, [])]
        results = [
            CheckResult(check=check, outcome=Outcome.UNFIT, evidence=f"{check} is bad", signature=signature)
            for check, _, signature in failed
        ]
        results.append(CheckResult(check="disk", outcome=Outcome.FIT))
        return NodeReport(node=node, at=self._world.now, reached=True, results=tuple(results))

    async def collective(self, nodes: tuple[str, ...], view: JobView) -> CollectiveReport:
        await self._world.sleep(1.0)
        return CollectiveReport(outcome=Outcome.FIT, nodes=nodes, at=self._world.now, seconds=1.0, backend="gloo")

    async def check(self, nodes: Iterable[str], told: Callable[[NodeReport], None]) -> None:
        for node in nodes:
            told(self._report(node))

    async def fence(self, nodes: list[str], job_id: int, epoch: int) -> Mapping[str, str]:
        reached = [n for n in nodes if self._reaches(n)]
        stuck = self._world.end_processes(job_id, epoch, reached)
        return {n: "fenced" if n in reached and n not in stuck else "not fenced" for n in nodes}

    async def start_launcher(self, view: JobView, host: str, generation: int) -> None:
        attempt = view.attempt
        assert attempt.slurm_job_id is not None
        self._world.start_launcher(view.job.id, attempt.number, attempt.slurm_job_id, generation, host)

    def submission(self, view: JobView, attempt: int) -> SubmitRequest:
        record = next(a for a in view.attempts if a.number == attempt)
        return submit_request(view.job, view.spec, record, "http://head:1", self._world.settings, None)
