"""Reports of the nodes' hooks over TCP: sealed with the key that nodes and daemon share, and never taken twice.

The protocol, both ways, is that of ``transom_slurm/hooks/hook.py``: HMAC-SHA256 over a word, the time, a nonce and the
body; the answer is sealed for the same nonce. See docs/decisions/0012-hooks-and-their-key.md.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import web

from transomd.errors import NotFoundError, RefusedError, UsageError
from transomd.tol.nodewatch import HookReport, NodeWatch

log = logging.getLogger("transom.hooks")

WINDOW_S = 60.0
"""How far a report's time may be from ours. Nonces are remembered for as long as they could come again."""
MAX_BODY = 2 << 20
MAX_NONCES = 200_000
KINDS = ("prolog", "epilog", "healthcheck")
_HEADER = re.compile(r"Transom-Hook (\d{1,12}(?:\.\d{1,6})?) ([0-9a-f]{32}) ([0-9a-f]{64})")


class Seal:
    """The shared key, read anew when its file changes, and the nonces that were seen."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._key = b""
        self._stamp: tuple[int, int] = (0, 0)
        self._seen: dict[str, float] = {}

    def open(self, header: str, body: bytes) -> str:
        """Return the nonce of a request whose seal, time and nonce are right. Raises RefusedError."""
        found = _HEADER.fullmatch(header)
        if found is None:
            raise RefusedError("a hook must seal its report", hint="transom hooks install DIR")
        when, nonce, told = found.groups()
        if not hmac.compare_digest(told, self._mac("transom-hook-1", when.encode(), nonce.encode(), body)):
            raise RefusedError("the report's seal is not of our key", hint="transom hooks install DIR")
        now = self._clock()
        if abs(now - float(when)) > WINDOW_S:
            log.warning("a hook's report is %+.0f s off: a wrong clock, or sent again by somebody", float(when) - now)
            raise RefusedError(f"the report is {float(when) - now:+.0f} s off: set the node's clock")
        self._remember(nonce, now)
        return nonce

    def _remember(self, nonce: str, now: float) -> None:
        # In the order of arrival, so that the oldest are at the front.
        while self._seen and (first := next(iter(self._seen))) and self._seen[first] < now:
            del self._seen[first]
        if nonce in self._seen:
            raise RefusedError("this report was taken already")
        if len(self._seen) >= MAX_NONCES:
            raise RefusedError("too many reports at once")
        self._seen[nonce] = now + 2 * WINDOW_S

    def answer(self, nonce: str, body: bytes) -> str:
        """Return the seal of an answer."""
        return self._mac("transom-answer-1", nonce.encode(), body)

    def _mac(self, word: str, *parts: bytes) -> str:
        return hmac.new(self._load(), b"\n".join([word.encode(), *parts]), sha256).hexdigest()

    def _load(self) -> bytes:
        try:
            about = os.stat(self._path)
            stamp = (about.st_mtime_ns, about.st_ino)
            if stamp != self._stamp:
                self._key, self._stamp = self._path.read_bytes().strip(), stamp
        except OSError as error:
            raise RefusedError(f"there is no hooks' key {self._path}: {error.strerror}") from None
        if about.st_mode & 0o077 or len(self._key) < 32:
            raise RefusedError(f"the hooks' key {self._path} is too short, or others may read it")
        return self._key


def read_report(body: bytes) -> HookReport:
    """Return the report in a sealed body. Raises UsageError: another version of the hooks, or a damaged one."""
    try:
        data = json.loads(body)
        if data["version"] != 1 or data["kind"] not in KINDS:
            raise ValueError(f"version {data['version']!r}, kind {data['kind']!r}")
        return HookReport(
            kind=data["kind"],
            node=str(data["node"]),
            at=float(data["at"]),
            slurm_job=_number(data.get("slurm_job")),
            uid=_number(data.get("uid")),
            facts=dict(data.get("facts") or {}),
            error=str(data.get("error") or ""),
            not_run=tuple(str(part) for part in data.get("not_run") or ()),
            leftovers=data.get("leftovers"),
            late=bool(data.get("late")),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"a hook's report is not understood: {error}", hint="transom hooks install DIR") from None


def _number(value: Any) -> int | None:
    return int(value) if value is not None else None


class HookRoutes:
    """``POST /v1/hooks``."""

    def __init__(self, watch: NodeWatch, key: Path, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._seal = Seal(key, clock)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes to add to the application."""
        return [web.post("/v1/hooks", self._take)]

    async def _take(self, request: web.Request) -> web.Response:
        if (request.content_length or 0) > MAX_BODY:
            raise RefusedError("a hook's report is too long")
        body = await request.read()
        nonce = self._seal.open(request.headers.get("Authorization", ""), body)
        try:
            answer = await self._watch.take(read_report(body))
            told = {"said": answer.said, "refuse": answer.refuse}
        except (UsageError, NotFoundError) as error:
            told = {"said": error.message, "refuse": ""}
        text = json.dumps(told).encode()
        headers = {"X-Transom-Mac": self._seal.answer(nonce, text)}
        return web.Response(body=text, content_type="application/json", headers=headers)
