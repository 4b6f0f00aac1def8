"""Agents and launchers know each other by the token, which nobody who listens in ever sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from transomd.launch.handshake import greet, receive
from transomd.launch.hub import AgentGone, Hub
from transomd.proof import NotOfThisJob

TOKEN = "a-token-of-this-job-0123456789abcdef"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


async def talk(launcher: Serve, agent: Serve) -> tuple[Any, Any]:
    """Let both sides talk over a real connection; their results or exceptions."""
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            ended.set_result(await launcher(reader, writer))
        except Exception as error:
            ended.set_result(error)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            result: Any = await agent(reader, writer)
        except Exception as error:
            result = error
        writer.close()
        return await asyncio.wait_for(ended, 60), result


async def test_both_sides_know_each_other() -> None:
    seen = bytearray()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write = writer.write

        def listen(data: bytes) -> None:
            seen.extend(data)
            write(data)

        writer.write = listen  # type: ignore[method-assign, assignment]
        await greet(reader, writer, TOKEN, "n2", 7)

    node, said = await talk(lambda r, w: receive(r, w, TOKEN), agent)
    assert (node, said) == ("n2", None)
    assert TOKEN.encode() not in seen
    assert len(seen) > 100


async def test_neither_takes_one_of_another_job() -> None:
    node, _ = await talk(lambda r, w: receive(r, w, TOKEN), lambda r, w: greet(r, w, "of another job", "n2", 7))
    assert isinstance(node, (NotOfThisJob, ConnectionError))
    _, said = await talk(lambda r, w: receive(r, w, "of another job"), lambda r, w: greet(r, w, TOKEN, "n2", 7))
    assert isinstance(said, NotOfThisJob), "a false launcher learns no proof of the agent's"


async def test_what_was_heard_once_is_of_no_use_again() -> None:
    heard: list[bytes] = []

    async def overheard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write = writer.write

        def listen(data: bytes) -> None:
            heard.append(data)
            write(data)

        writer.write = listen  # type: ignore[method-assign, assignment]
        await greet(reader, writer, TOKEN, "n2", 7)

    await talk(lambda r, w: receive(r, w, TOKEN), overheard)

    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for line in heard:
            writer.write(line)
        await writer.drain()
        await reader.readline()

    node, _ = await talk(lambda r, w: receive(r, w, TOKEN), replay)
    assert isinstance(node, NotOfThisJob)


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n", b"null\n", b"\n", b"{}\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n",
        json.dumps({"t": "hello", "node": 7, "nonce": "a"}).encode() + b"\n",
        json.dumps({"t": "hello", "node": "n" * 300, "nonce": "a"}).encode() + b"\n",
        json.dumps({"t": "hello", "node": "n1", "token": TOKEN}).encode() + b"\n",
        b'{"t": "hello", "node": "n1", "nonce": "a"}\n{"proof": "\xc3\xa9"}\n',
    ],
)  # fmt: skip
async def test_strangers_do_not_trouble_the_launcher(line: bytes) -> None:
    hub = Hub(TOKEN, lambda: 0.0)
    port = await hub.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert hub.alive(10) == []
        with pytest.raises(AgentGone):
            await hub.ask("n1", "ranks", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await greet(reader, writer, TOKEN, "n1", 1)
        while hub.alive(10) != ["n1"]:
            await asyncio.sleep(0.01)
        writer.close()
    finally:
        await hub.close()
