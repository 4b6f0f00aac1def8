"""The routes of jobs: listing, looking, submitting, cancelling, and the events of all that happens."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from transom_slurm.batch import sbatch_argv
from transom_sql.records import Job

from transomd.api import checked
from transomd.api.door import Door
from transomd.api.incidents import incident_detail
from transomd.api.submissions import check_limits, check_owner, check_partition, check_room, new_job
from transomd.api.views import event_json, job_detail_json, job_json, job_line
from transomd.errors import NotFoundError, RefusedError, UsageError
from transomd.modes import user_name
from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol import manual
from transomd.tol.loop import ACTIVE, Operator
from transomd.tol.submission import gate_plan
from transomd.tol.view import JobView
from transomd.words import JobState

MAX_WAIT_S = 55.0
MAX_EVENTS = 10_000
MAX_ID = 1 << 53


class JobRoutes:
    """Users see and touch their own jobs, administrators everybody's."""

    def __init__(
        self, operator: Operator, hands: manual.Hands, settings: Settings, clock: Callable[[], float], door: Door
    ) -> None:
        self._operator = operator
        self._books = operator.books
        self._hands = hands
        self._settings = settings
        self._clock = clock
        self._door = door

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/jobs", self._jobs),
            web.post("/v1/jobs", self._submit),
            web.get("/v1/jobs/{id:\\d+}", self._job),
            web.post("/v1/jobs/{id:\\d+}/cancel", self._cancel),
            web.get("/v1/incidents/{id:\\d+}", self._incident),
            web.get("/v1/events", self._events),
        ]

    async def _view(self, job_id: int) -> JobView:
        if not 0 < job_id < MAX_ID:
            raise NotFoundError("there is no such job", hint="transom status --all")
        view = self._operator.view(job_id) or await self._books.db(self._operator.read, job_id)
        if view is None:
            raise NotFoundError(f"job {job_id}: there is no such job", hint="transom status --all")
        return view

    async def _own(self, request: web.Request) -> JobView:
        return await self._owned(request, int(request.match_info["id"]))

    async def _owned(self, request: web.Request, job_id: int) -> JobView:
        uid = self._door.user(request)
        view = await self._view(job_id)
        if view.job.uid != uid and not self._door.admin(uid):
            raise RefusedError(f"job {view.job.id} is not yours", hint="transom status")
        return view

    async def _jobs(self, request: web.Request) -> web.Response:
        uid = self._door.user(request)
        states = None if request.query.get("all") else ACTIVE
        user = request.query.get("user")
        if not self._door.admin(uid):
            user = user_name(uid)
        store = self._books.store
        jobs = await self._books.db(store.jobs, states=states, user=user)
        if states is not None:
            recent = self._clock() - 86400
            ended = await self._books.db(store.jobs, states=[s.value for s in JobState if s.final], user=user, limit=50)
            jobs = [*jobs, *(j for j in ended if (j.finished_at or 0) > recent)]
        # Names may be given to somebody else; a uid's jobs stay that uid's.
        jobs = [job for job in jobs if self._door.admin(uid) or job.uid == uid]
        latest = await self._books.db(store.latest, [job.id for job in jobs])
        withheld = self._operator.withheld
        return web.json_response({"jobs": [job_line(job, latest[job.id], withheld(job.id)) for job in jobs]})

    async def _job(self, request: web.Request) -> web.Response:
        view = await self._own(request)
        checkpoints = await self._books.db(self._books.store.checkpoints, view.job.id)
        return web.json_response(job_detail_json(view, checkpoints, self._operator.withheld(view.job.id)))

    async def _incident(self, request: web.Request) -> web.Response:
        number, store, db = int(request.match_info["id"]), self._books.store, self._books.db
        found = await db(store.incident, number) if 0 < number < MAX_ID else None
        if found is None:
            raise NotFoundError(f"incident {number}: there is no such incident", hint="transom history")
        view = await self._owned(request, found.job_id)
        events = await db(store.events, job_id=found.job_id, limit=10_000)
        told = incident_detail(found, view.launches, list(view.intents.values()), events, self._settings)
        return web.json_response({"job": job_json(view), **told})

    async def _submit(self, request: web.Request) -> web.Response:
        uid = self._door.user(request)
        body = checked.parse(await request.read())
        spec = JobSpec.from_stored(checked.mapping(body.get("spec"), "spec"))
        check_owner(uid, self._settings.personal)
        check_limits(spec, self._settings.policy)
        check_partition(spec, self._operator.world().slurm.nodes)
        dry_run = bool(body.get("dry_run"))
        digest = secrets.token_hex(32) if dry_run else body.get("token_sha256")
        job = new_job(spec, uid, body, digest, self._clock())
        most = None if self._door.admin(uid) else self._settings.policy.max_jobs
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
        await self._operator.cancel(view.job.id, user_name(self._door.user(request)))
        return web.json_response({"job": job_json(await self._view(view.job.id))})

    async def _events(self, request: web.Request) -> web.Response:
        uid = self._door.user(request)
        query = request.query
        job_id = _number(query, "job", MAX_ID) if "job" in query else None
        if job_id is not None and (await self._view(job_id)).job.uid != uid and not self._door.admin(uid):
            raise RefusedError(f"job {job_id} is not yours", hint="transom status")
        if job_id is None and not self._door.admin(uid):
            raise RefusedError("only an administrator sees the events of everybody", hint="transom events --job JOB")
        limit = max(1, min(_number(query, "limit", MAX_ID, 1000), MAX_EVENTS))
        wanted = {"job_id": job_id, "node": query.get("node"), "limit": limit}
        after = _number(query, "after", MAX_ID)
        wait = float(query.get("wait", 0))
        until = self._clock() + (min(wait, MAX_WAIT_S) if math.isfinite(wait) else 0.0)
        while True:
            events = await self._books.db(self._books.store.events, after=after, **wanted)
            if events or self._clock() >= until:
                break
            await asyncio.sleep(0.3)
        last = events[-1].id if events else after
        return web.json_response({"events": [event_json(e) for e in events], "last": last})


def _number(query: Mapping[str, str], key: str, limit: int, default: int = 0) -> int:
    """A whole number of a query, brought to from 0 to below ``limit``."""
    text = query.get(key, "")
    if text and not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise UsageError(f"{key}: expected a whole number")
    return max(0, min(int(text or default), limit - 1))
