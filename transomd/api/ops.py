"""What an administrator asks for beside jobs: checks, the big red switch, history, the daemon's own health, metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web
from transom_slurm.nodesets import fold
from transom_sql.records import Incident, Intent, Switch

from transomd.api.binding import listening
from transomd.api.nodes import node_names
from transomd.api.views import incident_json
from transomd.doctor import Finding
from transomd.errors import NotFoundError, UnreachableError, UsageError
from transomd.health.profile import CHECKS
from transomd.health.types import NodeReport
from transomd.metrics import CONTENT_TYPE
from transomd.settings import Settings
from transomd.tol.loop import Operator
from transomd.tol.observe import Observer
from transomd.tol.switches import PAUSE, RESUME, trip_sentence
from transomd.words import Blame, IntentKind, IntentState, JobState, Level

STUCK_S = 600.0
"""After how long an act that is not done is worth a look."""
LEMON = 2
"""Incidents on different launches from which a node is worth a look."""
KEPT = 1000
"""Incidents, newest first, that the history of all jobs looks at."""

Admit = Callable[[web.Request, str], str]
"""Returns the name of the administrator who asks. Raises RefusedError for anybody else."""
Look = Callable[[], Awaitable[list[Finding]]]
MetricsText = Callable[[], Awaitable[bytes]]


class OpsRoutes:
    """Routes that other parts of the API join in."""

    def __init__(
        self,
        operator: Operator,
        observer: Observer,
        settings: Settings,
        clock: Callable[[], float],
        *,
        look: Look,
        text: MetricsText,
    ) -> None:
        self._clock = clock
        self._operator = operator
        self._books = operator.books
        self._observer = observer
        self._settings = settings
        self._look = look
        self._text = text
        self._admit: Admit = _nobody

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings

    def routes(self, admit: Admit) -> list[web.RouteDef]:
        """Return the routes, for administrators as ``admit`` knows them."""
        self._admit = admit
        return [
            web.post("/v1/nodes/check", self._check),
            web.post("/v1/pause", self._pause),
            web.post("/v1/resume-actions", self._resume),
            web.get("/v1/doctor", self._doctor),
            web.get("/v1/history", self._history),
            web.get("/metrics", self._metrics),
        ]

    async def _check(self, request: web.Request) -> web.Response:
        self._admit(request, "check")
        body = await request.json()
        wanted = frozenset(str(name) for name in body.get("checks") or ())
        strange = sorted(wanted - CHECKS.keys())
        if strange:
            raise UsageError(f"check: there is no check {', '.join(strange)}", hint=f"one of {', '.join(CHECKS)}")
        nodes = self._known_nodes(body["nodes"])
        found = await self._observer.check(nodes)
        return web.json_response({"results": [_report_json(found[node], wanted) for node in nodes]})

    def _known_nodes(self, value: object) -> tuple[str, ...]:
        names = node_names(value)
        slurm = self._operator.world().slurm
        if slurm.nodes is None:
            raise UnreachableError(f"Slurm does not answer: {slurm.error or 'not asked yet'}", hint="scontrol ping")
        missing = [name for name in names if name not in slurm.nodes]
        if missing:
            raise NotFoundError(f"Slurm has no node {fold(missing)}", hint="transom nodes")
        return names

    async def _pause(self, request: web.Request) -> web.Response:
        who = self._admit(request, "pause")
        body = await request.json()
        await self._operator.pause(who, str(body.get("reason") or "").strip())
        return web.json_response({**self.switches(), "under_way": self._operator.acting()})

    async def _resume(self, request: web.Request) -> web.Response:
        who = self._admit(request, "resume-actions")
        were = await self._operator.resume_actions(who)
        return web.json_response({**self.switches(), "were": [_switch_json(switch) for switch in were]})

    def switches(self) -> dict[str, Any]:
        """Return what is stopped, and which acts wait because of it: part of GET /v1/daemon."""
        known = self._operator.switches
        waiting = {job: why for job in self._operator.views() if (why := self._operator.withheld(job))}
        return {
            "paused": self._operator.paused,
            "tripped": trip_sentence(known),
            "switches": [_switch_json(switch) for switch in known.values() if switch.since is not None],
            "withheld": [{"job": job, "would": why} for job, why in sorted(waiting.items())],
        }

    async def _doctor(self, request: web.Request) -> web.Response:
        self._admit(request, "doctor")
        found = [*self._own_findings(), *await self._acts(), *await self._look()]
        return web.json_response({"findings": [finding.to_json() for finding in found]})

    def _own_findings(self) -> list[Finding]:
        told = [*_slurm_findings(self._operator, self._clock()), *_switch_findings(self._operator, self._settings)]
        held = [view for view in self._operator.views().values() if view.state is JobState.HELD]
        for view in held:
            said = f"job {view.job.id} {view.job.name} waits for a person: {view.job.reason}"
            told.append(Finding(section="jobs", level=Level.PROBLEM, text=said, next=f"transom status {view.job.id}"))
        if not held:
            count = len(self._operator.views())
            said = f"{count} active job{'' if count == 1 else 's'}, none waits for a person"
            told.append(Finding(section="jobs", level=Level.OK, text=said))
        return told

    async def _acts(self) -> list[Finding]:
        pending = await self._books.db(self._books.store.intents, states=[IntentState.PENDING.value])
        now = self._clock()
        stuck = [i for i in pending if now - max(i.created_at, i.not_before if not i.tries else 0.0) > STUCK_S]
        if not stuck or self._operator.paused:
            said = f"{len(pending)} act{'' if len(pending) == 1 else 's'} under way, none is stuck"
            return [Finding(section="daemon", level=Level.OK, text=said)]
        return [_stuck(intent, now) for intent in stuck]

    async def _history(self, request: web.Request) -> web.Response:
        self._admit(request, "history of all jobs")
        node, one = request.query.get("node"), request.query.get("incident")
        store, db = self._books.store, self._books.db
        incidents = await db(store.incidents, limit=KEPT if not (node or one) else None)
        intents = await db(store.intents, kinds=[IntentKind.DRAIN.value, IntentKind.UNDRAIN.value])
        if one is not None:
            incidents = [i for i in incidents if i.id == int(one)]
            intents = [i for i in intents if i.incident_id == int(one)]
        if node is not None:
            incidents = [i for i in incidents if node in i.nodes]
            intents = [i for i in intents if i.args.get("node") == node]
        return web.json_response(
            {
                "incidents": [{**incident_json(i), "evidence": []} for i in incidents],
                "drains": [_drain_json(i) for i in intents],
                "lemons": lemons(incidents),
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        self._admit(request, "metrics")
        return await self.metrics(request)

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer GET /metrics, whoever asks."""
        return web.Response(body=await self._text(), headers={"Content-Type": CONTENT_TYPE})


