"""Whatever a job, a node or a log calls itself: no command lets it steer the terminal of who looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import NOW, Recorded, a_job, a_view, an_incident, error, serving, transom

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\u2066\u200b\x00"


def poisoned(value: Any) -> Any:
    """The same answer, with poison in every text."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value


EVENT = {"id": 1, "at": NOW, "kind": "verdict", "job_id": 12, "node": "n1", "message": "words", "data": {"a": "b"}}
NODE = {
    "name": "n1", "state": "DOWN", "reason": "r", "reason_user": "u", "reason_time": NOW, "owner": "person",
    "jobs": [12], "checked_at": NOW, "reached": True, "error": "e",
    "checks": [{"check": "xid", "outcome": "unfit", "value": "v", "limit": "l", "evidence": "e", "signature": "s"}],
}  # fmt: skip
FINDING = {"section": "daemon", "level": "problem", "text": "t", "next": "n"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        recorded.on("GET /v1/jobs", (200, poisoned({"jobs": [a_job(incident=an_incident())]})))
        recorded.on("GET /v1/jobs/12", (200, poisoned(a_view())))
        recorded.on("GET /v1/events", (200, poisoned({"events": [EVENT], "last": 1})))
        recorded.on("GET /v1/nodes", (200, poisoned({"nodes": [NODE], "slurm": {"ok": True, "at": NOW, "error": "x"}})))
        recorded.on("GET /v1/doctor", (200, poisoned({"findings": [FINDING]})))
        recorded.on("GET /v1/incidents/3", (200, poisoned({"incident": an_incident(), "job": a_job(), "events": []})))
        recorded.on("GET /v1/history", (200, poisoned({"incidents": [an_incident()], "drains": [], "lemons": []})))
        recorded.on("POST /v1/jobs/12/cancel", (403, poisoned(error("no", "hint", ["fault"]))))
        yield recorded


@pytest.mark.parametrize(
    "words",
    [
        "status", "status --all", "status 12", "events --job 12", "events", "nodes", "nodes n1", "logs 12",
        "ckpt list 12", "cancel 12", "incident 3", "history", "history 12", "doctor", "status 12 --json",
        "nodes --json", "check n1",
        "status demo\x1b[2J", "drain n\x1b[1] --reason x",
    ],
)  # fmt: skip
def test_no_command_passes_on_what_steers_a_terminal(server: Recorded, words: str) -> None:
    done = transom(*words.split(" "), socket=server.socket)
    told = done.stdout + done.stderr
    assert told.strip()
    assert [char for char in told if not char.isprintable() and char not in "\n\t"] == [], repr(told)
    assert "Traceback" not in told
