"""How an agent and its launcher prove to each other that they are of one job, without ever sending its token.

Anybody on the network can call a launcher, and can listen at the port of a launcher that is gone. So each side answers
a number that the other has just made up. Standard library only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from hashlib import sha256
from typing import Any

TIMEOUT_S = 10.0


class NotOfThisJob(ValueError):
    """The other side does not hold this job's token, or speaks something else."""


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, node: str, pid: int) -> None:
    """The agent's side. Raises NotOfThisJob, and what a connection that breaks raises."""
    mine = secrets.token_hex(16)
    _send(writer, {"t": "hello", "node": node, "pid": pid, "nonce": mine})
    answer = await _receive(reader)
    theirs = _text(answer, "nonce")
    _check(answer, _proof(token, "launcher", mine, theirs, node))
    _send(writer, {"t": "proof", "proof": _proof(token, "agent", mine, theirs, node)})
    await writer.drain()


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> str:
    """The launcher's side: the name of the node whose agent called. Raises as :func:`greet` does."""
    hello = await _receive(reader)
    node, theirs, mine = _text(hello, "node"), _text(hello, "nonce"), secrets.token_hex(16)
    _send(writer, {"t": "prove", "nonce": mine, "proof": _proof(token, "launcher", theirs, mine, node)})
    await writer.drain()
    _check(await _receive(reader), _proof(token, "agent", theirs, mine, node))
    return node


def _proof(token: str, who: str, agents: str, launchers: str, node: str) -> str:
    told = json.dumps(["transom-agent-1", who, agents, launchers, node])
    return hmac.new(token.encode(), told.encode(), sha256).hexdigest()


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


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not 0 < len(value) < 256:
        raise NotOfThisJob(f"no {key}")
    return value


def _check(message: dict[str, Any], expected: str) -> None:
    if not hmac.compare_digest(_text(message, "proof").encode("utf-8", "replace"), expected.encode()):
        raise NotOfThisJob("it does not hold this job's token")
