"""The big red switch and tripped budgets, over the whole of a site in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from tol_world import SimWorld, quick_settings
from transom_sql.records import Switch

from transomd.tol.switches import PAUSE
from transomd.words import JobState


@pytest.fixture
async def site() -> AsyncIterator[Callable[..., SimWorld]]:
    made: list[SimWorld] = []

    def make(**sections: dict[str, object]) -> SimWorld:
        made.append(SimWorld(8, settings=quick_settings(**sections)))
        return made[-1]

    yield make
    for world in made:
        world.check()
        await world.close()


def acts(world: SimWorld) -> int:
    """How often anything was done to the cluster."""
    return sum(len(world.calls(verb)) for verb in ("submit", "cancel", "drain", "resume"))


def withheld(world: SimWorld, job: int = 1) -> str:
    assert world.operator is not None
    return world.operator.withheld(job)


async def pause(world: SimWorld) -> None:
    assert world.operator is not None
    await world.operator.pause("ann", "the switch is being replaced")


async def resume(world: SimWorld) -> list[Switch]:
    assert world.operator is not None
    return await world.operator.resume_actions("bob")


async def test_nothing_is_done_about_a_lost_node_until_acts_are_resumed(site: Callable[..., SimWorld]) -> None:
    world = site()
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await pause(world)
    before = acts(world)
    world.power_loss("n2")
    await world.until(lambda: bool(withheld(world)), "something is withheld", 120)
    await world.run(300)
    assert acts(world) == before
    assert len(world.launched) == 1
    assert world.state() is JobState.RECOVERING
    assert withheld(world) == "start epoch 2 on n[1,3-4]"
    assert world.incidents()[-1].diagnosed_at is not None, "looking and diagnosing go on"
    refused = [event.message for event in world.events("drain-refused")]
    assert refused == ["n2 is not drained: transom is paused by ann: the switch is being replaced"]
    assert [switch.name for switch in await resume(world)] == [PAUSE]
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.launched[-1][2] == ("n1", "n3", "n4")


async def test_the_pause_outlives_the_daemon(site: Callable[..., SimWorld]) -> None:
    world = site()
    await world.start_daemon()
    await pause(world)
    await world.stop_daemon()
    await world.start_daemon()
    await world.submit()
    await world.run(60)
    assert world.calls("submit") == []
    assert withheld(world) == "submit attempt 1"
    await resume(world)
    assert withheld(world) == "submit attempt 1", "the next cycle decides anew"
    assert await world.end() is JobState.COMPLETED
    assert [event.kind for event in world.events() if event.kind in ("paused", "resumed")] == ["paused", "resumed"]


async def test_what_was_recorded_and_not_begun_waits_too(site: Callable[..., SimWorld]) -> None:
    world = site()
    await world.start_daemon()
    number = await world.submit()
    assert [intent.kind for intent in world.store.intents(states=["pending"])] == ["submit"]
    await pause(world)
    await world.run(60)
    assert world.calls("submit") == []
    await resume(world)
    assert await world.end(number) is JobState.COMPLETED


async def test_a_job_that_waits_can_be_cancelled_and_is_never_submitted(site: Callable[..., SimWorld]) -> None:
    world = site()
    await world.start_daemon()
    await pause(world)
    number = await world.submit()
    await world.run(5)
    assert world.operator is not None
    await world.operator.cancel(number, "carl")
    await world.run(5)
    assert world.state(number) is JobState.CANCELLED
    await resume(world)
    await world.run(30)
    assert world.calls("submit") == []


async def test_a_running_job_can_be_cancelled_by_its_user(site: Callable[..., SimWorld]) -> None:
    world = site()
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await pause(world)
    assert world.operator is not None
    await world.operator.cancel(1, "carl")
    assert await world.end() is JobState.CANCELLED
    assert len(world.calls("cancel")) == 1


async def test_a_failed_launch_is_not_restarted_even_without_a_daemon(
    site: Callable[..., SimWorld],
) -> None:
    world = site()
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await pause(world)
    await world.run(10)  # so that the launcher has heard that its grant is gone
    await world.stop_daemon()
    world.power_loss("n3")
    await world.run(60)
    assert len(world.launched) == 1, "a grant lets a launcher restart by itself, and the pause takes it back"
    await world.start_daemon()
    await world.until(lambda: bool(withheld(world)), "something is withheld", 120)
    await resume(world)
    assert await world.end() is JobState.COMPLETED


# --- budgets ------------------------------------------------------------------------------------------------------


def words(world: SimWorld) -> int:
    """How many nodes were drained or refused."""
    return len(world.drained()) + len(world.events("drain-refused"))


async def lose(world: SimWorld, *nodes: str) -> None:
    """Lose nodes of a running job one after another, each drained or refused before the next."""
    for count, node in enumerate(nodes, 1):
        world.power_loss(node)
        await world.until(lambda count=count: len(world.launched) == count + 1, "the next launch", 300)  # type: ignore[misc]
        await world.until(lambda count=count: words(world) == count, "a word on the drain", 300)  # type: ignore[misc]


async def test_a_budget_that_trips_stays_tripped_and_everything_else_goes_on(site: Callable[..., SimWorld]) -> None:
    world = site(drain={"per_hour": 99, "max_fraction": 0.125})
    world.steps = 20_000
    await world.start_daemon()
    await world.submit({"spares": 4})
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await lose(world, "n1", "n2")
    assert world.drained() == ["n1"]
    why = "1 nodes are drained by transom (drain.max_fraction = 0.125 of 8 nodes)"
    assert [event.message for event in world.events("budget-tripped")] == [
        f"drain-budget:max_fraction is tripped: {why}"
    ]
    await world.slurm.resume("n1")  # by the count alone the next drain would be let through
    world.power_loss("n3")
    await world.until(lambda: "n3" in {event.node for event in world.events("drain-refused")}, "n3 is refused", 300)
    assert world.drained() == ["n1"]
    assert not (await world.slurm.nodes())["n1"].status.drain
    assert "drain.max_fraction is tripped" in world.events("drain-refused")[-1].message
    assert "transom resume-actions resets it" in world.events("drain-refused")[-1].message
    assert len(world.events("budget-tripped")) == 1
    await world.until(lambda: len(world.launched) == 4, "the job goes on all the same", 300)


async def test_a_tripped_budget_survives_a_restart_and_is_reset_by_a_person(site: Callable[..., SimWorld]) -> None:
    world = site(drain={"per_hour": 1, "max_fraction": 1.0})
    world.steps = 400
    await world.start_daemon()
    await world.submit({"spares": 4})
    await world.until(lambda: world.state() is JobState.RUNNING, "it runs")
    await lose(world, "n1", "n2")
    await world.stop_daemon()
    await world.start_daemon()
    await world.run(10)
    assert world.drained() == ["n1"]
    assert [switch.name for switch in await resume(world)] == ["drain-budget:per_hour"]
    await world.until(lambda: world.drained() == ["n1", "n2"], "the drain that was still wanted", 60)
    assert await world.end() is JobState.COMPLETED
