"""``kill -9`` of the daemon before and after every write and every effect of a story: the end is the same.

Each story is told once to count the points; then again for each point, with the daemon killed there and a new one
started on the same store and the same world a little later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from tol_world import SimWorld

from transomd.words import JobState

# Hundreds of whole lives of a job; a busy machine takes its time over them.
pytestmark = pytest.mark.timeout(900)

Story = Callable[[SimWorld], Awaitable[None]]


@dataclass(frozen=True)
class End:
    """How a story has to end."""

    nodes: tuple[str, ...]
    drained: tuple[str, ...]
    attempts: int = 1
    state: JobState = JobState.COMPLETED


async def in_place(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n2"))


async def new_attempt(world: SimWorld) -> None:
    await world.submit({"spares": 0})
    world.at_step(8, lambda _: world.power_loss("n2"))


async def batch_host(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n1"))


async def unfit_at_the_gate(world: SimWorld) -> None:
    world.unfit["n2"] = ["xid"]
    await world.submit()


async def xid_while_running(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: world.unfit.update(n3=["xid"]))


async def slurmd_dies(world: SimWorld) -> None:
    await world.submit()
    world.at_step(8, lambda _: [world.unheard.add("n2"), world.slurm.fail_node("n2")])


STORIES: dict[str, tuple[Story, End]] = {
    "in place": (in_place, End(nodes=("n1", "n3", "n4"), drained=("n2",))),
    "new attempt": (new_attempt, End(nodes=("n1", "n3", "n4"), drained=("n2",), attempts=2)),
    "batch host": (batch_host, End(nodes=("n2", "n3", "n4"), drained=("n1",))),
    "unfit at the gate": (unfit_at_the_gate, End(nodes=("n1", "n3", "n4"), drained=("n2",))),
    "xid while running": (xid_while_running, End(nodes=("n1", "n2", "n4"), drained=("n3",))),
    "slurmd dies": (slurmd_dies, End(nodes=("n1", "n3", "n4"), drained=("n2",))),
}


async def tell(story: Story, end: End, kill_at: int | None, away_s: float) -> list[str]:
    """Tell a story, check its end, and return the points that were passed."""
    world = SimWorld(kill_at=kill_at)
    world.restart_after = away_s
    world.steps = 30 if away_s < 10 else 90
    world.slurm.slurmd_timeout_s = 12.0
    await world.start_daemon()
    await story(world)
    state = await world.end()
    # A node that was lost before any daemon saw the allocation cannot be blamed.
    seen = any(e.kind == "allocated" or e.message.startswith("epoch 1 runs") for e in world.events())
    if seen:
        await world.until(lambda: len(world.drained()) >= len(end.drained), "drains", 120)
    await world.until(lambda: all(job.ended for job in world.slurm.all_jobs().values()), "Slurm is idle", 60)
    assert state is end.state, world.story()
    world.check()
    assert world.launched[-1][2] == end.nodes, world.story()
    drained = tuple(sorted(world.drained()))
    assert drained == end.drained or (not seen and drained == ()), world.story()
    assert len(world.slurm.accepted) == len(world.store.attempts(1)) == end.attempts, world.story()
    recorded = [x.epoch for x in world.store.launches(1)]
    made = [epoch for _, epoch, _ in world.launched]
    # A launch that was made and lost with its launcher while no daemon lived is known to nobody.
    assert recorded == made or (away_s > 10 and set(recorded) <= set(made)), world.story()
    assert all(i.closed_at is not None for i in world.incidents()), world.story()
    assert (world.kills == 0) == (kill_at is None)
    await world.close()
    return world.points.passed


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("name", list(STORIES))
async def test_killed_anywhere_the_end_is_the_same(name: str, first: int) -> None:
    """Every point, in three shares, so that several workers can take them."""
    await tell_all(name, away_s=1.0, first=first, stride=3)


@pytest.mark.parametrize("name", list(STORIES))
async def test_killed_and_away_for_long_the_end_is_the_same(name: str) -> None:
    """Long enough for launchers to act on their grants; each story starts its stride at another point."""
    await tell_all(name, away_s=30.0, first=len(name) % 6, stride=6)


async def tell_all(name: str, *, away_s: float, first: int, stride: int) -> None:
    """Tell a story once for each point at which the daemon is killed."""
    story, end = STORIES[name]
    points = await tell(story, end, None, away_s)
    assert {"submit", "drain", "commit", "finish_intent"} <= {point.split()[1] for point in points}
    for kill_at in range(first, len(points), stride):
        point = points[kill_at]
        try:
            await tell(story, end, kill_at, away_s)
        except AssertionError as error:
            raise AssertionError(f"killed at point {kill_at} ({point}) for {away_s} s: {error}") from error
