"""Who asks: the kernel's word on the socket, munge's over TCP; and how much one may ask."""

from __future__ import annotations

import asyncio
import http.client
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transom_slurm.runner import CommandNotStarted, CommandTimeout, Completed
from transom_slurm.types import UserIdentity

from transomd.api import munge
from transomd.api.access import MAX_WAITING, Access
from transomd.api.limits import MAX_KEYS, Buckets
from transomd.errors import RefusedError, TransomError
from transomd.modes import settle
from transomd.settings import Settings

CREDENTIAL = "MUNGE:" + "A" * 64 + ":"


class Unmunge:
    """Stands in for the command; what it was asked is kept."""

    def __init__(self, uid: int = 1, payload: str = "", status: str = "Success (0)", rc: int = 0) -> None:
        self.told = f"STATUS:          {status}\nUID:             somebody ({uid})\n\n{payload}"
        self.rc = rc
        self.error: Exception | None = None
        self.asked: list[str | None] = []

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str],
        timeout: float,
        cwd: str | None = None,
        user: UserIdentity | None = None,
    ) -> Completed:
        self.asked.append(stdin)
        if self.error is not None:
            raise self.error
        return Completed(tuple(argv), self.rc, self.told, "", 0.0)


@asynccontextmanager
async def serving(access: Access, where: tuple[str, int] | str) -> AsyncIterator[int]:
    """An application that answers the uid that it was told."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            async with access.entered(request) as uid:
                return web.json_response({"uid": uid, "body": (await request.read()).decode()})
        except TransomError as error:
            return web.Response(status=403 if isinstance(error, RefusedError) else 503, text=error.message)

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.UnixSite(runner, where) if isinstance(where, str) else web.TCPSite(runner, *where)
        await site.start()
        yield 0 if isinstance(where, str) else runner.addresses[0][1]
    finally:
        await runner.cleanup()


def run_as(argv: list[str], user: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, cwd="/", check=False, **user)


def send(port: int, method: str, path: str, body: bytes = b"", credential: str | None = CREDENTIAL) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {} if credential is None else {"Authorization": f"Munge {credential}"}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    told = answer.status, answer.read().decode()
    connection.close()
    return told


def site(**daemon: Any) -> Settings:
    return settle(Settings.model_validate({"daemon": daemon}), 0)


async def test_the_kernel_says_who_is_at_the_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="transom-") as folder:
        Path(folder).chmod(0o755)
        path = f"{folder}/s"
        script = (
            "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "s.sendall(b'GET /v1 HTTP/1.0\\r\\nAuthorization: Munge x\\r\\n\\r\\n'); print(s.recv(4096).decode())"
        )
        async with serving(Access(site()), path):
            os.chmod(path, 0o666)
            users = [os.geteuid()] + ([pwd.getpwnam("games").pw_uid] if os.geteuid() == 0 else [])
            for uid in users:
                other: dict[str, Any] = {"user": uid} if uid != os.geteuid() else {}
                # Not the environment's Python, which may lie where only root comes.
                argv = [str(Path(sys.executable).resolve()), "-c", script, path]
                done = await asyncio.to_thread(run_as, argv, other)
                assert f'"uid": {uid}' in done.stdout, done


async def test_a_credential_is_for_one_request() -> None:
    request = ("POST", "/v1/jobs/7/cancel?now=1", b'{"a": 1}')
    unmunge = Unmunge(1234, munge.digest(*request))
    async with serving(Access(site(), runner=unmunge), ("127.0.0.1", 0)) as port:
        status, text = await asyncio.to_thread(send, port, *request)
        assert (status, '"uid": 1234' in text) == (200, True)
        assert unmunge.asked == [CREDENTIAL]
        for other in (
            ("GET", request[1], request[2]),
            (request[0], "/v1/jobs/8/cancel?now=1", request[2]),
            (request[0], "/v1/jobs/7/cancel", request[2]),
            (request[0], request[1], b'{"a": 2}'),
            (request[0], request[1], b""),
        ):
            assert (await asyncio.to_thread(send, port, *other))[0] == 403, other


async def test_what_is_no_credential_never_reaches_munge() -> None:
    unmunge = Unmunge()
    async with serving(Access(site(), runner=unmunge), ("127.0.0.1", 0)) as port:
        for bad in (
            None,
            "",
            "x",
            "MUNGE:AAAA:",
            "MUNGE:" + "A" * 5000 + ":",
            CREDENTIAL + "x",
            "MUNGE:" + "é" * 20 + ":",
        ):
            sent = bad.encode("utf-8").decode("latin-1") if bad else bad
            assert (await asyncio.to_thread(send, port, "GET", "/v1/daemon", b"", sent))[0] == 403
    assert unmunge.asked == []


@pytest.mark.parametrize(
    ("unmunge", "status", "told"),
    [
        (Unmunge(status="Replayed credential (17)", rc=17), 403, "Replayed credential"),
        (Unmunge(status="Expired credential (15)", rc=15), 403, "Expired credential"),
        (Unmunge(status="Success (0)", rc=1), 403, "not accepted"),
    ],
)
async def test_munges_refusal_is_told(unmunge: Unmunge, status: int, told: str) -> None:
    unmunge.told = unmunge.told.rstrip() + "\n\n" + munge.digest("GET", "/x", b"")
    async with serving(Access(site(), runner=unmunge), ("127.0.0.1", 0)) as port:
        got, text = await asyncio.to_thread(send, port, "GET", "/x")
        assert (got, told in text) == (status, True)


async def test_a_munge_that_does_not_answer_is_no_refusal() -> None:
    unmunge = Unmunge()
    async with serving(Access(site(), runner=unmunge), ("127.0.0.1", 0)) as port:
        unmunge.error = CommandTimeout(munge.UNMUNGE, "no end within 5 s")
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 503
        unmunge.error = CommandNotStarted(munge.UNMUNGE, "no such file")
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 403


async def test_administrators_are_known_by_uid() -> None:
    access = Access(site(admins=["games", "there-is-no-such-user"]))
    games = pwd.getpwnam("games").pw_uid
    assert access.admin(0)
    assert access.admin(games)
    assert not access.admin(12345)
    access.use(site(admins=["root"]))
    assert not access.admin(games)


async def test_a_personal_daemon_serves_its_owner_and_root() -> None:
    settings = settle(Settings.model_validate({"daemon": {"mode": "personal"}}), os.geteuid())
    unmunge = Unmunge(4242, munge.digest("GET", "/x", b""))
    async with serving(Access(settings, runner=unmunge), ("127.0.0.1", 0)) as port:
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 403
        unmunge.told = unmunge.told.replace("(4242)", f"({os.geteuid()})")
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 200


async def test_one_user_cannot_keep_the_daemon_busy() -> None:
    now = [0.0]
    access = Access(site(), runner=Unmunge(77, munge.digest("GET", "/x", b"")), clock=lambda: now[0])
    async with serving(access, ("127.0.0.1", 0)) as port:
        for _ in range(MAX_WAITING):
            access._answering[77] += 1
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 503
        access._answering.clear()
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 200
        while access._buckets.take(77):
            pass
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 503
        now[0] += 10
        assert (await asyncio.to_thread(send, port, "GET", "/x"))[0] == 200
        assert 77 not in access._answering


def test_a_bucket_fills_again_and_strangers_are_forgotten() -> None:
    now = [0.0]
    buckets = Buckets(2.0, 3.0, lambda: now[0])
    assert [buckets.take("a") for _ in range(5)] == [True, True, True, False, False]
    assert buckets.take("b")
    now[0] += 1.0
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    for key in range(MAX_KEYS * 2):
        buckets.take(key)
    assert len(buckets._left) == MAX_KEYS


def test_without_munge_the_client_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="no munge command") as caught:
        munge.credential("GET", "/v1/daemon", b"")
    assert caught.value.hint


def test_a_digest_tells_every_part_apart() -> None:
    parts = [("GET", "/a", b""), ("POST", "/a", b""), ("GET", "/a?", b""), ("GET", "/a", b"x"), ("GET", "/a\n", b"")]
    assert len({munge.digest(*part) for part in parts}) == len(parts)
