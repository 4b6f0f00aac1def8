"""Keeps what the nodes' own hooks report, has drains and comments proposed for it, and answers the prologs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transom_slurm.types import JobBase, SlurmNode
from transom_sql.records import Event, Intent, NodeRecord
from transom_sql.store import Change

from transomd.errors import NotFoundError, UnreachableError
from transomd.health.judge import judge
from transomd.health.types import NodeReport
from transomd.settings import Settings
from transomd.tol import findings as rules
from transomd.tol.findings import NodeFindings
from transomd.tol.loop import Operator
from transomd.tol.view import SlurmView
from transomd.words import IntentKind, IntentState, Outcome

log = logging.getLogger("transom.nodes")

WRITE_EVERY_S = 300.0
"""How often a node of which nothing new is reported is written down all the same."""
LATE_S = 60.0
"""A report that is older than this, or was put aside by its node, is history: nothing is decided on it."""
GPU_MEMORY_LEFT_MIB = 1024
"""More memory than this in use on a GPU after the node's last job has ended is told (a driver's own takes some)."""
_LEFT_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HookReport:
    """What a hook says: whose it is, and the probe's facts. ``at`` is Unix seconds by the node's clock."""

    kind: str
    node: str
    at: float
    slurm_job: int | None = None
    uid: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    not_run: tuple[str, ...] = ()
    leftovers: Mapping[str, Any] | None = None
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HookAnswer:
    """What a hook is told: a word on what was found, and why its prolog is to fail (empty: it is not)."""

    said: str
    refuse: str = ""


class NodeWatch:
    """One for the daemon. Nodes are those that Slurm knows; every report is judged here, never on the node."""

    def __init__(self, operator: Operator, settings: Settings, clock: Callable[[], float]) -> None:
        self._operator = operator
        self._books = operator.books
        self._settings = settings
        self._profile = settings.health.profile()
        self._clock = clock
        self._findings: dict[str, NodeFindings] = {}
        self._written: dict[str, float] = {}
        self._refusing: dict[str, int | None] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        operator.propose_from(self._proposals)

    def use(self, settings: Settings) -> None:
        """Judge by other settings from the next report on. Raises SpecError for limits that cannot be."""
        self._profile = settings.health.profile()
        self._settings = settings

    async def start(self) -> None:
        """Take up the episodes that were open when the daemon last ended."""
        for record in await self._books.db(self._books.store.nodes):
            open_ones = rules.read_episodes(record.data)
            if open_ones:
                self._findings[record.name] = NodeFindings(node=record.name, episodes=open_ones)

    def _proposals(self, slurm: SlurmView, now: float) -> Iterable[Intent]:
        cleared_at = self._operator.clearings.at
        return rules.propose(self._findings.values(), slurm.nodes, self._settings, now, self._refusing, cleared_at)

    async def take(self, report: HookReport) -> HookAnswer:
        """Judge a report and keep it. Raises NotFoundError for a node that Slurm does not know, UnreachableError when
        Slurm does not answer."""
        slurm = self._operator.world().slurm
        if slurm.nodes is None:
            raise UnreachableError("Slurm does not answer", hint="scontrol ping")
        node = slurm.nodes.get(report.node)
        if node is None:
            raise NotFoundError(f"Slurm has no node {report.node[:64]!r}", hint="sinfo -N")
        judged = self._judge(report, node)
        async with self._locks.setdefault(node.name, asyncio.Lock()):
            if report.late or self._clock() - report.at > LATE_S:
                await self._write(node.name, None, self._late_events(report, judged))
                return HookAnswer(said=f"late: {_words(judged)}")
            if report.kind == "prolog":
                # A drain that is granted from now on waits until Slurm has done it by itself.
                self._refusing[node.name] = report.slurm_job
            try:
                await self._keep(report, judged, slurm)
                return HookAnswer(said=_words(judged), refuse=await self._refusal(report, judged, node))
            finally:
                self._refusing.pop(node.name, None)

    def _judge(self, report: HookReport, node: SlurmNode) -> NodeReport:
        parts = [part for part in report.facts if part not in report.not_run or part in ("disk", "mounts")]
        return judge(
            node.name,
            report.facts,
            self._profile.answerable([*parts, *report.not_run]),
            now=self._clock(),
            allocated_gpus=rules.expected_gpus(node, report.facts),
            cleared_at=self._operator.clearings.at.get(node.name, 0.0),
        )

    async def _keep(self, report: HookReport, judged: NodeReport, slurm: SlurmView) -> None:
        old = self._findings.get(judged.node) or NodeFindings(node=judged.node)
        new, begun, ended = rules.absorb(old, judged, report.slurm_job)
        self._findings[judged.node] = new
        told = [f"{r.check}: {r.evidence or r.value}" for r in begun]
        events = [self._event(judged.node, "unfit", f"{report.kind}: {text}", report) for text in told]
        events += [self._event(judged.node, "fit", f"{report.kind}: {check} is fit again", report) for check in ended]
        events += self._left(report, slurm)
        stale = self._clock() - self._written.get(judged.node, 0.0) > WRITE_EVERY_S
        # An open episode counts its reports, and a drain may wait for the second.
        if events or stale or new.episodes:
            await self._write(judged.node, new, events)
        await self._comment(new, slurm)
        if new.episodes:
            self._operator.wake()

    def _event(self, node: str, kind: str, text: str, report: HookReport) -> Event:
        data = {"hook": report.kind, "slurm_job": report.slurm_job, "not_run": list(report.not_run)}
        return Event(at=self._clock(), kind=kind, node=node, message=f"{node}: {text}", data=data)

    def _late_events(self, report: HookReport, judged: NodeReport) -> list[Event]:
        told = [f"{r.check}: {r.evidence or r.value}" for r in judged.unfit]
        age = self._clock() - report.at
        return [self._event(judged.node, "late", f"{report.kind} {age:.0f} s ago: {text}", report) for text in told]

    def _left(self, report: HookReport, slurm: SlurmView) -> list[Event]:
        """What a job left behind, and what the kernel said while it ran. Told, and nothing more."""
        if report.kind != "epilog":
            return []
        told = [*_processes_left(report), *self._memory_left(report, slurm), *_xids_during(report, slurm)]
        job = f"job {report.slurm_job} left " if report.slurm_job is not None else "left "
        return [self._event(report.node, "leftover", job + text, report) for text in told]

    def _memory_left(self, report: HookReport, slurm: SlurmView) -> list[str]:
        if slurm.jobs is None or _others_on(report, slurm):
            return []
        rows = report.facts.get("gpus", {}).get("rows", ())
        used = {str(r.get("index")): str(r.get("memory.used", "")) for r in rows}
        full = [f"{mib} MiB on GPU {i}" for i, mib in used.items() if mib.isdigit() and int(mib) > GPU_MEMORY_LEFT_MIB]
        return [f"GPU memory in use: {', '.join(full)}"] if full else []

    async def _comment(self, found: NodeFindings, slurm: SlurmView) -> None:
        """Have the node's comment set right, unless that is under way."""
        now = self._clock()
        if not rules.propose_comments([found], slurm.nodes, self._settings, (), now):
            return
        pending = await self._books.db(self._books.store.intents, states=[IntentState.PENDING.value])
        wanted = rules.propose_comments([found], slurm.nodes, self._settings, pending, now)
        if wanted:
            await self._books.db(self._books.store.commit, Change(intents=wanted))
            self._operator.wake()

    async def _write(self, node: str, found: NodeFindings | None, events: list[Event]) -> None:
        now = self._clock()
        if found is not None:
            self._written[node] = now
        elif not events:
            return

        def save() -> None:
            nodes = []
            if found is not None:
                old = self._books.store.node(node) or NodeRecord(name=node, changed_at=now)
                episodes = {check: episode.to_json() for check, episode in found.episodes.items()}
                checks = tuple(result.to_json() for result in found.results.values())
                nodes = [replace(old, checked_at=found.at, checks=checks, data={**old.data, "episodes": episodes})]
            self._books.store.commit(Change(nodes=nodes, events=events))

        await self._books.db(save)

    async def _refusal(self, report: HookReport, judged: NodeReport, node: SlurmNode) -> str:
        """Why this prolog is to fail: the site enforces, the check is unfit *now*, and its drain has been granted."""
        cleared_at = self._operator.clearings.at.get(node.name, 0.0)
        episode = rules.to_drain(self._findings[node.name], self._settings, self._clock(), cleared_at)
        unfit = {result.check for result in judged.unfit}
        if not self._settings.hooks.enforce or report.kind != "prolog" or episode is None or episode.check not in unfit:
            return ""
        await self._operator.admit_now()
        intent = await self._books.db(self._books.store.intent, rules.drain_key(node.name, episode))
        granted = intent is not None and intent.kind == IntentKind.DRAIN and intent.state == IntentState.PENDING
        return f"{episode.check}: {episode.evidence}" if granted else ""


