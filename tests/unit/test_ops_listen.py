"""What the daemon says when it cannot listen, and that it removes no file but its own socket."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from transomd.api.listen import Server
from transomd.api.ops import MetricsServer
from transomd.errors import TransomError
from transomd.settings import Settings


def server(path: Path, listen: str = "") -> Server:
    settings = Settings.model_validate(
        {"daemon": {"socket": str(path), "listen": listen, "state_dir": str(path.parent)}}
    )
    api: Any = SimpleNamespace(app=web.Application())
    return Server(api, settings)


async def refused(made: Server, port: int = 0) -> TransomError:
    with pytest.raises(TransomError) as caught:
        await made.start(port)
    await made.close()
    return caught.value


async def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    said = await refused(server(path))
    assert str(said) == f"listening on {path} (daemon.socket): what is there is no socket, and is left alone"
    assert said.hint == f"ls -ld {path}"
    assert path.read_text() == "precious"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("nowhere")])
async def test_so_is_a_folder_and_a_link(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "s"
    make(path)
    assert "no socket" in str(await refused(server(path)))
    assert os.path.lexists(path)


async def test_another_daemons_socket_stays_and_is_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = server(path)
    await first.start(0)
    said = await refused(server(path))
    assert "another transomd serves it" in str(said)
    _, writer = await asyncio.open_unix_connection(path)
    writer.close()
    await writer.wait_closed()
    await first.close()
    assert not path.exists()


async def test_a_daemon_that_ends_leaves_the_socket_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first, second = server(path), server(path)
    await first.start(0)
    path.unlink()
    await second.start(0)
    await first.close()
    assert path.is_socket()
    await second.close()


async def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    made = server(path)
    await made.start(0)
    await made.close()
    assert not path.exists()


async def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = await refused(server(tmp_path / "file" / "s"))
    assert "(daemon.socket): File exists" in str(said)
    assert said.hint.startswith("ls -ld")


async def test_a_port_in_use_and_a_foreign_address_are_told_with_their_field(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        said = await refused(server(tmp_path / "s", f"127.0.0.1:{port}"), port)
        assert str(said) == f"listening on 127.0.0.1:{port} (daemon.listen): Address already in use"
        assert said.hint == f"ss -ltnp 'sport = :{port}'"
        metrics = MetricsServer(SimpleNamespace(metrics=refused), ("127.0.0.1", port))  # type: ignore[arg-type]
        with pytest.raises(TransomError, match=r"\(daemon\.metrics\): Address already in use"):
            await metrics.start()
        await metrics.close()
    said = await refused(server(tmp_path / "s", "192.0.2.1:7077"), 7077)
    assert "(daemon.listen): Cannot assign requested address" in str(said)
    assert "ip -br addr" in said.hint
