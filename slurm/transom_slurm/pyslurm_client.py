"""Queries through pyslurm, in a process that can be killed; everything that changes Slurm through its commands.

What pyslurm does not tell rightly is asked of the commands as well: exit codes (it takes 128 from those above 127),
records with text that is no UTF-8, what its API lacks in a release. The two clients give equal answers but for a gres,
whose sockets (``gpu:8(S:0-1)``) pyslurm drops.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from transom_slurm.client import SlurmClient
from transom_slurm.commands import CommandClient, listed_nodes
from transom_slurm.errors import SlurmError, SlurmRejected, SlurmUnavailable, SlurmUnreadable
from transom_slurm.nodesets import HostlistError, expand
from transom_slurm.parsers import job_over
from transom_slurm.pyslurm_process import PyslurmFault, Rows, WorkerLost, WorkerProcess, worker_argv
from transom_slurm.runner import clean_env
from transom_slurm.states import parse_job_status, parse_node_status
from transom_slurm.types import JobBase, JobStatus, Reservation, SlurmJob, SlurmNode, SlurmStep, SubmitRequest

log = logging.getLogger("transom.slurm")

Wanted = Literal["auto", "commands", "pyslurm"]
LOST_IN_A_ROW = 3
"""Workers lost one after another, after which the commands answer for a while."""
REST_S = 600.0
"""Seconds for which they do; then pyslurm is tried again."""

_status: Callable[[str], JobStatus] = lru_cache(maxsize=256)(parse_job_status)
_node_status = lru_cache(maxsize=256)(parse_node_status)
_expand = lru_cache(maxsize=16384)(expand)


class PyslurmUnusable(SlurmError):
    """pyslurm was asked for and cannot be used here."""


async def choose_client(
    commands: CommandClient,
    wanted: Wanted = "auto",
    *,
    argv: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    deadline_s: float = 20.0,
) -> tuple[SlurmClient, str]:
    """The client to use and a sentence that says why: pyslurm where it imports and is of the running Slurm's release.

    ``argv`` is the worker's command (:func:`.pyslurm_process.worker_argv`). While slurmctld does not answer, pyslurm is
    taken and compares releases later. Raises PyslurmUnusable if pyslurm is *wanted* and cannot be used.
    """
    if wanted == "commands":
        return commands, 'Slurm\'s commands answer queries: slurm.client is "commands"'
    client = PyslurmClient(commands, argv=argv, env=env, deadline_s=deadline_s)
    try:
        usable = await client.check()
    except SlurmUnavailable as error:
        return client, f"pyslurm is to answer queries, but could not be compared with the running Slurm yet ({error})"
    if usable:
        client._said = client.why
        return client, client.why
    await client.close()
    if wanted == "pyslurm":
        hint = 'pip install "pyslurm==<release of your Slurm>.*", or slurm.client = "auto" in transomd.toml'
        raise PyslurmUnusable("choosing pyslurm", client.why, hint=hint)
    return commands, client.why


class PyslurmClient:
    """Implements :class:`~transom_slurm.client.SlurmClient`; ``why`` says in a sentence who answers queries now.

    A worker that dies is SlurmUnavailable to the caller, and the next query starts another. When pyslurm cannot be used
    (three lost in a row, not importable any more, another Slurm than it was built for) the commands take its place.
    """

    def __init__(
        self,
        commands: CommandClient,
        *,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands = commands
        self._clock = clock
        self.worker = WorkerProcess(argv or worker_argv(), clean_env() if env is None else env, deadline_s)
        self.why = "pyslurm has not been asked yet"
        self._said = self.why
        self._verbs: frozenset[str] = frozenset()
        self._compared = ""
        self._rest_until = 0.0
        self._lost = 0
        self._exits: dict[int, SlurmJob] = {}

    async def close(self) -> None:
        """End the worker."""
        await self.worker.close()

    async def check(self) -> bool:
        """Whether pyslurm is to be asked now: it imports, and it is of the release of the slurmctld that runs.

        Raises SlurmUnavailable when slurmctld does not say its version, or the worker died.
        """
        if self._clock() < self._rest_until:
            return False
        try:
            hello = await self._counted(self.worker.hello())
        except PyslurmFault as fault:
            return self._rest(str(fault))
        self._verbs = hello.verbs
        if self._compared != hello.version:
            running = (await self._commands.config())["SLURM_VERSION"]
            if release(hello.version) != release(running):
                await self.close()
                return self._rest(f"pyslurm {hello.version} was built for another Slurm than the {running} that runs")
            self._compared = hello.version
            self.why = f"pyslurm {hello.version} answers queries: it imports, and Slurm {running} runs here"
        return True

    async def jobs(self) -> Mapping[int, SlurmJob]:
        answer = await self._ask("jobs")
        if answer is None:
            return await self._commands.jobs()
        jobs = await asyncio.to_thread(_read, "jobs", answer.rows, _job)
        return await self._completed({job.job_id: job for job in jobs}, answer.unread)

    async def nodes(self) -> Mapping[str, SlurmNode]:
        answer = await self._ask("nodes")
        if answer is None or answer.unread:
            return await self._commands.nodes()
        nodes = await asyncio.to_thread(_read, "nodes", answer.rows, _node)
        return listed_nodes({node.name: node for node in nodes})

    async def reservations(self) -> Sequence[Reservation]:
        answer = await self._ask("reservations")
        if answer is None or answer.unread:
            return await self._commands.reservations()
        return _read("reservations", answer.rows, _reservation)

    async def steps(self, job_id: int) -> Sequence[SlurmStep]:
        answer = await self._ask("steps")
        if answer is None or answer.unread:
            return await self._commands.steps(job_id)
        return _read("steps", [row for row in answer.rows if row[0].split(".")[0] == str(job_id)], _step)

    async def find(self, name: str) -> Sequence[SlurmJob]:
        return [job for job in (await self.jobs()).values() if job.name == name]

    async def finished(self, job_ids: Collection[int], since: float) -> Mapping[int, SlurmJob]:
        return await self._commands.finished(job_ids, since)

    async def submit(self, request: SubmitRequest) -> int:
        return await self._commands.submit(request)

    async def cancel(self, job_id: int) -> None:
        await self._commands.cancel(job_id)

    async def drain(self, node: str, reason: str) -> None:
        await self._commands.drain(node, reason)

    async def resume(self, node: str, *, down: bool = False) -> None:
        await self._commands.resume(node, down=down)

    async def comment_node(self, node: str, text: str) -> None:
        await self._commands.comment_node(node, text)

    async def update_job(self, job_id: int, fields: Mapping[str, str]) -> None:
        await self._commands.update_job(job_id, fields)

    async def config(self) -> Mapping[str, str]:
        return await self._commands.config()

    async def topology(self) -> Mapping[str, tuple[str, ...]]:
        return await self._commands.topology()

    async def _ask(self, verb: str) -> Rows | None:
        """The worker's answer; None where the commands are to be asked instead."""
        usable = await self.check()
        if self.why != self._said:
            log.warning("%s", self.why)
            self._said = self.why
        if not usable or verb not in self._verbs:
            return None
        try:
            answer: Rows = await self._counted(self.worker.ask(verb))
        except PyslurmFault as fault:
            log.warning("pyslurm: %s; Slurm's commands are asked", fault)
            return None
        except SlurmUnavailable:
            # It may come back as another release.
            self._compared = ""
            raise
        self._lost = 0
        return answer

    async def _counted(self, work: Any) -> Any:
        try:
            return await work
        except WorkerLost as error:
            self._lost += 1
            if self._lost >= LOST_IN_A_ROW:
                self._rest(f"{self._lost} of pyslurm's workers were lost in a row, last: {error.cause}")
            raise

    def _rest(self, cause: str) -> bool:
        """Leave queries to the commands for a while; never true."""
        self.why = f"Slurm's commands answer queries: {cause}"
        self._rest_until, self._lost, self._compared = self._clock() + REST_S, 0, ""
        return False

    async def _completed(self, jobs: dict[int, SlurmJob], unread: Collection[int]) -> dict[int, SlurmJob]:
        """Add what pyslurm did not read, and the exit codes of ended jobs: asked of squeue, once for each ending."""
        self._exits = {job_id: kept for job_id, kept in self._exits.items() if _same(jobs.get(job_id), kept)}
        over = {job_id for job_id, job in jobs.items() if job_over(job.status)}
        missing = {*(over - self._exits.keys()), *unread}
        if missing:
            told = await self._told(missing)
            self._exits |= {i: job for i, job in told.items() if i in over and _same(jobs[i], job)}
            jobs |= {job_id: told[job_id] for job_id in unread if job_id in told}
            # What squeue does not list any more was purged since: an end without its exit code would be half a truth.
            jobs = {job_id: job for job_id, job in jobs.items() if job_id not in missing or job_id in told}
        for job_id in jobs.keys() & self._exits.keys():
            kept = self._exits[job_id]
            jobs[job_id] = replace(jobs[job_id], exit=kept.exit, derived_exit=kept.derived_exit)
        return jobs

    async def _told(self, job_ids: Collection[int]) -> Mapping[int, SlurmJob]:
        try:
            return await self._commands.jobs_of(job_ids)
        except SlurmRejected:
            # All of them were purged since pyslurm was asked.
            return {}


