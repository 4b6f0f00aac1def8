"""The launcher's end of the lines to its agents: who is alive, and requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from transomd.launch.agent import LINE_LIMIT
from transomd.launch.handshake import receive
from transomd.tee.case import by_address

MAX_STRANGERS = 1024
"""Connections that may be open without having proved that they are an agent's."""


@dataclass
class _Line:
    writer: asyncio.StreamWriter
    heard_at: float
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


class AgentGone(Exception):
    """The agent did not answer: its node, its process or the network is gone. Says nothing about which."""


class Hub:
    """Accepts agents and keeps the time of their last word (``clock`` gives seconds, monotonic)."""

    def __init__(self, token: str, clock: Callable[[], float]) -> None:
        self._token = token
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._heard: dict[str, float] = {}
        self._address_of: dict[str, str] = {}
        self._checkpoints: dict[str, list[dict[str, Any]]] = {}
        self._copies: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0

    async def start(self) -> int:
        """Listen on a free port of every address, and return it."""
        self._server = await asyncio.start_server(self._accept, host="0.0.0.0", port=0, limit=LINE_LIMIT)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Hang up on everybody."""
        if self._server is not None:
            self._server.close()
        for line in self._lines.values():
            line.writer.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def alive(self, within_s: float) -> list[str]:
        """Return the nodes whose agent was heard within that time."""
        now = self._clock()
        return sorted(node for node, at in self._heard.items() if now - at <= within_s)

    def connected(self, node: str) -> bool:
        """Whether the line to the node's agent stands, as far as the kernel knows."""
        return node in self._lines

    def silent_for(self, node: str) -> float | None:
        """Return the seconds since the node's agent was last heard; None if it never was."""
        heard = self._heard.get(node)
        return None if heard is None else self._clock() - heard

    def addresses(self) -> dict[str, str]:
        """Return the node of each address from which an agent called, where it is that node's alone."""
        return by_address(self._address_of)

    def checkpoints(self, nodes: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Return what the keepers of these nodes said last of each rank's checkpoints."""
        return {node: self._checkpoints.get(node, []) for node in nodes}

    def copies(self, nodes: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return what the keepers of these nodes said last of the copies that they make and hold; those that did."""
        return {node: self._copies[node] for node in nodes if self._copies.get(node)}

    async def ask(self, node: str, what: str, timeout_s: float, **arguments: Any) -> Any:
        """Send one request and return its answer. Raises AgentGone, or ValueError with the agent's own error."""
        line = self._lines.get(node)
        if line is None:
            raise AgentGone(f"no agent on {node}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        line.waiting[number] = future
        try:
            line.writer.write(json.dumps({"t": "do", "id": number, "what": what, **arguments}).encode() + b"\n")
            return await asyncio.wait_for(future, timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise AgentGone(f"the agent on {node} did not answer {what!r} within {timeout_s:.0f} s") from error
        finally:
            line.waiting.pop(number, None)

    async def ask_all(
        self, nodes: Iterable[str], what: str, timeout_s: float, **arguments: Any
    ) -> dict[str, Any | Exception]:
        """Ask several nodes at once; the value is the answer, or the exception."""
        names = list(nodes)
        answers = await asyncio.gather(
            *(self.ask(node, what, timeout_s, **arguments) for node in names), return_exceptions=True
        )
        return dict(zip(names, answers, strict=True))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # A TimeoutError of asyncio's is no OSError before Python 3.11.
            broken = (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError)
            with contextlib.suppress(*broken):
                if self._strangers < MAX_STRANGERS:
                    await self._listen(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._strangers += 1
        try:
            node = await receive(reader, writer, self._token)
        finally:
            self._strangers -= 1
        line = self._lines[node] = _Line(writer, self._clock())
        self._heard[node] = self._clock()
        self._address_of[node] = str(sock.getpeername()[0])
        try:
            while raw := await reader.readline():
                self._heard[node] = self._clock()
                self._take(node, line, json.loads(raw))
        finally:
            self._hang_up(node, line)

    def _take(self, node: str, line: _Line, message: dict[str, Any]) -> None:
        if message.get("t") == "beat":
            self._checkpoints[node] = list(message.get("checkpoints") or ())
            self._copies[node] = dict(message.get("copies") or {})
            return
        future = line.waiting.get(message.get("id") or 0)
        if message.get("t") != "reply" or future is None or future.done():
            return
        if message.get("error"):
            future.set_exception(ValueError(message["error"]))
        else:
            future.set_result(message.get("data"))

    def _hang_up(self, node: str, line: _Line) -> None:
        for future in line.waiting.values():
            if not future.done():
                future.set_exception(AgentGone(f"the agent on {node} hung up"))
        if self._lines.get(node) is line:
            del self._lines[node]
            self._checkpoints.pop(node, None)
            self._copies.pop(node, None)
