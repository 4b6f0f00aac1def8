"""The client: what it asks, and one clear error for each way in which no answer comes."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_server import Recorded, error, serving

from transomd.api.client import Client, NoAnswerError, usual_address
from transomd.errors import (
    NotFoundError,
    RefusedError,
    SpecError,
    TransomError,
    UnreachableError,
    UsageError,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        yield recorded


def client(server: Recorded) -> Client:
    return Client(str(server.socket), timeout_s=60)


def test_get_and_post(server: Recorded) -> None:
    server.on("GET /v1/events", (200, {"events": [], "last": 3}))
    server.on("POST /v1/jobs/1/cancel", (200, {"job": {"id": 1}}))
    assert client(server).get("/v1/events", job=1, node=None, after=0) == {"events": [], "last": 3}
    assert client(server).post("/v1/jobs/1/cancel") == {"job": {"id": 1}}
    assert server.requests[0].query == {"job": "1", "after": "0"}
    assert server.requests[1].body == {}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, UsageError),
        (403, RefusedError),
        (404, NotFoundError),
        (500, TransomError),
        (503, UnreachableError),
    ],
)
def test_the_servers_error_is_raised_with_its_hint(server: Recorded, status: int, kind: type[TransomError]) -> None:
    server.on("GET /v1/jobs", (status, error("no luck", "try this")))
    with pytest.raises(TransomError) as caught:
        client(server).get("/v1/jobs")
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == ("no luck", "try this")


def test_faults_are_kept(server: Recorded) -> None:
    server.on("POST /v1/jobs", (400, error("2 faults", "", ["a", "b"])))
    with pytest.raises(SpecError) as caught:
        client(server).post("/v1/jobs", {})
    assert caught.value.faults == ("a", "b")


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff"])
def test_what_is_not_transom_is_said(server: Recorded, body: bytes) -> None:
    server.on("GET /v1/jobs", (200, body))
    with pytest.raises(UnreachableError, match="is not transomd"):
        client(server).get("/v1/jobs")


@pytest.mark.parametrize("body", [{}, {"error": "text"}, {"error": {"message": None, "faults": 3}}])
def test_an_error_without_a_message_still_has_one(server: Recorded, body: object) -> None:
    server.on("GET /v1/jobs", (403, body))
    with pytest.raises(RefusedError, match="HTTP 403"):
        client(server).get("/v1/jobs")


def test_no_socket(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="there is no such socket") as caught:
        Client(str(tmp_path / "none")).get("/v1/jobs")
    assert "systemctl status transomd" in caught.value.hint
    assert not isinstance(caught.value, NoAnswerError)


def test_in_a_sandbox_whoever_is_in_it_starts_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_SANDBOX", str(tmp_path))
    with pytest.raises(UnreachableError) as caught:
        Client(str(tmp_path / "none")).get("/v1/jobs")
    assert caught.value.hint.startswith("transomd > transomd.log 2>&1 &; or name another")


def test_a_socket_that_nobody_serves(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(UnreachableError, match="connection was refused: the daemon does not run"):
        Client(str(path)).get("/v1/jobs")


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="107 bytes"):
        Client(str(tmp_path / ("x" * 120))).get("/v1/jobs")


def test_no_answer_in_time_leaves_open_what_was_done(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.2 s"):
            Client(str(tmp_path / "s"), timeout_s=0.2).get("/v1/jobs")


def test_an_answer_that_breaks_off_leaves_open_what_was_done(server: Recorded) -> None:
    server.on("POST /v1/jobs", (0, None))
    with pytest.raises(NoAnswerError, match="broke off"):
        client(server).post("/v1/jobs", {})


def test_a_url(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError, match="refused"):
        Client(f"http://127.0.0.1:{port}").get("/v1/jobs")
    with pytest.raises(UsageError, match="no address"):
        Client("http://:x").get("/v1/jobs")
    with pytest.raises(UsageError, match="no address"):
        Client("http://[::1").get("/v1/jobs")


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_SOCKET", "/a/b")
    assert Client().address == "/a/b"
    assert Client("/c").address == "/c"
    monkeypatch.delenv("TRANSOM_SOCKET")
    assert Client().address == "/run/transom/transomd.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_a_socket_without_permission() -> None:
    with tempfile.TemporaryDirectory(prefix="transom-") as name, serving(Path(name)) as server:
        Path(name).chmod(0o755)
        server.socket.chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(RefusedError, match="you may not open its socket") as caught:
                client(server).get("/v1/jobs")
        finally:
            os.seteuid(0)
    assert caught.value.hint == f"ls -l {server.socket}; id"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")
def test_a_home_that_one_may_not_look_into_holds_no_daemon_of_ones_own() -> None:
    with tempfile.TemporaryDirectory(prefix="transom-") as home:
        os.seteuid(65534)
        try:
            assert usual_address({"HOME": home}) == "/run/transom/transomd.sock"
        finally:
            os.seteuid(0)
