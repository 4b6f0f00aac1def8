"""Talks to transomd over its Unix socket, or over TCP with munge. Standard library only, so that the CLI starts fast.

One connection a request: a command asks once or twice, and a follower's long poll may be cut at any time.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import urllib.parse
from collections.abc import Mapping
from typing import Any

from transomd.errors import NotFoundError, RefusedError, SpecError, TransomError, UnreachableError, UsageError
from transomd.places import SITE_SOCKET, personal_socket

DEFAULT_SOCKET = SITE_SOCKET
ENV_SOCKET = "TRANSOM_SOCKET"
ENV_URL = "TRANSOM_URL"
ENV_SANDBOX = "TRANSOM_SANDBOX"
MAX_ANSWER = 256 << 20
"""Bytes of the largest answer that is read: ten thousand jobs need a few MiB."""

_ERRORS: Mapping[int, type[TransomError]] = {
    400: UsageError,
    401: RefusedError,
    403: RefusedError,
    404: NotFoundError,
    422: UsageError,
    503: UnreachableError,
}


class NoAnswerError(UnreachableError):
    """The request was sent and not answered: whether it was carried out is not known."""


class Client:
    """The daemon as a user sees it; ``address`` is a socket's path or ``http://host:port`` (empty: the usual one).

    Every call raises UnreachableError when no answer came (which says nothing about what the daemon did or did not do),
    and the error that the daemon answered with otherwise. ``timeout_s`` is for the silence between two pieces of data.
    """

    def __init__(self, address: str = "", *, timeout_s: float = 30.0) -> None:
        self.address = address or usual_address()
        self.timeout_s = timeout_s

    def get(self, path: str, **query: object) -> dict[str, Any]:
        """GET ``path`` with the query's parts that are not None; a ``wait`` in it is added to the timeout."""
        given = {key: value for key, value in query.items() if value is not None}
        patience = self.timeout_s + float(str(given.get("wait", 0)))
        return self._ask("GET", f"{path}?{urllib.parse.urlencode(given)}" if given else path, None, patience)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """POST ``body`` as JSON to ``path``."""
        return self._ask("POST", path, json.dumps(body or {}).encode(), self.timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        connection = self._connection(timeout_s)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise self._unreachable(error, timeout_s) from None
        try:
            connection.request(method, path, body, self._headers(method, path, body or b""))
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error, timeout_s) from None
        finally:
            connection.close()
        return self._answer(answer.status, data)

    def _headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Host": "transomd"}
        if self.address.startswith("http://"):
            from transomd.api import munge  # over the socket, the usual way, it is not needed

            headers["Authorization"] = f"{munge.SCHEME} {munge.credential(method, path, body)}"
        return headers

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if not self.address.startswith("http://"):
            return _UnixConnection(self.address, timeout_s)
        try:
            url = urllib.parse.urlsplit(self.address)
            host, port = url.hostname, url.port
        except ValueError:
            host, port = None, None
        if not host:
            raise UsageError(f"{self.address!r} is no address of transomd", hint="give http://HOST:PORT or a socket")
        return http.client.HTTPConnection(host, port or 7077, timeout=timeout_s)

    def _answer(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            if len(data) > MAX_ANSWER:
                raise ValueError("too long")
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError("no object")
        except ValueError:
            message = f"what answers at {self.address} is not transomd (HTTP {status}, no JSON)"
            raise NoAnswerError(message, hint=f"check --socket and ${ENV_SOCKET}") from None
        if status >= 400:
            raise _error(status, value)
        return value

    def _no_answer(self, error: Exception, timeout_s: float) -> NoAnswerError:
        cause = "it broke off its answer"
        if isinstance(error, TimeoutError):
            cause = f"no answer within {timeout_s:g} s"
        return NoAnswerError(f"asking transomd at {self.address}: {cause}", hint="systemctl status transomd")

    def _unreachable(self, error: OSError, timeout_s: float) -> TransomError:
        doing = f"asking transomd at {self.address}"
        if isinstance(error, TimeoutError):
            return UnreachableError(f"{doing}: no connection within {timeout_s:g} s", hint="systemctl status transomd")
        if error.errno in (errno.EACCES, errno.EPERM):
            return RefusedError(f"{doing}: you may not open its socket", hint=f"ls -l {self.address}; id")
        causes = {
            errno.ENOENT: "there is no such socket: the daemon does not run here, or uses another",
            errno.ENOTDIR: "there is no such socket: the daemon does not run here, or uses another",
            errno.ECONNREFUSED: "the connection was refused: the daemon does not run",
            errno.ENOTSOCK: "that is no socket",
        }
        cause = causes.get(error.errno or 0, error.strerror or str(error))
        return UnreachableError(f"{doing}: {cause}", hint=_start_hint())


def usual_address(env: Mapping[str, str] = os.environ) -> str:
    """Return where transomd is found: ``$TRANSOM_SOCKET``, ``$TRANSOM_URL``, one's own daemon's socket, the site's."""
    named = env.get(ENV_SOCKET) or env.get(ENV_URL)
    if named:
        return named
    own = personal_socket(env)
    # After su or sudo the home may be somebody else's, where nobody may look.
    return str(own) if os.path.exists(own) else DEFAULT_SOCKET


def _start_hint(env: Mapping[str, str] = os.environ) -> str:
    # No service manager starts the daemon of a sandbox: whoever is in it does.
    look = "transomd > transomd.log 2>&1 &" if env.get(ENV_SANDBOX) else "systemctl status transomd"
    return f"{look}; or name another by --socket, ${ENV_SOCKET} or ${ENV_URL}"


def _error(status: int, value: dict[str, Any]) -> TransomError:
    """Return the error that an answer stands for; whatever it holds is taken as text."""
    told = value.get("error")
    told = told if isinstance(told, dict) else {}
    message = str(told.get("message") or f"transomd answered HTTP {status}")
    hint = str(told.get("hint") or "")
    faults = told.get("faults")
    if isinstance(faults, list) and faults:
        return SpecError(message, tuple(str(fault) for fault in faults), hint=hint)
    return _ERRORS.get(status, TransomError)(message, hint=hint)


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("transomd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket. Raises OSError."""
        if len(os.fsencode(self._path)) > 107:
            raise OSError(errno.ENAMETOOLONG, "a socket's path has 107 bytes at most")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
