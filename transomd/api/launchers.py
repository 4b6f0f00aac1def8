"""The route of launchers: a token says whose, and a report is answered by what is wanted now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from transomd.api import checked
from transomd.api.limits import Buckets
from transomd.api.wire import LauncherReport
from transomd.errors import RefusedError, UnreachableError, UsageError
from transomd.tol.loop import Operator

BODY_S = 20.0
"""How long a launcher may take to send a report."""
REPORTS_PER_S, REPORTS_AT_ONCE = 10.0, 60.0
"""What the launcher of one job may report: a few a second while something happens."""


class LauncherRoutes:
    """``POST /v1/launcher``."""

    def __init__(self, operator: Operator, clock: Callable[[], float]) -> None:
        self._operator = operator
        self._reports = Buckets(REPORTS_PER_S, REPORTS_AT_ONCE, clock)

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/v1/launcher", self._launcher)]

    async def _launcher(self, request: web.Request) -> web.Response:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise RefusedError("a launcher must show its job's token")
        # Nothing is read of what a stranger sends: the header says whose token it is.
        told = request.headers.get("Transom-Job", "")
        known = int(told) if told.isascii() and told.isdigit() and len(told) < 16 else None
        job_id = (await self._operator.launcher_job(token, known)).job.id
        if not self._reports.take(job_id):
            raise UnreachableError(f"job {job_id} reports too often", hint="")
        report = LauncherReport.from_json(checked.parse(await _read(request)))
        if report.job_id != job_id:
            raise RefusedError("a launcher speaks for its own job only")
        answer = await self._operator.report(report, token)
        return web.json_response(answer.to_json())


async def _read(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), BODY_S)
    except asyncio.TimeoutError:
        raise UsageError(f"the report did not come within {BODY_S:.0f} s") from None
