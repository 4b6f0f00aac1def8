"""Who sent a request, settled before anything else, and what they may ask for."""

from __future__ import annotations

import os
from typing import Any

from aiohttp import web

from transomd.api.access import Access
from transomd.api.problems import Handler
from transomd.errors import RefusedError
from transomd.modes import user_name
from transomd.settings import Settings
from transomd.tol.view import JobView

_OWN_AUTHENTICATION = frozenset({"/v1/launcher", "/v1/hooks"})
"""Paths that are not users': who asks is settled by what answers them."""
# aiohttp from 3.14 on warns of a plain string.
_UID: Any = web.RequestKey("transom-uid", int) if hasattr(web, "RequestKey") else "transom-uid"


class Door:
    """Every request of a user's comes through :meth:`settle_sender`; the others say who that was."""

    def __init__(self, settings: Settings) -> None:
        self._personal = settings.personal
        self._access = Access(settings)

    def use(self, settings: Settings) -> None:
        """Go on with other administrators."""
        self._access.use(settings)

    @web.middleware
    async def settle_sender(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Settle who a user is before anything else; a route that is not known needs a user too."""
        if request.path in _OWN_AUTHENTICATION:
            return await handler(request)
        async with self._access.entered(request) as uid:
            request[_UID] = uid
            return await handler(request)

    def user(self, request: web.Request) -> int:
        """The uid of who sent this. Raises RefusedError where nobody was settled."""
        uid = request.get(_UID)
        if not isinstance(uid, int):
            raise RefusedError("nobody is known to have sent this")
        return uid

    def admin(self, uid: int) -> bool:
        """Whether a user administers this transom."""
        return self._access.admin(uid)

    def administrator(self, request: web.Request, what: str) -> str:
        """The name of the administrator who asks for ``what``. Raises RefusedError for anybody else."""
        uid = self.user(request)
        if not self.admin(uid):
            raise RefusedError(
                f"{what}: {user_name(uid)} is no administrator of transom",
                hint="ask an administrator, who is one by daemon.admins in transomd.toml",
            )
        return user_name(uid)

    def may_see(self, uid: int, view: JobView | None) -> bool:
        """Whether a job is a user's own, or the user an administrator."""
        return self.admin(uid) or (view is not None and view.job.uid == uid)

    def may_drain(self, request: web.Request, what: str) -> str:
        """The name of the administrator who drains. Raises RefusedError, also where transom drains nothing."""
        who = self.administrator(request, what)
        if self._personal:
            raise RefusedError(
                f"{what}: this is {user_name(os.geteuid())}'s own transomd, which drains no nodes",
                hint="ask an administrator of the cluster",
            )
        return who
