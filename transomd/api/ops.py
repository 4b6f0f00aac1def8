"""What an administrator asks for beside jobs: checks, the big red switch, history, the daemon's own health, metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from transom_slurm.nodesets import fold
from transom_sql.records import Switch

from transomd.api.binding import listening
from transomd.api.history import history
from transomd.api.nodes import node_names
from transomd.api.standing import standing
from transomd.doctor import Finding
from transomd.errors import NotFoundError, UnreachableError, UsageError
from transomd.health.profile import CHECKS
from transomd.health.types import NodeReport
from transomd.metrics import CONTENT_TYPE
from transomd.settings import Settings
from transomd.tol.loop import Operator
from transomd.tol.observe import Observer
from transomd.tol.switches import trip_sentence
from transomd.words import IntentState

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
        return {
            "paused": self._operator.paused,
            "tripped": trip_sentence(known),
            "switches": [_switch_json(switch) for switch in known.values() if switch.since is not None],
            "withheld": [{"job": job, "would": why} for job, why in sorted(self._operator.all_withheld().items())],
        }

    async def _doctor(self, request: web.Request) -> web.Response:
        self._admit(request, "doctor")
        pending = await self._books.db(self._books.store.intents, states=[IntentState.PENDING.value])
        found = [*standing(self._operator, self._settings, pending, self._clock()), *await self._look()]
        return web.json_response({"findings": [finding.to_json() for finding in found]})

    async def _history(self, request: web.Request) -> web.Response:
        self._admit(request, "history of all jobs")
        one = request.query.get("incident")
        found = await history(self._books, request.query.get("node"), int(one) if one is not None else None)
        return web.json_response(found)

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


def _switch_json(switch: Switch) -> dict[str, Any]:
    return {"name": switch.name, "since": switch.since, "who": switch.who, "reason": switch.reason}