def _words(judged: NodeReport) -> str:
    bad = [r.check for r in judged.results if r.outcome is not Outcome.FIT]
    return f"{judged.outcome}" + (f" ({', '.join(bad)})" if bad else "")


def _processes_left(report: HookReport) -> list[str]:
    left = report.leftovers or {}
    if not left.get("count"):
        return []
    shown = [f"{p['name']} (pid {p['pid']}, uid {p['uid']})" for p in left["processes"][:_LEFT_SHOWN]]
    return [f"{left['count']} processes: {', '.join(shown)}"]


def _others_on(report: HookReport, slurm: SlurmView) -> bool:
    """Whether other jobs run on the node, whose memory it may be."""
    running = (job for job in (slurm.jobs or {}).values() if job.status.base is JobBase.RUNNING)
    return any(report.node in job.nodes and job.job_id != report.slurm_job for job in running)


def _xids_during(report: HookReport, slurm: SlurmView) -> list[str]:
    job = (slurm.jobs or {}).get(report.slurm_job or 0)
    if job is None or job.start_time is None:
        return []
    events = report.facts.get("kernel", {}).get("events", ())
    told = [f"Xid {e['code']} (x{e['count']})" for e in events if e["kind"] == "xid" and e["last"] >= job.start_time]
    return [f"kernel messages of its time: {', '.join(told)}"] if told else []
