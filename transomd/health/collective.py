"""The collective check: one torch.distributed all-reduce over all nodes of a job, run as its user over SSH."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transomd.health.fence import end_marked
from transomd.health.remote import PYTHON
from transomd.health.scripts import ALL_REDUCE, source
from transomd.health.session import SshResult
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import SshFailure
from transomd.health.types import CollectiveReport
from transomd.words import Outcome

MARK = "TRANSOM_COLLECTIVE"
_PATIENCE = 3.0
"""Seconds the other ranks get to say what they saw, once one has failed."""
_TAIL = 2000
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOptions:
    """How to run the all-reduce. ``python`` is the interpreter of the user's environment, with torch in it."""

    python: str
    user: str | None = None
    """Whom to run as; None: as the login user, for a transomd without root."""
    timeout: float = 60.0
    """For everything after the connections are made, the import of torch included."""
    megabytes: int = 16
    iterations: int = 5
    address: str | None = None
    """Where the others find the first node; its name unless given."""
    env: Mapping[str, str] = field(default_factory=dict)
    node_python: str = PYTHON


class _Failed(Exception):
    """The check did not come to its end; the text is for people."""


async def all_reduce(
    pool: SshPool, nodes: Sequence[str], options: CollectiveOptions, *, clock: Callable[[], float] = time.time
) -> CollectiveReport:
    """Run one rank on every node; never raises SshFailure, and leaves no process on any node that can be reached.

    FIT with the bus bandwidth when every rank had the right sum; else UNKNOWN with the error, which blames nobody.
    """
    began, at = time.monotonic(), clock()
    mark = secrets.token_hex(8)
    results: dict[str, SshResult | str] = {}
    answer: Mapping[str, Any] = {}
    error = ""
    try:
        await _run(pool, list(nodes), options, mark, results)
        answer = _agreed(nodes, results)
    except (_Failed, SshFailure) as exc:
        error = str(exc)
    finally:
        if not answer:
            await _sweep(pool, nodes, mark, options)
    return CollectiveReport(
        outcome=Outcome.UNKNOWN if error else Outcome.FIT,
        nodes=tuple(nodes),
        at=at,
        seconds=time.monotonic() - began,
        backend=str(answer.get("backend", "")),
        bus_gbps=answer.get("bus_gbps"),
        error=error,
        output=_output(results) if error else "",
    )


async def _run(
    pool: SshPool, nodes: list[str], options: CollectiveOptions, mark: str, results: dict[str, SshResult | str]
) -> None:
    """Start every rank at once and gather how each ended; once one has failed, the others have little time left."""
    end = time.monotonic() + options.timeout
    port = await _free_port(pool, nodes[0], options)
    left = max(1.0, end - time.monotonic())
    ranks = {
        asyncio.create_task(_rank(pool, nodes, rank, options, mark, port, left)): node
        for rank, node in enumerate(nodes)
    }
    waiting = set(ranks)
    try:
        while waiting:
            patience = _PATIENCE if any(_error(result) for result in results.values()) else None
            done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            results.update({ranks[task]: task.result() for task in done})
            if not done:
                break
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _free_port(pool: SshPool, node: str, options: CollectiveOptions) -> int:
    """A port that nobody uses on the first node at this moment."""
    argv = [options.node_python, "-I", "-S", "-c", _FREE_PORT]
    result = await pool.run(node, argv, timeout=options.timeout, user=options.user)
    try:
        return int(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        text = result.stderr.strip()[-300:] or result.stdout.strip()[-300:]
        raise _Failed(f"{node}: no free port: exit {result.rc}: {text}") from None


async def _rank(
    pool: SshPool, nodes: list[str], rank: int, options: CollectiveOptions, mark: str, port: int, timeout: float
) -> SshResult | str:
    """Run one rank; a failure to run it is returned as its text."""
    node = nodes[rank]
    address = options.address or nodes[0]
    peer = address if rank or len(nodes) == 1 else nodes[1]
    request = {
        "rank": rank,
        "world": len(nodes),
        "address": address,
        "port": port,
        "peer": peer,
        "megabytes": options.megabytes,
        "iterations": options.iterations,
        "timeout": timeout,
    }
    env = {**options.env, MARK: mark}
    argv = ["env", *(f"{name}={value}" for name, value in env.items()), options.python, "-", json.dumps(request)]
    try:
        return await pool.run(node, argv, stdin=source(ALL_REDUCE), timeout=timeout, user=options.user, together=True)
    except SshFailure as exc:
        return str(exc)


def _answer(result: SshResult) -> Mapping[str, Any]:
    """The JSON object that a rank printed last; empty if it printed none."""
    try:
        answer = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _error(result: SshResult | str) -> str:
    """Why a rank failed; empty if it did not."""
    if isinstance(result, str):
        return result
    answer = _answer(result)
    if answer.get("error"):
        return f"{result.node}: {answer['error']}"
    if result.rc or "seconds" not in answer:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1][:300]
        return f"{result.node}: exit {result.rc}: {last}"
    return ""


def _agreed(nodes: Sequence[str], results: Mapping[str, SshResult | str]) -> Mapping[str, Any]:
    """What the first rank measured, if every rank succeeded; raises _Failed with the first error that came."""
    errors = [text for text in map(_error, results.values()) if text]
    silent = [node for node in nodes if node not in results]
    if errors or silent:
        text = errors[0] if errors else "no rank ended"
        raise _Failed(text + (f"; no answer from {', '.join(silent)}" if silent else ""))
    first = results[nodes[0]]
    assert isinstance(first, SshResult)
    return _answer(first)


async def _sweep(pool: SshPool, nodes: Sequence[str], mark: str, options: CollectiveOptions) -> None:
    """End whatever still bears this run's mark."""
    ends = (end_marked(pool, node, MARK, mark, None, python=options.node_python) for node in nodes)
    await asyncio.gather(*ends)


def _output(results: Mapping[str, SshResult | str]) -> str:
    """The end of what every rank printed, for people."""
    parts = []
    for node, result in results.items():
        text = result if isinstance(result, str) else (result.stderr + result.stdout).strip()
        parts.append(f"[{node}] {text[-_TAIL:]}")
    return "\n".join(parts)
