"""What is behind :class:`~transom_slurm.fake.FakeSlurm`: nodes, queue, virtual clock, and the fate of all three."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from transom_slurm.errors import SlurmError
from transom_slurm.fake_model import FakeJob, FakeNode
from transom_slurm.types import ExitStatus, JobBase, Reservation, SlurmJob, SlurmStep

_OK = ExitStatus(0)
REGISTER_S = 1.0
"""Virtual seconds until a node has registered anew after a drain was lifted."""


class SubmitFate(Enum):
    """What becomes of the next submission."""

    LOST = "no answer, and no job"
    ACCEPTED_UNSAID = "no answer, but the job exists"
    REJECTED = "refused"
    DENIED = "not allowed"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb: when (virtual time), which, with what, and whether it was answered."""

    time: float
    verb: str
    args: tuple[object, ...]
    answered: bool


@dataclass(frozen=True, slots=True)
class _Outage:
    until: float
    verbs: frozenset[str]
    cost: float


class FakeWorld:
    """What a test or the simulator scripts. Time moves only in :meth:`advance`; nothing is random."""

    def __init__(
        self,
        nodes: int | Iterable[str] = 4,
        *,
        now: float = 1_800_000_000.0,
        partitions: Mapping[str, Collection[str]] | None = None,
        user: str = "root",
        admin: bool = True,
        accounting: bool = True,
        queue_delay_s: float = 0.0,
        completing_s: float = 0.0,
        slurmd_timeout_s: float = 30.0,
        min_job_age_s: float = 300.0,
        auto_start: bool = True,
        config: Mapping[str, str] | None = None,
        switches: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        names = [f"n{i}" for i in range(1, nodes + 1)] if isinstance(nodes, int) else list(nodes)
        self.now = now
        self.user, self.admin, self.accounting, self.auto_start = user, admin, accounting, auto_start
        self.queue_delay_s, self.completing_s = queue_delay_s, completing_s
        self.slurmd_timeout_s, self.min_job_age_s = slurmd_timeout_s, min_job_age_s
        self.calls: list[Call] = []
        self._partitions = {p: tuple(members) for p, members in (partitions or {"main": names}).items()}
        self._nodes = {name: self._node(name, index, now) for index, name in enumerate(names, start=1)}
        self._jobs: dict[int, FakeJob] = {}
        self._records: dict[int, SlurmJob] = {}
        self._reservations: dict[str, Reservation] = {}
        self._switches = dict(switches or {})
        self._config = {"SLURM_VERSION": "24.11.5", "SlurmdTimeout": f"{slurmd_timeout_s:g} sec", **(config or {})}
        self._next_id = 1
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._outages: list[_Outage] = []
        self._submit_fates: deque[SubmitFate] = deque()

    def _node(self, name: str, index: int, now: float) -> FakeNode:
        member = tuple(p for p, names in self._partitions.items() if name in names)
        address = f"10.77.{index // 250}.{index % 250}"
        return FakeNode(name=name, partitions=member, address=address, gres="gpu:8", boot_time=now - 86400)

    # -- time -------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """The virtual time, in Unix seconds: hand this to whatever wants a clock."""
        return self.now

    def advance(self, seconds: float = 0.0) -> None:
        """Let virtual time pass: what falls due happens in order, and waiting jobs get nodes."""
        until = self.now + seconds
        self._schedule()
        while self._events and self._events[0][0] <= until:
            due, _, act = heapq.heappop(self._events)
            self.now = max(self.now, due)
            act()
            self._schedule()
        self.now = until
        self._schedule()

    def at(self, seconds: float, act: Callable[[], None]) -> None:
        """Do ``act`` when that many seconds of virtual time have passed."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    # -- fate of Slurm itself ---------------------------------------------------------------------------------------

    def outage(self, seconds: float, *verbs: str, cost_s: float = 0.0) -> None:
        """Let these verbs (all, if none is named) go unanswered for a span.

        ``cost_s`` is the virtual time that each unanswered call takes, as a hanging command takes its deadline.
        """
        self._outages.append(_Outage(self.now + seconds, frozenset(verbs), cost_s))

    def next_submit(self, fate: SubmitFate) -> None:
        """Queue what becomes of the next submission that is answered at all."""
        self._submit_fates.append(fate)

    def lose_newest_jobs(self, count: int = 1) -> None:
        """Kill the controller before it saved its state: the newest jobs vanish, and their ids are given out again."""
        for job_id in sorted(self._jobs)[-count:]:
            job = self._jobs.pop(job_id)
            self._release(job)
            self._records[job_id] = replace(job.view(), end_time=None)
            self._next_id = min(self._next_id, job_id)

    # -- fate of jobs -----------------------------------------------------------------------------------------------

    def start(self, job_id: int) -> None:
        """Give a waiting job its nodes now. Raises RuntimeError if there are not enough."""
        job = self._jobs[job_id]
        job.held, job.begin = False, self.now
        if not self._place(job):
            raise RuntimeError(f"job {job_id} cannot start: {job.reason}")

    def finish(self, job_id: int, code: int = 0, signal: int = 0, *, derived: int = 0) -> None:
        """Let the batch script end with this exit code or signal; ``derived`` is the worst exit code of its steps."""
        base = JobBase.COMPLETED if code == 0 and signal == 0 else JobBase.FAILED
        reason = "None" if base is JobBase.COMPLETED else "NonZeroExitCode"
        self._end(self._jobs[job_id], base, ExitStatus(code, signal), reason, ExitStatus(derived))

    def cancel_by_person(self, job_id: int) -> None:
        """``scancel`` by somebody; no error for a job that is gone."""
        job = self._jobs.get(job_id)
        if job is not None and job.ended is None:
            self._end(job, JobBase.CANCELLED, ExitStatus(0, 15 if job.running else 0), job.reason)

    def preempt(self, job_id: int, grace_s: float = 0.0) -> None:
        """Take a running job's nodes for another: it goes back into the queue if it may, else it ends PREEMPTED.

        With ``grace_s`` it is given notice first, and so long until then.
        """
        job = self._jobs[job_id]
        if grace_s:
            job.ends_by = self.now + grace_s
            self.at(grace_s, lambda: self.preempt(job_id) if job.ended is None else None)
            return
        if job.may_requeue:
            self._requeue(job, "BeginTime")
        else:
            self._end(job, JobBase.PREEMPTED, ExitStatus(143), "None")

    def fail_launch(self, job_id: int, node: str) -> None:
        """Fail the prolog of one node: it is drained with ``Prolog error``, the job cancelled or put back, held."""
        job = self._jobs[job_id]
        self._drain(self._nodes[node], "Prolog error", "root")
        if job.may_requeue:
            self._requeue(job, "launch failed requeued held")
            job.held = True
        else:
            self._end(job, JobBase.CANCELLED, ExitStatus(1), "None")

    def add_step(
        self, job_id: int, name: str, nodes: Iterable[str] | None = None, *, no_kill: bool = False
    ) -> SlurmStep:
        """Let a running job have one more step; with ``no_kill`` it outlives the loss of one of its nodes."""
        job = self._jobs[job_id]
        number = sum(not step.step_id.endswith(".batch") for step in job.steps)
        step = SlurmStep(f"{job_id}.{number}", name, "RUNNING", tuple(nodes if nodes is not None else job.nodes))
        job.steps.append(step)
        if no_kill:
            job.lasting.add(step.step_id)
        return step

    # -- fate of nodes ----------------------------------------------------------------------------------------------

    def fail_node(self, name: str) -> None:
        """Cut a node's power: not responding after half of SlurmdTimeout, DOWN after all of it, its jobs with it."""
        node = self._nodes[name]
        node.powered = False
        self.at(self.slurmd_timeout_s / 2, lambda: self._mute(node))
        self.at(self.slurmd_timeout_s, lambda: self._lose(node))

    def heal_node(self, name: str) -> None:
        """Give the power back: the node boots, and comes back by itself if only its silence had made it DOWN."""
        node = self._nodes[name]
        node.powered, node.boot_time = True, self.now
        self._register(node)
        if node.down and node.reason == "Not responding":
            node.down = False
            node.say("", "", self.now)

    def set_down(self, name: str, reason: str, user: str = "root") -> None:
        """A person sets a node DOWN: its jobs lose it at once."""
        self._nodes[name].say(reason, user, self.now)
        self._take_down(self._nodes[name])

    def drain_by_person(self, name: str, reason: str, user: str = "alice") -> None:
        """A person drains a node."""
        self._drain(self._nodes[name], reason, user)

    def resume_by_person(self, name: str) -> None:
        """A person lifts a drain, or brings a DOWN node back."""
        self._nodes[name].down = False
        self._undrain(self._nodes[name])

    def flag_node(self, name: str, *flags: str) -> None:
        """Set a node's flags besides DRAIN (``REBOOT_ISSUED``, ``PLANNED`` ...); none clears them."""
        node = self._nodes[name]
        node.flags = {"DRAIN"} & node.flags | set(flags)

    def reserve(self, name: str, nodes: Iterable[str], *, maintenance: bool = False) -> None:
        """Make a reservation that starts now and has no end."""
        members, flag = tuple(nodes), "MAINTENANCE" if maintenance else "RESERVED"
        self._reservations[name] = Reservation(name, members, frozenset({"MAINT"} if maintenance else ()), self.now)
        for member in members:
            self._nodes[member].flags.add(flag)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        for job in sorted(self._jobs.values(), key=lambda job: job.job_id) if self.auto_start else ():
            if job.base is JobBase.PENDING and not job.held and job.begin <= self.now:
                self._place(job)

    def _place(self, job: FakeJob) -> bool:
        members = self._partitions[job.partition]
        if job.wanted > len(members):
            job.reason = "PartitionConfig"
            return False
        free = [name for name in members if self._nodes[name].free() and name not in job.excluded]
        if len(free) < job.wanted:
            job.reason = "Resources"
            return False
        job.base, job.reason, job.started = JobBase.RUNNING, "None", float(int(self.now))
        job.nodes, job.batch_host, job.run = free[: job.wanted], free[0], job.run + 1
        job.steps = [SlurmStep(f"{job.job_id}.batch", "batch", "RUNNING", (free[0],))]
        for name in job.nodes:
            self._nodes[name].jobs.add(job.job_id)
        self._watch_limit(job)
        return True

    def _watch_limit(self, job: FakeJob) -> None:
        """End the job at its time limit, unless by then it has ended, was requeued or got another limit."""
        run, limit_s = job.run, job.limit_s

        def check() -> None:
            if job.running and (job.run, job.limit_s) == (run, limit_s):
                self._end(job, JobBase.TIMEOUT, ExitStatus(0, 15), "TimeLimit")

        if limit_s is not None and job.started is not None:
            self.at(max(0.0, job.started + limit_s - self.now), check)

    def _release(self, job: FakeJob) -> None:
        for node in self._nodes.values():
            node.jobs.discard(job.job_id)

    def _end(self, job: FakeJob, base: JobBase, status: ExitStatus, reason: str, derived: ExitStatus = _OK) -> None:
        if job.ended is not None:
            raise SlurmError("fate", f"job {job.job_id} has ended already")
        job.base, job.exit, job.derived, job.reason = base, status, derived, reason
        job.ended, job.steps = float(int(self.now)), []
        if job.nodes and self.completing_s:
            job.flags = frozenset({"COMPLETING"})
            self._flag(job.nodes, "COMPLETING")
            self.at(self.completing_s, lambda: self._settle(job))
        else:
            self._settle(job)

    def _flag(self, names: Iterable[str], flag: str) -> None:
        for name in names:
            self._nodes[name].flags.add(flag)

    def _settle(self, job: FakeJob) -> None:
        job.flags = frozenset()
        for name in job.nodes:
            self._nodes[name].flags.discard("COMPLETING")
        self._release(job)
        self._records[job.job_id] = job.view()
        self.at(self.min_job_age_s, lambda: self._purge(job))

    def _purge(self, job: FakeJob) -> None:
        if self._jobs.get(job.job_id) is job and job.ended is not None:
            del self._jobs[job.job_id]

    def _requeue(self, job: FakeJob, reason: str) -> None:
        self._release(job)
        job.base, job.reason, job.nodes, job.batch_host, job.steps = JobBase.PENDING, reason, [], "", []
        job.submitted, job.started, job.begin = float(int(self.now)), None, self.now + 121
        job.restarts += 1
        self.at(121, lambda: None)

    def _mute(self, node: FakeNode) -> None:
        if not node.powered:
            node.responding = False

    def _lose(self, node: FakeNode) -> None:
        if not node.powered and not node.down:
            node.responding = False
            if not node.reason:
                node.say("Not responding", "slurm", self.now)
            self._take_down(node)

    def _take_down(self, node: FakeNode) -> None:
        node.down = True
        for job_id in sorted(node.jobs):
            self._node_lost(self._jobs[job_id], node)

    def _node_lost(self, job: FakeJob, node: FakeNode) -> None:
        """As slurmctld does it: with --no-kill the job goes on smaller, even without its batch host."""
        node.jobs.discard(job.job_id)
        if job.ended is not None:
            return
        if job.no_kill and len(job.nodes) > 1:
            job.nodes.remove(node.name)
            job.steps = [s for s in job.steps if node.name not in s.nodes or s.step_id in job.lasting]
            job.batch_host = job.nodes[0] if job.batch_host == node.name else job.batch_host
        elif job.may_requeue:
            self._requeue(job, "BeginTime")
        else:
            self._end(job, JobBase.NODE_FAIL, ExitStatus(143), "NodeDown")

    def _drain(self, node: FakeNode, reason: str, user: str) -> None:
        node.flags.add("DRAIN")
        node.say(reason, user, self.now)

    def _undrain(self, node: FakeNode) -> None:
        """As slurmctld does it: the node must register anew; until then it does not respond and has no boot time."""
        node.flags.discard("DRAIN")
        if not node.down:
            node.say("", "", self.now)
        node.responding, node.registered = False, False
        self.at(REGISTER_S, lambda: self._register(node))

    def _register(self, node: FakeNode) -> None:
        if node.powered:
            node.responding, node.registered = True, True
