"""Make sure that nothing of a job's older launches runs on a node any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

from transomd.health.remote import PYTHON, run_script
from transomd.health.scripts import END_JOB
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import FailureKind, SshFailure

JOB_VARIABLE = "TRANSOM_JOB_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReport:
    """What fencing one node did. Only ``clean`` says that nothing of it runs there."""

    node: str
    reached: bool
    killed: tuple[int, ...] = ()
    remaining: tuple[int, ...] = ()
    """Processes that SIGKILL did not end, most often waiting in the kernel (state D)."""
    failure: FailureKind | None = None
    error: str = ""

    @property
    def clean(self) -> bool:
        """The node was reached and nothing is left."""
        return self.reached and not self.remaining


async def fence(
    pool: SshPool, node: str, job: str, epoch: int | None, *, timeout: float = 10.0, python: str = PYTHON
) -> FenceReport:
    """End the program processes of ``job`` with an epoch of ``epoch`` or less on one node; never raises SshFailure.

    Launcher and agent (no ``TRANSOM_EPOCH``) live on, and so does every other job. With ``epoch`` None everything that
    bears the job's mark ends.
    """
    return await end_marked(pool, node, JOB_VARIABLE, job, epoch, timeout=timeout, python=python)


async def end_marked(
    pool: SshPool, node: str, name: str, value: str, epoch: int | None, *, timeout: float = 10.0, python: str = PYTHON
) -> FenceReport:
    """End every process whose environment holds exactly ``name=value``, as :func:`fence` does."""
    if not value:
        raise ValueError("an empty mark would match what bears no mark")
    request = json.dumps({"name": name, "value": value, "epoch": epoch, "deadline": max(0.5, timeout - 2.0)})
    try:
        answer, _ = await run_script(pool, node, END_JOB, request, timeout=timeout, python=python)
    except SshFailure as exc:
        return FenceReport(node=node, reached=False, failure=exc.kind, error=str(exc))
    remaining = tuple(int(one["pid"]) for one in answer["remaining"])
    states = ", ".join(f"{one['pid']} ({one['state']})" for one in answer["remaining"])
    error = f"still there after SIGKILL: {states}" if remaining else ""
    return FenceReport(node=node, reached=True, killed=tuple(answer["killed"]), remaining=remaining, error=error)


async def fence_all(
    pool: SshPool, nodes: Iterable[str], job: str, epoch: int | None, *, timeout: float = 10.0, python: str = PYTHON
) -> dict[str, FenceReport]:
    """:func:`fence` on many nodes at once."""
    wanted = list(dict.fromkeys(nodes))
    fencing = (fence(pool, node, job, epoch, timeout=timeout, python=python) for node in wanted)
    return dict(zip(wanted, await asyncio.gather(*fencing), strict=True))
