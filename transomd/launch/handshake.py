"""How an agent and its launcher prove to each other that they are of one job, without ever sending its token.

Anybody on the network can call a launcher, and can listen at the port of a launcher that is gone. So each side answers
a number that the other has just made up. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

from transomd.proof import NotOfThisJob, check, proof, text

TIMEOUT_S = 10.0


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, node: str, pid: int) -> None:
    """The agent's side. Raises NotOfThisJob, and what a connection that breaks raises."""
    mine = secrets.token_hex(16)
    _send(writer, {"t": "hello", "node": node, "pid": pid, "nonce": mine})
    answer = await _receive(reader)
    theirs = text(answer, "nonce")
    check(answer, _proof(token, "launcher", mine, theirs, node))
    _send(writer, {"t": "proof", "proof": _proof(token, "agent", mine, theirs, node)})
    await writer.drain()


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> str:
    """The launcher's side: the name of the node whose agent called. Raises as :func:`greet` does."""
    hello = await _receive(reader)
    node, theirs, mine = text(hello, "node"), text(hello, "nonce"), secrets.token_hex(16)
    _send(writer, {"t": "prove", "nonce": mine, "proof": _proof(token, "launcher", theirs, mine, node)})
    await writer.drain()
    check(await _receive(reader), _proof(token, "agent", theirs, mine, node))
    return node


def _proof(token: str, who: str, agents: str, launchers: str, node: str) -> str:
    return proof(token, "transom-agent-1", who, agents, launchers, node)


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise NotOfThisJob("no message") from None
    if not isinstance(message, dict):
        raise NotOfThisJob("no message")
    return message