def release(version: str) -> tuple[int, int]:
    """Major and minor number: ``22.05.8`` (Slurm) and ``22.5.3`` (pyslurm) are of one release."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _same(job: SlurmJob | None, told: SlurmJob) -> bool:
    return job is not None and (job.submit_time, job.state_text) == (told.submit_time, told.state_text)


def _read(verb: str, rows: Sequence[list[Any]], make: Callable[..., Any]) -> list[Any]:
    try:
        return [make(*row) for row in rows]
    except (TypeError, ValueError, HostlistError) as error:
        raise SlurmUnreadable(f"pyslurm {verb}", str(error), hint="transom doctor") from None


def _job(
    job_id: int, name: str, user: str, state: str, reason: str, comment: str, partition: str, account: str, qos: str,
    submit: int | None, start: int | None, end: int | None, limit_min: int | None, nodes: str, batch_host: str,
    priority: int | None, restarts: int, work_dir: str, requeue: bool,
) -> SlurmJob:  # fmt: skip
    status = _status(state)
    return SlurmJob(
        job_id=job_id,
        name=name,
        user=user,
        status=status,
        state_text=state,
        reason=_set(reason),
        comment=_set(comment),
        partition=partition,
        account=account,
        qos=qos,
        submit_time=submit,
        start_time=None if status.base is JobBase.PENDING else start,
        end_time=end if job_over(status) else None,
        ends_by=end or None if status.base is JobBase.RUNNING else None,
        time_limit_s=None if limit_min is None else limit_min * 60,
        nodes=_expand(nodes),
        batch_host=batch_host,
        priority=priority,
        restarts=restarts,
        work_dir=work_dir,
        may_requeue=requeue,
    )


def _set(text: str) -> str:
    """Slurm's commands, too, cannot tell the text ``None`` from none."""
    return "" if text == "None" else text


def _node(
    name: str, state: str, reason: str, reason_user: str, reason_time: int | None, address: str, partitions: list[str],
    gres: str, boot: int | None, cpus: int, comment: str,
) -> SlurmNode:  # fmt: skip
    return SlurmNode(
        name=name,
        status=_node_status(state),
        state_text=state,
        reason=reason,
        reason_user=reason_user if reason else "",
        reason_time=reason_time if reason else None,
        address=address or name,
        partitions=tuple(partitions),
        gres=gres,
        boot_time=boot,
        cpus=cpus,
        comment=comment,
    )


def _step(step_id: str, name: str, state: str, nodes: str) -> SlurmStep:
    return SlurmStep(step_id, name, state, _expand(nodes))


def _reservation(name: str, nodes: str, flags: str, start: int | None, end: int | None) -> Reservation:
    return Reservation(name, _expand(nodes), frozenset(flags.split(",")) - {""}, start, end)
