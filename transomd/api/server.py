"""The daemon's HTTP side: users, by :mod:`transomd.api.door`, and launchers on TCP (a token says whose)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from aiohttp import web

import transomd
from transomd.api import problems
from transomd.api.door import Door
from transomd.api.hooks import HookRoutes
from transomd.api.jobs import JobRoutes
from transomd.api.launchers import LauncherRoutes
from transomd.api.nodes import NodeRoutes
from transomd.api.ops import OpsRoutes
from transomd.modes import user_name
from transomd.settings import Settings
from transomd.tol import manual
from transomd.tol.loop import Operator

MAX_BODY = 8 * 1024 * 1024


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
        self._settings = settings
        self._started = clock()
        self._door = Door(settings)
        self._jobs = JobRoutes(operator, hands, settings, clock, self._door)
        self.app = web.Application(middlewares=[problems.told, self._door.settle_sender], client_max_size=MAX_BODY)
        self.app.add_routes(
            [
                web.get("/v1/daemon", self._daemon),
                *self._jobs.routes(),
                *NodeRoutes(operator, hands, self._door).routes(),
                *LauncherRoutes(operator, clock).routes(),
                *(hooks.routes() if hooks else ()),
                *(ops.routes(self._door.administrator) if ops else ()),
            ]
        )

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""
        self._settings = settings
        self._door.use(settings)
        self._jobs.use(settings)

    async def _daemon(self, request: web.Request) -> web.Response:
        uid = self._door.user(request)
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
            "withheld": [one for one in withheld if self._door.may_see(uid, self._operator.view(one["job"]))],
            "slurm": {"ok": not slurm.error and slurm.jobs is not None, "at": slurm.jobs_at, "error": slurm.error},
        }
        return web.json_response(told)


def _shown_url(url: str) -> str:
    """A database's URL without the account, and without options, which may hold a password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
