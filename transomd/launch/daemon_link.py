"""The launcher's line to the daemon: a report goes out, a directive comes back. Standard library only."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from transomd.api.wire import ERROR_KEYS, Directive, LauncherReport
from transomd.words import ExitCode

log = logging.getLogger("transom.launcher")
TIMEOUT_S = 10.0


class DaemonLink:
    """Sends reports, and keeps since when none was answered (``clock``, monotonic seconds)."""

    def __init__(self, url: str, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._token = token
        self._clock = clock
        self._heard_at = clock()
        self._unanswered_at: float | None = None
        self._said = ""

    async def report(self, report: LauncherReport) -> Directive | None:
        """Send one report; None when the daemon did not answer, which says nothing about what it wants."""
        sent_at = self._clock()
        try:
            answer = await asyncio.to_thread(self._post, report.job_id, json.dumps(report.to_json()).encode())
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._say(f"transomd does not answer: {error}")
            if self._unanswered_at is None and sent_at >= self._heard_at:
                self._unanswered_at = sent_at
            return None
        self._heard_at, self._unanswered_at = self._clock(), None
        self._say("transomd answers")
        return answer

    def silent_for(self) -> float:
        """Return the seconds since the first report that no answer came to, nor to any after it; 0 when there is none.

        A launcher with nothing to say is not silence of the daemon's.
        """
        return 0.0 if self._unanswered_at is None else self._clock() - self._unanswered_at

    def _post(self, job_id: int, body: bytes) -> Directive:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            headers = {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._token}",
                "Transom-Job": str(job_id),
            }
            connection.request("POST", "/v1/launcher", body, headers)
            response = connection.getresponse()
            data = json.loads(response.read())
        finally:
            connection.close()
        try:
            if response.status == 403 and _is_transoms(data["error"]):
                return Directive(gate="refuse", message=str(data["error"]["message"]))
            if response.status == 200:
                return Directive.from_json(data)
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"what answers is not transomd (HTTP {response.status})") from None
        raise ValueError(f"HTTP {response.status}: {data}")

    def _say(self, text: str) -> None:
        if text != self._said:
            log.info("%s", text)
            self._said = text


def _is_transoms(error: Mapping[str, Any]) -> bool:
    """Whether a refusal is transomd's: proxies and clouds answer 403 with an ``error`` too, which must end no job."""
    return error.keys() == ERROR_KEYS and error["code"] == int(ExitCode.REFUSED)
