"""The daemon's HTTP side: users, by :mod:`transomd.api.access`, and launchers on TCP (a token says whose)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from transom_slurm.batch import sbatch_argv
from transom_slurm.errors import SlurmError
from transom_slurm.nodesets import HostlistError, expand
from transom_sql.records import Job
from transom_sql.store import StoreError

import transomd
from transomd.api import checked
from transomd.api.access import Access
from transomd.api.hooks import HookRoutes
from transomd.api.incidents import incident_detail
from transomd.api.limits import Buckets
from transomd.api.ops import OpsRoutes
from transomd.api.submissions import check_limits, check_owner, check_partition, check_room, new_job
from transomd.api.views import event_json, job_detail_json, job_json, job_line, node_json
from transomd.api.wire import LauncherReport
from transomd.errors import NotFoundError, RefusedError, SpecError, TransomError, UnreachableError, UsageError
from transomd.modes import user_name
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol import manual
from transomd.tol.loop import ACTIVE, Operator
from transomd.tol.submission import gate_plan
from transomd.tol.view import JobView
from transomd.words import ExitCode, JobState

log = logging.getLogger("transom.api")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 8 * 1024 * 1024
MAX_WAIT_S = 55.0
MAX_EVENTS = 10_000
MAX_ID = 1 << 53
BODY_S = 20.0
"""How long a launcher may take to send a report."""
REPORTS_PER_S, REPORTS_AT_ONCE = 10.0, 60.0
"""What the launcher of one job may report: a few a second while something happens."""
_OWN_AUTHENTICATION = frozenset({"/v1/launcher", "/v1/hooks"})
"""Paths that are not users': who asks is settled by what answers them."""
# aiohttp from 3.14 on warns of a plain string.
_UID: Any = web.RequestKey("transom-uid", int) if hasattr(web, "RequestKey") else "transom-uid"
_STATUS = {
    ExitCode.USAGE: 400,
    ExitCode.REFUSED: 403,
    ExitCode.NOT_FOUND: 404,
    ExitCode.UNREACHABLE: 503,
    ExitCode.ERROR: 500,
}


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except TransomError as error:
        faults = list(error.faults) if isinstance(error, SpecError) else []
        return _problem(_STATUS.get(error.exit_code, 500), error.message, error.hint, error.exit_code, faults)
    except SlurmError as error:
        return _problem(503, str(error), error.hint or "sinfo", ExitCode.UNREACHABLE)
    except StoreError as error:
        log.warning("%s %s: %s", request.method, request.path, error)
        return _problem(503, str(error), error.hint, ExitCode.UNREACHABLE)
    except PermissionError as error:
        return _problem(403, str(error), "", ExitCode.REFUSED)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return _problem(400, f"{request.method} {request.path}: not understood: {error}", "", ExitCode.USAGE)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _problem(500, f"{request.method} {request.path} failed", "see the log of transomd", ExitCode.ERROR)


def _problem(status: int, message: str, hint: str, code: ExitCode, faults: list[str] | None = None) -> web.Response:
    error = {"message": message, "hint": hint, "code": int(code), "faults": faults or []}
    return web.json_response({"error": error}, status=status)


