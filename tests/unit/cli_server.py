"""A small real HTTP server on a Unix socket that answers recorded JSON, and a way to run the CLI against it."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Answer = tuple[int, Any] | Callable[["Request"], tuple[int, Any]]

NOW = 1_900_000_000.0
DAEMON = {"version": "0.1.0", "mode": "site", "paused": False, "slurm": {"ok": True, "at": NOW, "error": ""}}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    body: Any


@dataclass
class Recorded:
    """What the server answers by ``METHOD /path``, and what it was asked."""

    socket: Path
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def on(self, route: str, answer: Answer) -> None:
        self.answers[route] = answer

    def asked(self, route: str) -> list[Request]:
        return [request for request in self.requests if f"{request.method} {request.path}" == route]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 32
    recorded: Recorded


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = dict(urllib.parse.parse_qsl(url.query))
        request = Request(self.command, url.path, query, json.loads(data) if data else None)
        recorded = self.server.recorded
        recorded.requests.append(request)
        answer = recorded.answers.get(f"{self.command} {url.path}", (404, error("no such path", "transom status")))
        status, body = answer(request) if callable(answer) else answer
        if status == 0:
            return
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(raw)


def error(message: str, hint: str = "", faults: list[str] | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "hint": hint, "code": 1, "faults": faults or []}}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Recorded]:
    """Serve on ``folder/s``; ``GET /v1/daemon`` is answered from the start."""
    recorded = Recorded(folder / "s", {"GET /v1/daemon": (200, DAEMON)})
    with _Server(str(recorded.socket), _Handler) as server:
        server.recorded = recorded
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="recorded-server")
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()


def start(*words: str, socket: Path | str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
    """Start ``transom`` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "transom_cli.main", *words],
        env=_environment(socket, env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def transom(
    *words: str, socket: Path | str = "/nonexistent/s", cwd: Path | None = None, stdin: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``transom`` as a process of its own, 80 columns wide, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "transom_cli.main", *words],
        env=_environment(socket, env),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _environment(socket: Path | str, env: Mapping[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "LANG": "C.UTF-8", "COLUMNS": "80", "TRANSOM_SOCKET": str(socket), **env}


def a_job(**changes: Any) -> dict[str, Any]:
    """A job as GET /v1/jobs shows it."""
    return {
        "id": 12,
        "name": "demo",
        "user": "alice",
        "state": "running",
        "reason": "epoch 2 runs on n[1-2,4-5]",
        "attempt": 1,
        "epoch": 2,
        "slurm_job_id": 4711,
        "nodes": ["n1", "n2", "n4", "n5"],
        "spares": 1,
        "step": 140,
        "step_at": NOW - 3,
        "checkpoint": {"step": 120, "epoch": 2, "at": NOW - 40},
        "restarts": 1,
        "created_at": NOW - 4000,
        "changed_at": NOW - 62,
        "finished_at": None,
        "run_dir": "/home/alice/.transom/demo-1",
        "workdir": "/home/alice",
        "checkpoint_dir": "/home/alice/checkpoints/demo",
        "incident": None,
        **changes,
    }


def a_view(**changes: Any) -> dict[str, Any]:
    """A job as GET /v1/jobs/ID shows it: one node was lost, and the job runs again on a spare."""
    job = changes.pop("job", a_job())
    return {
        "job": job,
        "attempts": [
            {
                "number": 1,
                "slurm_job_id": 4711,
                "nodes": ["n1", "n2", "n3", "n4", "n5"],
                "excluded": [],
                "barred": ["n3"],
                "started_at": NOW - 3900,
                "ended_at": None,
                "end_reason": "",
            }
        ],
        "launches": [
            {
                "epoch": 1,
                "attempt": 1,
                "nodes": ["n1", "n2", "n3", "n4"],
                "started_at": NOW - 3800,
                "ended_at": NOW - 70,
                "first_step": 1,
                "last_step": 108,
                "end_reason": "n3 was lost",
            },
            {
                "epoch": 2,
                "attempt": 1,
                "nodes": ["n1", "n2", "n4", "n5"],
                "started_at": NOW - 62,
                "ended_at": None,
                "first_step": 101,
                "last_step": 140,
                "end_reason": "",
            },
        ],
        "incidents": [an_incident()],
        "intents": [],
        "checkpoints": [],
        **changes,
    }


def an_incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": 3,
        "class": "host",
        "blame": "node",
        "action": "drain",
        "nodes": ["n3"],
        "ranks": [2],
        "confidence": "high",
        "summary": "n3 does not answer Slurm or SSH: it has no power or no network",
        "detected_at": NOW - 75,
        "diagnosed_at": NOW - 74.2,
        "fenced_at": NOW - 70,
        "drained_at": NOW - 73,
        "acted_at": NOW - 69.5,
        "recovered_at": NOW - 60,
        "evidence": [
            {
                "source": "slurm",
                "signature": "SLURM-NODE-DOWN",
                "text": "n3 DOWN*+DRAIN Not responding",
                "role": "root",
                "node": "n3",
            },
            {
                "source": "log",
                "signature": "NCCL-REMOTE-CLOSED",
                "text": "Connection closed by peer n3",
                "role": "victim",
                "node": "n1",
                "rank": 0,
                "file": "rank-0.log",
                "line": 88,
                "count": 14,
            },
        ],
        **changes,
    }
