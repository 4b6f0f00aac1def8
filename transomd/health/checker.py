"""Probe nodes and judge what they say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from transomd.health.judge import judge, unreached
from transomd.health.profile import Profile
from transomd.health.remote import PYTHON, run_script
from transomd.health.scripts import PROBE
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import SshFailure
from transomd.health.types import NodeReport

_MARGIN = 4.0
"""Seconds a node gets beyond the probe's own deadline: to start Python, and to be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What a probe of nodes is about; see :func:`transomd.health.judge.judge`."""

    allocated_gpus: int | None = None
    slurm_job: int | None = None
    cleared_at: Mapping[str, float] = field(default_factory=dict)
    """Per node: kernel messages up to this moment were dealt with by a person."""
    deadline: float = 8.0
    python: str = PYTHON


async def probe_node(
    pool: SshPool,
    node: str,
    profile: Profile,
    options: ProbeOptions | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> NodeReport:
    """Probe one node. A node that cannot be reached, or whose probe fails, is *unknown* with ``reached`` False."""
    options = options or ProbeOptions()
    request = profile.request(options.deadline)
    limit = options.deadline + _MARGIN
    try:
        answer, result = await run_script(pool, node, PROBE, request, timeout=limit, python=options.python)
    except SshFailure as exc:
        return unreached(node, str(exc), now=clock())
    facts = {**answer, "head": {"sent": result.sent, "received": result.ended}}
    return judge(
        node,
        facts,
        profile,
        now=clock(),
        allocated_gpus=options.allocated_gpus,
        slurm_job=options.slurm_job,
        cleared_at=options.cleared_at.get(node, 0.0),
    )


async def probe_each(
    pool: SshPool,
    nodes: Iterable[str],
    profile: Profile,
    options: ProbeOptions | None = None,
    *,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[NodeReport]:
    """Probe nodes at once, as many as the pool lets; yield each report as it comes.

    Probes still under way are ended when the iteration is closed.
    """
    wanted = dict.fromkeys(nodes)
    tasks = [asyncio.create_task(probe_node(pool, node, profile, options, clock=clock)) for node in wanted]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def probe(
    pool: SshPool,
    nodes: Iterable[str],
    profile: Profile,
    options: ProbeOptions | None = None,
    *,
    on_report: Callable[[NodeReport], None] | None = None,
    clock: Callable[[], float] = time.time,
) -> dict[str, NodeReport]:
    """Probe nodes and return every report by node; ``on_report`` is told of each as it comes."""
    reports = {}
    async for report in probe_each(pool, nodes, profile, options, clock=clock):
        reports[report.node] = report
        if on_report is not None:
            on_report(report)
    return reports
