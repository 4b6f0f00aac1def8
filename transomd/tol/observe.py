"""Looking at the outside: Slurm's answers, probes and all-reduces, the newest of each kept. Effects, no decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from transom_slurm.client import SlurmClient
from transom_slurm.errors import SlurmError
from transom_slurm.types import SlurmJob
from transom_sql.records import Attempt

from transomd.health.types import CollectiveReport, NodeReport
from transomd.tol import facts
from transomd.tol.lingering import as_recorded, hides_its_end
from transomd.tol.view import JobView, SlurmView, Want, World

log = logging.getLogger("transom.observe")
T = TypeVar("T")

MAX_COLLECTIVES = 256
"""All-reduces that are remembered; one is of interest for a minute."""


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


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """A query that Slurm did not answer."""

    error: str


class Observer:
    """Keeps one World up to date. ``changed`` is called whenever something new is known about nodes of a job."""

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
        self._world: World | None = None
        self._news: set[int] = set()
        self._busy: dict[str, asyncio.Task[None]] = {}

    def world(self) -> World:
        """Return the newest snapshot; the same one until something new is known."""
        if self._world is None:
            self._world = World(slurm=self._view, health=dict(self._health), collectives=dict(self._collectives))
        return self._world

    def news(self) -> set[int]:
        """Return the jobs for which something was found out since the last call."""
        news, self._news = self._news, set()
        return news

    async def look(self, attempts: Iterable[Attempt]) -> None:
        """Ask Slurm for all jobs, then for all nodes; what is not answered becomes unknown.

        Nodes come second: what ended a job stands in a node's reason before the job has ended.
        """
        before, jobs_at = self._view, self._clock()
        jobs, unsure = await self._jobs(list(attempts))
        nodes_at = self._clock()
        nodes = await _answer(self._slurm.nodes())
        errors = "; ".join(dict.fromkeys(x.error for x in (jobs, nodes) if isinstance(x, _NoAnswer)))
        if errors and errors != before.error:
            log.warning("Slurm does not answer: %s", errors)
        self._view = SlurmView(
            jobs=None if isinstance(jobs, _NoAnswer) else jobs,
            jobs_at=before.jobs_at if isinstance(jobs, _NoAnswer) else jobs_at,
            nodes=None if isinstance(nodes, _NoAnswer) else nodes,
            nodes_at=before.nodes_at if isinstance(nodes, _NoAnswer) else nodes_at,
            last_nodes=before.last_nodes if isinstance(nodes, _NoAnswer) else nodes,
            unsure=unsure,
            error=errors,
        )
        self._world = None

    async def look_at_nodes(self) -> SlurmView:
        """Ask Slurm for all nodes, at once; the view that is returned holds the answer."""
        at, nodes = self._clock(), await _answer(self._slurm.nodes())
        if isinstance(nodes, _NoAnswer):
            self._view = replace(self._view, nodes=None, error=nodes.error)
        else:
            self._view = replace(self._view, nodes=nodes, nodes_at=at, last_nodes=nodes)
        self._world = None
        return self._view

    async def _jobs(self, attempts: list[Attempt]) -> tuple[Mapping[int, SlurmJob] | _NoAnswer, frozenset[int]]:
        """Return every job that slurmctld holds, and how those ended that it does not hold any more or does not show.

        A record of accounting that has no end proves nothing: after a crash it may say RUNNING for ever.
        """
        jobs = await _answer(self._slurm.jobs())
        if isinstance(jobs, _NoAnswer):
            return jobs, frozenset()
        ours = {a.slurm_job_id: a.created_at for a in attempts if a.slurm_job_id}
        missing = {i for i in ours if i not in jobs}
        hidden = {i for i in ours if i in jobs and hides_its_end(jobs[i], self._clock())}
        if not missing | hidden:
            return jobs, frozenset()
        asked = sorted(missing | hidden)
        records = await _answer(self._slurm.finished(asked, min(ours[i] for i in asked)))
        if isinstance(records, _NoAnswer):
            log.warning("accounting does not answer: %s", records.error)
            return jobs, frozenset(missing)
        ended = {i: job for i, job in records.items() if facts.ended(job)}
        shown = {i: as_recorded(jobs[i], ended[i]) for i in hidden & ended.keys()}
        return {**ended, **jobs, **shown}, frozenset()

    def meet(self, wants: Iterable[Want], view: JobView) -> bool:
        """Start finding out what one job wants and is not under way; return whether to ask Slurm before its turn.

        Slurm is not asked more often while it does not answer.
        """
        slurm = False
        for want in wants:
            if want.kind == "slurm":
                old = min(self._view.jobs_at, self._view.nodes_at) < want.since
                slurm = slurm or (old and not self._view.error)
            elif want.kind == "probe":
                self._probe(want, view)
            else:
                self._collective(want, view)
        return slurm

    def _probe(self, want: Want, view: JobView) -> None:
        due = [n for n in want.nodes if n not in self._health or self._health[n].at < want.since]
        nodes = tuple(n for n in due if f"probe:{n}" not in self._busy)
        if not nodes:
            return
        started = self._clock()
        work = self._nodes.probe(nodes, view, lambda report: self._heard(report, started, view.job.id))
        self._start([f"probe:{node}" for node in nodes], work, view.job.id)

    async def check(self, nodes: Iterable[str]) -> dict[str, NodeReport]:
        """Probe nodes now, at a person's word; what is found counts like any other look at them."""
        started, found = self._clock(), {}

        def told(report: NodeReport) -> None:
            self._heard(report, started)
            found[report.node] = self._health[report.node]

        await self._nodes.check(nodes, told)
        return found

    def _heard(self, report: NodeReport, started: float, job_id: int | None = None) -> None:
        # A probe counts from when it was begun: what happened after that it may not have seen.
        self._health[report.node] = replace(report, at=started)
        self._found_out(job_id)

    def _collective(self, want: Want, view: JobView) -> None:
        done, name = self._collectives.get(want.key), f"collective:{want.key}"
        if name in self._busy or (done is not None and done.at >= want.since):
            return
        self._start([name], self._all_reduce(want, view), view.job.id)

    async def _all_reduce(self, want: Want, view: JobView) -> None:
        started = self._clock()
        report = await self._nodes.collective(want.nodes, view)
        self._collectives[want.key] = replace(report, at=started)
        for old in list(self._collectives)[:-MAX_COLLECTIVES]:
            del self._collectives[old]

    def _start(self, names: list[str], work: Awaitable[None], job_id: int) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("a look at nodes failed; what it was to find out stays unknown")

        task = asyncio.create_task(guarded(), name=names[0])
        self._busy.update(dict.fromkeys(names, task))
        task.add_done_callback(lambda _: self._release(names, job_id))

    def _release(self, names: list[str], job_id: int) -> None:
        for name in names:
            self._busy.pop(name, None)
        self._found_out(job_id)

    def _found_out(self, job_id: int | None) -> None:
        self._world = None
        self._news |= {job_id} if job_id is not None else set()
        self._changed()

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = set(self._busy.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(query: Awaitable[T]) -> T | _NoAnswer:
    try:
        return await query
    except SlurmError as error:
        return _NoAnswer(str(error))
    except Exception as error:
        log.exception("asking Slurm failed")
        return _NoAnswer(f"asking Slurm failed: {type(error).__name__}: {error}")
