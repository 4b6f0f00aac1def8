"""The daemon's HTTP side: users on the Unix socket (the kernel says who), launchers on TCP (a token says whose)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import pwd
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from transom_slurm.batch import sbatch_argv
from transom_slurm.errors import SlurmError
from transom_slurm.nodesets import HostlistError, expand
from transom_sql.records import Job

import transomd
from transomd.api.hooks import HookRoutes
from transomd.api.ops import OpsRoutes
from transomd.api.views import event_json, job_detail_json, job_json, job_line, node_json
from transomd.api.wire import LauncherReport
from transomd.errors import NotFoundError, RefusedError, SpecError, TransomError, UnreachableError, UsageError
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
_STATUS = {
    ExitCode.USAGE: 400,
    ExitCode.REFUSED: 403,
    ExitCode.NOT_FOUND: 404,
    ExitCode.UNREACHABLE: 503,
    ExitCode.ERROR: 500,
}


def peer_uid(request: web.Request) -> int | None:
    """Return the uid of the process at the other end of the Unix socket (SO_PEERCRED); None over TCP."""
    transport = request.transport
    sock: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", raw)[1]
    return uid


def user_name(uid: int) -> str:
    """Return the login name of a uid, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
    except PermissionError as error:
        return _problem(403, str(error), "", ExitCode.REFUSED)
    except (ValueError, TypeError, KeyError) as error:
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
        self.app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
        self.app.add_routes(
            [
                web.get("/v1/daemon", self._daemon),
                web.get("/v1/jobs", self._jobs),
                web.post("/v1/jobs", self._submit),
                web.get("/v1/jobs/{id:\\d+}", self._job),
                web.post("/v1/jobs/{id:\\d+}/cancel", self._cancel),
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

    def _user(self, request: web.Request) -> int:
        uid = peer_uid(request)
        if uid is None:
            raise RefusedError("only launchers may come over TCP", hint="use the Unix socket on the head node")
        return uid

    def _admin(self, uid: int) -> bool:
        return uid in (0, os.geteuid()) or user_name(uid) in self._settings.daemon.admins

    def _must_be_admin(self, request: web.Request, what: str) -> str:
        uid = self._user(request)
        if not self._admin(uid):
            raise RefusedError(
                f"{what}: {user_name(uid)} is no administrator of transom",
                hint="ask an administrator, who is one by daemon.admins in transomd.toml",
            )
        return user_name(uid)

    async def _daemon(self, request: web.Request) -> web.Response:
        self._user(request)
        slurm = self._operator.world().slurm
        told = {
            "version": transomd.__version__,
            "started_at": self._started,
            "mode": "site" if os.geteuid() == 0 else "personal",
            "database": self._settings.daemon.database_url.split("@")[-1],
            **(self._ops.switches() if self._ops else {"paused": ""}),
            "slurm": {"ok": not slurm.error and slurm.jobs is not None, "at": slurm.jobs_at, "error": slurm.error},
        }
        return web.json_response(told)

    async def _view(self, job_id: int) -> JobView:
        view = self._operator.view(job_id) or await self._operator.db(self._operator.read, job_id)
        if view is None:
            raise NotFoundError(f"job {job_id}: there is no such job", hint="transom status --all")
        return view

    async def _own(self, request: web.Request) -> JobView:
        uid = self._user(request)
        view = await self._view(int(request.match_info["id"]))
        if view.job.uid != uid and not self._admin(uid):
            raise RefusedError(f"job {view.job.id} belongs to {view.job.user}", hint="transom status")
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
        latest = await self._operator.db(store.latest, [job.id for job in jobs])
        withheld = self._operator.withheld
        return web.json_response({"jobs": [job_line(job, latest[job.id], withheld(job.id)) for job in jobs]})

    async def _job(self, request: web.Request) -> web.Response:
        view = await self._own(request)
        checkpoints = await self._operator.db(self._operator.store.checkpoints, view.job.id)
        return web.json_response(job_detail_json(view, checkpoints, self._operator.withheld(view.job.id)))

    async def _submit(self, request: web.Request) -> web.Response:
        uid = self._user(request)
        body = await request.json()
        spec = JobSpec.from_stored(body["spec"])
        self._limits(spec)
        await self._partition_exists(spec)
        if body.get("dry_run"):
            job = self._new_job(spec, uid, str(body["run_dir"]), str(body["cwd"]), secrets.token_hex(16))
            return web.json_response({"plan": self._plan(job, spec)})
        job = self._new_job(spec, uid, str(body["run_dir"]), str(body["cwd"]), str(body["token"]))
        stored = await self._operator.submit(job)
        return web.json_response({"job": job_json(await self._view(stored.id))}, status=201)

    def _limits(self, spec: JobSpec) -> None:
        policy = self._settings.policy
        pairs = (
            ("max_restarts", spec.policy.max_restarts, policy.max_restarts),
            ("max_user_restarts", spec.policy.max_user_restarts, policy.max_user_restarts),
            ("max_attempts", spec.policy.max_attempts, policy.max_attempts),
            ("no_progress_limit", spec.policy.no_progress_limit, policy.no_progress_limit),
        )
        faults = tuple(
            f"policy.{n}: {asked} is above the site's ceiling of {top}" for n, asked, top in pairs if asked > top
        )
        if faults:
            raise SpecError("the job asks for more than the site allows", faults, hint="lower it and submit again")

    async def _partition_exists(self, spec: JobSpec) -> None:
        nodes = self._operator.world().slurm.nodes
        if nodes is None or not spec.partition:
            return
        known = sorted({p for node in nodes.values() for p in node.partitions})
        unknown = [p for p in spec.partition.split(",") if p not in known]
        if unknown:
            fault = f"partition: Slurm has no {', '.join(unknown)}; it has {', '.join(known)}"
            raise SpecError("the job cannot be submitted", (fault,), hint="sinfo -o %P")

    def _new_job(self, spec: JobSpec, uid: int, run_dir: str, cwd: str, token: str) -> Job:
        if not run_dir.startswith("/") or not cwd.startswith("/") or len(token) < 32:
            raise UsageError("submit: run_dir and cwd must be absolute, the token at least 32 characters")
        now = self._clock()
        return Job(
            name=spec.name,
            user=user_name(uid),
            uid=uid,
            spec=spec.model_dump(mode="json"),
            run_dir=run_dir,
            cwd=cwd,
            token_sha256=hashlib.sha256(token.encode()).hexdigest(),
            state=JobState.SUBMITTED.value,
            reason="recorded",
            created_at=now,
            changed_at=now,
        )

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
        job_id = int(query["job"]) if "job" in query else None
        if job_id is not None and (await self._view(job_id)).job.uid != uid and not self._admin(uid):
            raise RefusedError(f"job {job_id} is not yours", hint="transom status")
        if job_id is None and not self._admin(uid):
            raise RefusedError("only an administrator sees the events of everybody", hint="transom events --job JOB")
        wanted = {"job_id": job_id, "node": query.get("node"), "limit": min(int(query.get("limit", 1000)), 10_000)}
        after = int(query.get("after", 0))
        until = self._clock() + min(float(query.get("wait", 0)), MAX_WAIT_S)
        while True:
            events = await self._operator.db(self._operator.store.events, after=after, **wanted)
            if events or self._clock() >= until:
                break
            await asyncio.sleep(0.3)
        last = events[-1].id if events else after
        return web.json_response({"events": [event_json(e) for e in events], "last": last})

    async def _nodes(self, request: web.Request) -> web.Response:
        self._user(request)
        world = self._operator.world()
        records = {r.name: r for r in await self._operator.db(self._operator.store.nodes)}
        told = [
            node_json(node, records.get(name), world.health.get(name), self._operator.jobs_on(name))
            for name, node in (world.slurm.nodes or {}).items()
        ]
        slurm = {"ok": world.slurm.nodes is not None, "at": world.slurm.nodes_at, "error": world.slurm.error}
        if world.slurm.nodes is None:
            raise UnreachableError(
                f"Slurm does not answer: {world.slurm.error or 'not asked yet'}", hint="scontrol ping"
            )
        return web.json_response({"nodes": told, "slurm": slurm})

    async def _drain(self, request: web.Request) -> web.Response:
        who = self._must_be_admin(request, "drain")
        body = await request.json()
        nodes, reason = _hostlist(body["nodes"]), str(body.get("reason", "")).strip()
        if not reason:
            raise UsageError("drain: a reason is needed", hint="transom drain NODES --reason 'why'")
        results = await self._hands.drain(nodes, f"transom[manual] {who}: {reason}", dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})

    async def _undrain(self, request: web.Request) -> web.Response:
        who = self._must_be_admin(request, "undrain")
        body = await request.json()
        results = await self._hands.undrain(_hostlist(body["nodes"]), who, dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})

    async def _launcher(self, request: web.Request) -> web.Response:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token:
            raise RefusedError("a launcher must show its job's token")
        report = LauncherReport.from_json(await request.json())
        answer = await self._operator.report(report, token)
        return web.json_response(answer.to_json())


def _hostlist(value: object) -> tuple[str, ...]:
    try:
        return expand(value) if isinstance(value, str) else tuple(str(v) for v in value)  # type: ignore[attr-defined]
    except HostlistError as error:
        raise UsageError(f"nodes: {error}") from error


class Server:
    """The listening sockets. The socket file is for everybody: who may do what is decided by SO_PEERCRED."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._runner = web.AppRunner(api.app, access_log=None, shutdown_timeout=1.0)
        self._settings = settings

    async def start(self, port: int) -> None:
        """Listen for launchers on TCP (where the site file says so) and for users on the Unix socket."""
        await self._runner.setup()
        where = self._settings.daemon.listen_address
        if where is not None:
            await web.TCPSite(self._runner, where[0] or None, port).start()
        await self._start_unix()

    async def _start_unix(self) -> None:
        path = Path(self._settings.daemon.socket)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket() and not _served(path):
            path.unlink()
        elif path.exists():
            raise TransomError(
                f"listening on {path}: another transomd serves it", hint=f"transom --socket {path} status"
            )
        await web.UnixSite(self._runner, str(path)).start()
        path.chmod(0o666)

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()
        Path(self._settings.daemon.socket).unlink(missing_ok=True)


def _served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
