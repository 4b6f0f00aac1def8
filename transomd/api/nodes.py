"""The routes of nodes: what is known of them, and drains by hand."""

from __future__ import annotations

from aiohttp import web
from transom_slurm.nodesets import HostlistError, expand

from transomd.api import checked
from transomd.api.door import Door
from transomd.api.views import node_json
from transomd.errors import UsageError
from transomd.tol import manual
from transomd.tol.loop import Operator


class NodeRoutes:
    """``GET /v1/nodes``, drain and undrain."""

    def __init__(self, operator: Operator, hands: manual.Hands, door: Door) -> None:
        self._operator = operator
        self._hands = hands
        self._door = door

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/nodes", self._nodes),
            web.post("/v1/nodes/drain", self._drain),
            web.post("/v1/nodes/undrain", self._undrain),
        ]

    async def _nodes(self, request: web.Request) -> web.Response:
        uid = self._door.user(request)
        world = self._operator.world()
        records = {r.name: r for r in await self._operator.books.db(self._operator.books.store.nodes)}
        ok = world.slurm.nodes is not None
        told = [
            {**node_json(node, records.get(name), world.health.get(name), self._jobs_on(name, uid)), "stale": not ok}
            for name, node in (world.slurm.last_nodes or {}).items()
        ]
        at = world.slurm.nodes_at or None
        error = "" if ok else world.slurm.error or "not asked yet"
        return web.json_response({"nodes": told, "slurm": {"ok": ok, "at": at, "error": error}})

    def _jobs_on(self, node: str, uid: int) -> list[int]:
        return [job for job in self._operator.jobs_on(node) if self._door.may_see(uid, self._operator.view(job))]

    async def _drain(self, request: web.Request) -> web.Response:
        who = self._door.may_drain(request, "drain")
        body = checked.parse(await request.read())
        nodes, reason = node_names(body["nodes"]), str(body.get("reason", "")).strip()
        if not reason:
            raise UsageError("drain: a reason is needed", hint="transom drain NODES --reason 'why'")
        results = await self._hands.drain(nodes, f"transom[manual] {who}: {reason}", dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})

    async def _undrain(self, request: web.Request) -> web.Response:
        who = self._door.may_drain(request, "undrain")
        body = checked.parse(await request.read())
        results = await self._hands.undrain(node_names(body["nodes"]), who, dry_run=bool(body.get("dry_run")))
        return web.json_response({"results": results})


def node_names(value: object) -> tuple[str, ...]:
    """Return the nodes that a host list or a JSON list names. Raises UsageError."""
    try:
        return expand(value) if isinstance(value, str) else tuple(str(v) for v in value)  # type: ignore[attr-defined]
    except HostlistError as error:
        raise UsageError(f"nodes: {error}") from error
