"""A Slurm in memory with a virtual clock and a scripted fate: for ``--dry-run``, the simulator and tests.

It passes the contract suite of the real client. A job's script is never run: how a job ends is said by whoever scripts
its fate, through :meth:`~transom_slurm.fake_world.FakeWorld.finish` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from transom_slurm.errors import SlurmDenied, SlurmRejected, SlurmUnavailable, SubmitAmbiguous
from transom_slurm.fake_model import BadRequest, FakeJob, FakeNode, job_of, seconds_of
from transom_slurm.fake_world import Call, FakeWorld, SubmitFate
from transom_slurm.nodesets import HostlistError, expand
from transom_slurm.types import JobBase, Reservation, SlurmJob, SlurmNode, SlurmStep, SubmitRequest

__all__ = ["Call", "FakeSlurm", "SubmitFate"]


class FakeSlurm(FakeWorld):
    """Implements :class:`~transom_slurm.client.SlurmClient`; what is not async is the fate, in the base class."""

    async def jobs(self) -> Mapping[int, SlurmJob]:
        self._answer("jobs")
        return {job_id: job.view() for job_id, job in self._jobs.items()}

    async def nodes(self) -> Mapping[str, SlurmNode]:
        self._answer("nodes")
        return {name: node.view() for name, node in self._nodes.items()}

    async def finished(self, job_ids: Collection[int], since: float) -> Mapping[int, SlurmJob]:
        self._answer("finished", tuple(sorted(job_ids)), since)
        if not self.accounting:
            return {}
        known = self._records | {job_id: job.record() for job_id, job in self._jobs.items()}
        found = {job_id: known[job_id] for job_id in job_ids if job_id in known}
        return {i: job for i, job in found.items() if job.end_time is None or job.end_time >= since}

    async def find(self, name: str) -> Sequence[SlurmJob]:
        self._answer("find", name)
        return [job.view() for job in self._jobs.values() if job.name == name]

    async def submit(self, request: SubmitRequest) -> int:
        self._answer("submit", request, error=SubmitAmbiguous)
        fate = self._submit_fates.popleft() if self._submit_fates else None
        if fate is SubmitFate.DENIED:
            raise SlurmDenied("submit", "scripted")
        if fate is SubmitFate.REJECTED:
            raise SlurmRejected("submit", "scripted")
        if fate is SubmitFate.LOST:
            raise SubmitAmbiguous("submit", "scripted: no answer")
        job_id = self._accept(request)
        if fate is SubmitFate.ACCEPTED_UNSAID:
            raise SubmitAmbiguous("submit", "scripted: no answer")
        return job_id

    async def cancel(self, job_id: int) -> None:
        self._answer("cancel", job_id)
        self.cancel_by_person(job_id)

    async def drain(self, node: str, reason: str) -> None:
        self._answer("drain", node, reason)
        self._allow("drain")
        self._drain(self._known_node("drain", node), reason, self.user)

    async def resume(self, node: str, *, down: bool = False) -> None:
        self._answer("resume", node)
        self._allow("resume")
        known = self._known_node("resume", node)
        known.down = known.down and not down
        self._undrain(known)

    async def comment_node(self, node: str, text: str) -> None:
        self._answer("comment_node", node, text)
        self._allow("comment_node")
        self._known_node("comment_node", node).comment = text

    async def update_job(self, job_id: int, fields: Mapping[str, str]) -> None:
        self._answer("update_job", job_id, dict(fields))
        job = self._jobs.get(job_id)
        if job is None or job.ended is not None:
            raise SlurmRejected("update_job", f"Invalid job id specified for job {job_id}")
        for key, value in fields.items():
            self._update(job, key.lower(), value)

    async def config(self) -> Mapping[str, str]:
        self._answer("config")
        return dict(self._config)

    async def topology(self) -> Mapping[str, tuple[str, ...]]:
        self._answer("topology")
        return dict(self._switches)

    async def reservations(self) -> Sequence[Reservation]:
        self._answer("reservations")
        return list(self._reservations.values())

    async def steps(self, job_id: int) -> Sequence[SlurmStep]:
        self._answer("steps", job_id)
        job = self._jobs.get(job_id)
        return list(job.steps) if job and job.running else []

    def _answer(self, verb: str, *args: object, error: type[SlurmUnavailable] = SlurmUnavailable) -> None:
        out = [o for o in self._outages if o.until > self.now and (not o.verbs or verb in o.verbs)]
        self.calls.append(Call(self.now, verb, args, not out))
        if out:
            self.advance(max(outage.cost for outage in out))
            raise error(verb, "scripted: Unable to contact slurm controller (connect failure)", hint="scontrol ping")

    def _allow(self, verb: str) -> None:
        if not self.admin:
            raise SlurmDenied(verb, "Invalid user id")

    def _known_node(self, verb: str, name: str) -> FakeNode:
        if name not in self._nodes:
            raise SlurmRejected(verb, "Invalid node name specified")
        return self._nodes[name]

    def _accept(self, request: SubmitRequest) -> int:
        user = request.user.name if request.user else self.user
        try:
            job = job_of(request, self._next_id, user, self.now, next(iter(self._partitions)))
        except BadRequest as error:
            raise SlurmRejected("submit", str(error)) from None
        if job.partition not in self._partitions:
            raise SlurmRejected("submit", f"invalid partition specified: {job.partition}")
        if not job.excluded <= set(self._nodes):
            raise SlurmRejected("submit", "Invalid node name specified")
        job.begin = self.now + self.queue_delay_s
        self._jobs[job.job_id] = job
        self._next_id += 1
        if self.queue_delay_s:
            self.at(self.queue_delay_s, lambda: None)
        return job.job_id

    def _update(self, job: FakeJob, key: str, value: str) -> None:
        try:
            if key == "comment":
                job.comment = value
            elif key == "timelimit":
                job.limit_s = seconds_of(value)
                self._watch_limit(job)
            elif key == "starttime" and value.lower() == "now":
                job.begin = self.now
            elif key == "excnodelist":
                self._update_pending(job).excluded = set(expand(value))
            elif key == "nodelist" and job.running:
                self._shrink(job, expand(value))
            else:
                raise SlurmRejected("update_job", f"Update of this parameter is not supported: {key}={value}")
        except (HostlistError, ValueError) as error:
            raise SlurmRejected("update_job", str(error)) from None

    def _update_pending(self, job: FakeJob) -> FakeJob:
        if job.base is not JobBase.PENDING:
            raise SlurmRejected("update_job", "Job is no longer pending execution")
        return job

    def _shrink(self, job: FakeJob, keep: Sequence[str]) -> None:
        if not set(keep) <= set(job.nodes) or job.batch_host not in keep:
            raise SlurmRejected("update_job", "Invalid node name specified")
        for name in set(job.nodes) - set(keep):
            self._nodes[name].jobs.discard(job.job_id)
        job.nodes = [name for name in job.nodes if name in keep]