class Api:
    """The routes of :mod:`transomd.api.wire`."""

    def __init__(
        self,
        operator: Operator,
        hands: manual.Hands,
        settings: Settings,
        clock: Callable[[], float],
        hooks: HookRoutes | None = None,
        ops: OpsRoutes | None = None,
    ) -> None:
        self._ops = ops
        self._operator = operator
        self._hands = hands
        self._settings = settings
        self._clock = clock
        self._started = clock()
        self._access = Access(settings)
        self._reports = Buckets(REPORTS_PER_S, REPORTS_AT_ONCE, clock)
        self.app = web.Application(middlewares=[_errors, self._settle_sender], client_max_size=MAX_BODY)
        self.app.add_routes(
            [
                web.get("/v1/daemon", self._daemon),
                web.get("/v1/jobs", self._jobs),
                web.post("/v1/jobs", self._submit),
                web.get("/v1/jobs/{id:\\d+}", self._job),
                web.post("/v1/jobs/{id:\\d+}/cancel", self._cancel),
                web.get("/v1/incidents/{id:\\d+}", self._incident),
                web.get("/v1/events", self._events),
                web.get("/v1/nodes", self._nodes),
                web.post("/v1/nodes/drain", self._drain),
                web.post("/v1/nodes/undrain", self._undrain),
                web.post("/v1/launcher", self._launcher),
                *(hooks.routes() if hooks else ()),
                *(ops.routes(self._must_be_admin) if ops else ()),
            ]
        )

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings
        self._access.use(settings)

    @web.middleware
    async def _settle_sender(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Settle who a user is before anything else; a route that is not known needs a user too."""
        if request.path in _OWN_AUTHENTICATION:
            return await handler(request)
        async with self._access.entered(request) as uid:
            request[_UID] = uid
            return await handler(request)

    def _user(self, request: web.Request) -> int:
        uid = request.get(_UID)
        if not isinstance(uid, int):
            raise RefusedError("nobody is known to have sent this")
        return uid

    def _admin(self, uid: int) -> bool:
        return self._access.admin(uid)

    def _must_be_admin(self, request: web.Request, what: str) -> str:
        uid = self._user(request)
        if not self._admin(uid):
            raise RefusedError(
                f"{what}: {user_name(uid)} is no administrator of transom",
                hint="ask an administrator, who is one by daemon.admins in transomd.toml",
            )
        return user_name(uid)

    async def _daemon(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        slurm = self._operator.world().slurm
        stopped: dict[str, Any] = self._ops.switches() if self._ops else {"paused": ""}
        withheld = stopped.get("withheld", [])
        told = {
            "version": transomd.__version__,
            "started_at": self._started,
            "mode": "personal" if self._settings.personal else "site",
            "owner": user_name(os.geteuid()),
            "database": _shown_url(self._settings.daemon.database_url),
            **stopped,
            "withheld": [one for one in withheld if self._may_see(uid, one["job"])],
            "slurm": {"ok": not slurm.error and slurm.jobs is not None, "at": slurm.jobs_at, "error": slurm.error},
        }
        return web.json_response(told)

    def _may_see(self, uid: int, job_id: int) -> bool:
        """Whether an active job is a user's own, or the user an administrator."""
        view = self._operator.view(job_id)
        return self._admin(uid) or (view is not None and view.job.uid == uid)

    async def _view(self, job_id: int) -> JobView:
        if not 0 < job_id < MAX_ID:
            raise NotFoundError("there is no such job", hint="transom status --all")
        view = self._operator.view(job_id) or await self._operator.db(self._operator.read, job_id)
        if view is None:
            raise NotFoundError(f"job {job_id}: there is no such job", hint="transom status --all")
        return view

    async def _own(self, request: web.Request) -> JobView:
        return await self._owned(request, int(request.match_info["id"]))

    async def _owned(self, request: web.Request, job_id: int) -> JobView:
        uid = self._user(request)
        view = await self._view(job_id)
        if view.job.uid != uid and not self._admin(uid):
            raise RefusedError(f"job {view.job.id} is not yours", hint="transom status")
        return view

    async def _jobs(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        states = None if request.query.get("all") else ACTIVE
        user = request.query.get("user")
        if not self._admin(uid):
            user = user_name(uid)
        store = self._operator.store
        jobs = await self._operator.db(store.jobs, states=states, user=user)
        if states is not None:
            recent = self._clock() - 86400
            ended = await self._operator.db(
                store.jobs, states=[s.value for s in JobState if s.final], user=user, limit=50
            )
            jobs = [*jobs, *(j for j in ended if (j.finished_at or 0) > recent)]
        # Names may be given to somebody else; a uid's jobs stay that uid's.
        jobs = [job for job in jobs if self._admin(uid) or job.uid == uid]
        latest = await self._operator.db(store.latest, [job.id for job in jobs])
        withheld = self._operator.withheld
        return web.json_response({"jobs": [job_line(job, latest[job.id], withheld(job.id)) for job in jobs]})

    async def _job(self, request: web.Request) -> web.Response:
        view = await self._own(request)
        checkpoints = await self._operator.db(self._operator.store.checkpoints, view.job.id)
        return web.json_response(job_detail_json(view, checkpoints, self._operator.withheld(view.job.id)))

    async def _incident(self, request: web.Request) -> web.Response:
        number, store, db = int(request.match_info["id"]), self._operator.store, self._operator.db
        found = await db(store.incident, number) if 0 < number < MAX_ID else None
        if found is None:
            raise NotFoundError(f"incident {number}: there is no such incident", hint="transom history")
        view = await self._owned(request, found.job_id)
        events = await db(store.events, job_id=found.job_id, limit=10_000)
        told = incident_detail(found, view.launches, list(view.intents.values()), events, self._settings)
        return web.json_response({"job": job_json(view), **told})

    async def _submit(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        body = checked.parse(await request.read())
        spec = JobSpec.from_stored(checked.mapping(body.get("spec"), "spec"))
        check_owner(uid, self._settings.personal)
        check_limits(spec, self._settings.policy)
        check_partition(spec, self._operator.world().slurm.nodes)
        dry_run = bool(body.get("dry_run"))
        digest = secrets.token_hex(32) if dry_run else body.get("token_sha256")
        job = new_job(spec, uid, body, digest, self._clock())
        most = None if self._admin(uid) else self._settings.policy.max_jobs
        check_room(job, [view.job for view in self._operator.views().values()], most)
        if dry_run:
            return web.json_response({"plan": self._plan(job, spec)})
        stored = await self._operator.submit(job)
        return web.json_response({"job": job_json(await self._view(stored.id))}, status=201)

    def _plan(self, job: Job, spec: JobSpec) -> dict[str, Any]:
        request = self._hands.plan(job, spec)
        return {"script": request.script, "sbatch": list(sbatch_argv(request)), "gate": gate_plan(spec, self._settings)}

    async def _cancel(self, request: web.Request) -> web.Response:
        view = await self._own(request)
        await self._operator.cancel(view.job.id, user_name(self._user(request)))
        return web.json_response({"job": job_json(await self._view(view.job.id))})

    async def _events(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        query = request.query
        job_id = _number(query, "job", MAX_ID) if "job" in query else None
        if job_id is not None and (await self._view(job_id)).job.uid != uid and not self._admin(uid):
            raise RefusedError(f"job {job_id} is not yours", hint="transom status")
        if job_id is None and not self._admin(uid):
            raise RefusedError("only an administrator sees the events of everybody", hint="transom events --job JOB")
        limit = max(1, min(_number(query, "limit", MAX_ID, 1000), MAX_EVENTS))
        wanted = {"job_id": job_id, "node": query.get("node"), "limit": limit}
        after = _number(query, "after", MAX_ID)
        wait = float(query.get("wait", 0))
        until = self._clock() + (min(wait, MAX_WAIT_S) if math.isfinite(wait) else 0.0)
        while True:
            events = await self._operator.db(self._operator.store.events, after=after, **wanted)
            if events or self._clock() >= until:
                break
            await asyncio.sleep(0.3)
        last = events[-1].id if events else after
        return web.json_response({"events": [event_json(e) for e in events], "last": last})

    async def _nodes(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        world = self._operator.world()
        records = {r.name: r for r in await self._operator.db(self._operator.store.nodes)}
        ok = world.slurm.nodes is not None
        told = [
            {**node_json(node, records.get(name), world.health.get(name), self._jobs_on(name, uid)), "stale": not ok}
            for name, node in (world.slurm.last_nodes or {}).items()
        ]
        at = world.slurm.nodes_at or None
        error = "" if ok else world.slurm.error or "not asked yet"
        return web.json_response({"nodes": told, "slurm": {"ok": ok, "at": at, "error": error}})

    def _jobs_on(self, node: str, uid: int) -> list[int]:
        return [job for job in self._operator.jobs_on(node) if self._may_see(uid, job)]

    def _may_drain(self, request: web.Request, what: str) -> str:
        who = self._must_be_admin(request, what)
        if self._settings.personal:
            raise RefusedError(
                f"{what}: this is {user_name(os.geteuid())}'s own transomd, which drains no nodes",
                hint="ask an administrator of the cluster",
            )
        return who

    async def _drain(self, request: web.Request) -> web.Response:
        who = self._may_drain(request, "drain")
        body = checked.parse(await request.read())
        nodes, reason = _hostlist(body["nodes"]), str(body.get("reason", "")).strip()
        if not reason:
            raise UsageError("drain: a reason is needed", hint="transom drain NODES --reason 'why'")
        results = await self._hands.drain(nodes, f"transom[manual] {who}: {reason}", dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})

    async def _undrain(self, request: web.Request) -> web.Response:
        who = self._may_drain(request, "undrain")
        body = checked.parse(await request.read())
        results = await self._hands.undrain(_hostlist(body["nodes"]), who, dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})

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


def _number(query: Mapping[str, str], key: str, limit: int, default: int = 0) -> int:
    """A whole number of a query, brought to from 0 to below ``limit``."""
    text = query.get(key, "")
    if text and not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise UsageError(f"{key}: expected a whole number")
    return max(0, min(int(text or default), limit - 1))


def _shown_url(url: str) -> str:
    """A database's URL without the account, and without options, which may hold a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _hostlist(value: object) -> tuple[str, ...]:
    try:
        return expand(value) if isinstance(value, str) else tuple(str(v) for v in value)  # type: ignore[attr-defined]
    except HostlistError as error:
        raise UsageError(f"nodes: {error}") from error
