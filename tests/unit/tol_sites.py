"""Sites in virtual time whose daemon runs, for as long as a test needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tol_world import SimWorld

from transomd.tol.manual import Hands
from transomd.words import JobState


@asynccontextmanager
async def started(nodes: int = 5, **more: Any) -> AsyncIterator[SimWorld]:
    """A site; what must hold however a story goes is looked at in the end. ``more`` is for :class:`SimWorld`."""
    made = SimWorld(nodes, **more)
    await made.start_daemon()
    try:
        yield made
        made.check()
    finally:
        await made.close()


@asynccontextmanager
async def training(nodes: int = 5, **more: Any) -> AsyncIterator[SimWorld]:
    """A site with a job that trains, and would lose its allocation with its second node."""
    async with started(nodes, **more) as made:
        await made.submit({"spares": 0})
        await made.until(lambda: made.state() is JobState.RUNNING, "it runs")
        yield made


def hands(world: SimWorld) -> Hands:
    """Whoever types ``transom drain`` and ``transom undrain`` there."""
    assert world.operator is not None
    return Hands(world.operator, world.settings, world.slurm.clock, "http://x")
