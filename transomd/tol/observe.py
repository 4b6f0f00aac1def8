"""Looking at the outside: Slurm's answers, probes and all-reduces, the newest of each kept. Effects, no decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Protocol

from transom_slurm.client import SlurmClient
from transom_slurm.errors import SlurmError
from transom_slurm.types import SlurmJob, SlurmNode
from transom_sql.records import Attempt

from transomd.health.types import CollectiveReport, NodeReport
from transomd.tol.view import JobView, SlurmView, Want, World

log = logging.getLogger("transom.observe")


class Nodes(Protocol):
    """What reaches into nodes. Neither method raises: what could not be found out is in the report."""

    async def probe(self, nodes: Iterable[str], view: JobView, told: Callable[[NodeReport], None]) -> None:
        """Probe nodes; ``told`` is called for each as its answer arrives, within a deadline for all."""
        ...

    async def collective(self, nodes: tuple[str, ...], view: JobView) -> CollectiveReport:
        """Run the all-reduce as the job's user."""
        ...

    async def check(self, nodes: Iterable[str], told: Callable[[NodeReport], None]) -> None:
        """Probe nodes for a person, whatever runs on them."""


class Observer:
    """Keeps one World up to date. ``changed`` is called whenever something new is known."""

    def __init__(
        self, slurm: SlurmClient, nodes: Nodes, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._slurm = slurm
        self._nodes = nodes
        self._clock = clock
        self._changed = changed
        self._view = SlurmView()
        self._health: dict[str, NodeReport] = {}
        self._collectives: dict[str, CollectiveReport] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}

    def world(self) -> World:
        """Return the newest snapshot."""
        return World(slurm=self._view, health=dict(self._health), collectives=dict(self._collectives))

    async def look(self, attempts: Iterable[Attempt]) -> None:
        """Ask Slurm for all jobs and all nodes, once each; what is not answered becomes unknown."""
        at = self._clock()
        jobs, nodes = await asyncio.gather(self._jobs(list(attempts), at), _answer(self._slurm.nodes()))
        errors = "; ".join(str(answer) for answer in (jobs, nodes) if isinstance(answer, SlurmError))
        if errors and errors != self._view.error:
            log.warning("Slurm does not answer: %s", errors)
        got_jobs, got_nodes = not isinstance(jobs, SlurmError), not isinstance(nodes, SlurmError)
        self._view = SlurmView(
            jobs=None if isinstance(jobs, SlurmError) else jobs,
            jobs_at=at if got_jobs else self._view.jobs_at,
            nodes=None if isinstance(nodes, SlurmError) else nodes,
            nodes_at=at if got_nodes else self._view.nodes_at,
            error=errors,
        )

    async def _jobs(self, attempts: list[Attempt], at: float) -> dict[int, SlurmJob] | SlurmError:
        jobs = await _answer(self._slurm.jobs())
        if isinstance(jobs, SlurmError):
            return jobs
        missing = [a for a in attempts if a.slurm_job_id is not None and a.slurm_job_id not in jobs]
        if not missing:
            return dict(jobs)
        ids = [a.slurm_job_id for a in missing if a.slurm_job_id is not None]
        records = await _answer(self._slurm.finished(ids, min(a.created_at for a in missing)))
        return records if isinstance(records, SlurmError) else {**records, **jobs}

    def meet(self, wants: Iterable[Want], views: dict[int, JobView]) -> bool:
        """Start finding out what is wanted and not under way; return whether Slurm should be asked anew."""
        slurm = False
        for want in wants:
            if want.kind == "slurm":
                slurm = slurm or min(self._view.jobs_at, self._view.nodes_at) < want.since or bool(self._view.error)
            elif want.kind == "probe":
                self._probe(want, views[want.job_id])
            else:
                self._collective(want, views[want.job_id])
        return slurm

    def _probe(self, want: Want, view: JobView) -> None:
        due = [n for n in want.nodes if n not in self._health or self._health[n].at < want.since]
        nodes = tuple(n for n in due if f"probe:{n}" not in self._busy)
        if not nodes:
            return
        started = self._clock()
        task = self._start(self._nodes.probe(nodes, view, lambda report: self._heard(report, started)))
        for node in nodes:
            self._hold(f"probe:{node}", task)

    async def check(self, nodes: Iterable[str]) -> dict[str, NodeReport]:
        """Probe nodes now, at a person's word; what is found counts like any other look at them."""
        started, found = self._clock(), {}

        def told(report: NodeReport) -> None:
            self._heard(report, started)
            found[report.node] = self._health[report.node]

        await self._nodes.check(nodes, told)
        return found

    def _heard(self, report: NodeReport, started: float) -> None:
        # A probe counts from when it was begun: what happened after that it may not have seen.
        self._health[report.node] = replace(report, at=started)
        self._changed()

    def _collective(self, want: Want, view: JobView) -> None:
        done = self._collectives.get(want.key)
        if f"collective:{want.key}" in self._busy or (done is not None and done.at >= want.since):
            return
        self._hold(f"collective:{want.key}", self._start(self._all_reduce(want, view)))

    async def _all_reduce(self, want: Want, view: JobView) -> None:
        self._collectives[want.key] = await self._nodes.collective(want.nodes, view)

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("a look at nodes failed; what it was to find out stays unknown")

        return asyncio.create_task(guarded())

    def _hold(self, key: str, task: asyncio.Task[None]) -> None:
        self._busy[key] = task
        task.add_done_callback(lambda _: self._release(key))

    def _release(self, key: str) -> None:
        self._busy.pop(key, None)
        self._changed()

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = set(self._busy.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(query: Awaitable[dict[int, SlurmJob] | dict[str, SlurmNode] | object]):  # type: ignore[no-untyped-def]
    try:
        return await query
    except SlurmError as error:
        return error