class MetricsServer:
    """Serves /metrics, and nothing else, on a TCP address of its own."""

    def __init__(self, ops: OpsRoutes, where: tuple[str, int]) -> None:
        app = web.Application()
        app.add_routes([web.get("/metrics", ops.metrics)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._where = where

    async def start(self) -> None:
        """Listen. Raises TransomError."""
        await self._runner.setup()
        with listening("metrics", self._where):
            await web.TCPSite(self._runner, self._where[0] or None, self._where[1]).start()

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()


def _nobody(request: web.Request, what: str) -> str:
    raise AssertionError("routes() was not called")


def lemons(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Return the nodes blamed more than once, worst first: how often, in how many jobs, and when last. Pure."""
    blamed: defaultdict[str, list[Incident]] = defaultdict(list)
    for incident in incidents:
        if incident.blame == Blame.NODE:
            for node in incident.nodes:
                blamed[node].append(incident)
    rows = [
        {
            "node": node,
            "incidents": len(found),
            "jobs": len({incident.job_id for incident in found}),
            "classes": sorted({incident.failure_class for incident in found}),
            "last": max(incident.detected_at for incident in found),
        }
        for node, found in blamed.items()
        if len(found) >= LEMON
    ]
    return sorted(rows, key=lambda row: (-int(str(row["incidents"])), str(row["node"])))


def _report_json(report: NodeReport, wanted: frozenset[str]) -> dict[str, Any]:
    results = [r for r in report.results if not wanted or r.check in wanted]
    shown = NodeReport(
        node=report.node, at=report.at, reached=report.reached, results=tuple(results), error=report.error
    )
    return {
        "node": report.node,
        "at": report.at,
        "reached": report.reached,
        "error": report.error,
        "outcome": shown.outcome.value,
        "checks": [r.to_json() for r in results],
    }


def _drain_json(intent: Intent) -> dict[str, Any]:
    return {
        "kind": intent.kind,
        "node": intent.args.get("node"),
        "check": intent.args.get("check"),
        "reason": intent.args.get("reason"),
        "state": intent.state,
        "error": intent.outcome.get("error", ""),
        "at": intent.finished_at or intent.created_at,
        "job_id": intent.job_id,
        "incident_id": intent.incident_id,
    }


def _switch_json(switch: Switch) -> dict[str, Any]:
    return {"name": switch.name, "since": switch.since, "who": switch.who, "reason": switch.reason}


def _stuck(intent: Intent, now: float) -> Finding:
    age, why = now - intent.created_at, str(intent.outcome.get("error") or "no answer so far")
    said = f"{intent.key} has been tried {intent.tries} times in {age / 60:.0f} min: {why}"
    hint = f"transom events --job {intent.job_id}" if intent.job_id else "transom events"
    return Finding(section="daemon", level=Level.PROBLEM, text=said, next=hint)


def _slurm_findings(operator: Operator, now: float) -> list[Finding]:
    slurm = operator.world().slurm
    at = min(slurm.jobs_at, slurm.nodes_at)
    age = f"{now - at:.0f} s ago" if at else "never"
    if slurm.error:
        said = f"Slurm does not answer the daemon (last answer {age}): {slurm.error}"
        return [Finding(section="daemon", level=Level.PROBLEM, text=said, next="scontrol ping")]
    if not at:
        return [
            Finding(section="daemon", level=Level.UNKNOWN, text="Slurm has not been asked yet", next="transom doctor")
        ]
    return [Finding(section="daemon", level=Level.OK, text=f"Slurm answered the daemon {age}")]


def _switch_findings(operator: Operator, settings: Settings) -> list[Finding]:
    told = []
    for name, switch in operator.switches.items():
        if switch.since is None:
            continue
        said = operator.paused if name == PAUSE else f"{name} is tripped: {switch.reason}; nothing is drained"
        told.append(Finding(section="daemon", level=Level.PROBLEM, text=said, next=RESUME))
    waiting = {job: why for job in operator.views() if (why := operator.withheld(job))}
    for job, why in sorted(waiting.items()):
        told.append(Finding(section="daemon", level=Level.NOTE, text=f"job {job}: would {why}", next=RESUME))
    file = settings.drain.kill_switch
    if file and Path(file).exists():
        said = f"nothing is drained: the kill switch {file} is set"
        told.append(Finding(section="daemon", level=Level.PROBLEM, text=said, next=f"rm {file}"))
    return told or [Finding(section="daemon", level=Level.OK, text="acts are not paused, no budget is tripped")]
