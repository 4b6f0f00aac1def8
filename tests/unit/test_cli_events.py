"""transom events."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import NOW, Recorded, Request, serving, start, transom


def an_event(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "at": NOW,
        "kind": "drain",
        "message": f"m{number}",
        "job_id": None,
        "node": None,
        "data": {},
    } | changes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        yield recorded


def test_events(server: Recorded) -> None:
    events = [an_event(1, job_id=12, node="n3"), an_event(2, message="evil\x1b[2J\nline")]
    server.on("GET /v1/events", (200, {"events": events, "last": 2}))
    done = transom("events", "--job", "12", "--node", "n3", "-n", "7", socket=server.socket, TZ="UTC")
    assert done.stdout.splitlines() == [
        "2030-03-17 17:46:40 drain [job 12 n3] m1",
        "2030-03-17 17:46:40 drain evil\\x1b[2J line",
    ]
    assert server.requests[0].query == {"job": "12", "node": "n3", "limit": "7"}


def test_an_event_keeps_within_the_columns_that_there_are(server: Recorded) -> None:
    server.on("GET /v1/events", (200, {"events": [an_event(1, job_id=12, message="one two " * 9)], "last": 1}))
    shown = transom("events", socket=server.socket, TZ="UTC", COLUMNS="40").stdout.splitlines()
    assert shown[0] == "2030-03-17 17:46:40 drain [job 12]"
    assert len(shown) > 2
    assert all(line.startswith(("    one", "    two")) and len(line) <= 40 for line in shown[1:])


def test_no_events(server: Recorded) -> None:
    server.on("GET /v1/events", (200, {"events": [], "last": 0}))
    assert transom("events", socket=server.socket).stdout == "no events\n"


def test_json(server: Recorded) -> None:
    answer = {"events": [an_event(1)], "last": 1}
    server.on("GET /v1/events", (200, answer))
    assert json.loads(transom("events", "--json", socket=server.socket).stdout) == answer


def test_following_goes_on_over_a_restart_of_the_daemon_and_ends_by_ctrl_c(server: Recorded) -> None:
    broken = iter([True])

    def answer(request: Request) -> tuple[int, Any]:
        after = request.query.get("after")
        if after is None:
            return 200, {"events": [an_event(1)], "last": 1}
        if next(broken, False):
            return 0, None
        if after == "1":
            return 200, {"events": [an_event(2)], "last": 2}
        time.sleep(0.05)
        return 200, {"events": [], "last": 2}

    server.on("GET /v1/events", answer)
    process = start("events", "-f", "--json", socket=server.socket)
    assert process.stdout is not None
    assert [json.loads(process.stdout.readline())["id"] for _ in range(2)] == [1, 2]
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "broke off its answer; waiting for it" in told
    assert "transomd answers again" in told
    assert server.requests[1].query == {"after": "1", "wait": "20"}
