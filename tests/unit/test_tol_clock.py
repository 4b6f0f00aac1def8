"""A clock that is set back, and a database that fails while acts are looked for, stop nothing for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tol_world import SimWorld
from transom_sql.store import StoreError

from transomd.tol.acting import NEVER
from transomd.words import JobState


class Clock:
    """The daemon's clock: that of the world, and so many seconds more."""

    def __init__(self, world: SimWorld) -> None:
        self.ahead = 0.0
        self._true = world.slurm.clock
        world.slurm.clock = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> float:
        return self._true() + self.ahead


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    made = SimWorld()
    yield made
    await made.close()


async def test_a_clock_that_is_set_back_does_not_keep_slurm_unasked(world: SimWorld) -> None:
    clock = Clock(world)
    await world.start_daemon()
    await world.run(20)
    clock.ahead = -3600.0
    before = len(world.calls("nodes"))
    await world.run(30)
    assert len(world.calls("nodes")) - before >= 3


async def test_an_act_that_was_put_off_before_the_clock_was_set_back_is_done(world: SimWorld) -> None:
    clock = Clock(world)
    await world.start_daemon()
    world.slurm.outage(20, "submit")
    await world.submit()
    await world.run(10)
    (intent,) = world.store.intents(states=["pending"])
    assert intent.not_before > 0.0
    clock.ahead = -3600.0
    await world.until(lambda: world.view().attempt.slurm_job_id is not None, "the job is submitted", within_s=120)


JUMPS = [-5 * 3600.0, 5 * 3600.0]
MOMENTS = ("submitted", "queued", "checking", "running", "fault", "recovering")


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_job_gets_through_though_the_clock_jumps_by_hours(world: SimWorld, moment: str, jump: float) -> None:
    clock = Clock(world)
    await world.start_daemon()
    await world.submit()
    world.at_step(8, lambda _: world.power_loss("n2"))
    states = {"fault": "running", "running": "running"}
    if moment == "fault":
        await world.until(lambda: not world.slurm.powered("n2"), "the fault", within_s=300)
    elif moment != "submitted":
        await world.until(lambda: world.state().value == states.get(moment, moment), moment, within_s=300)
    clock.ahead = jump
    began = world.now
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.now - began < 1800
    assert set(world.drained()) <= {"n2"}
    assert len(world.slurm.accepted) <= 2


async def test_a_restart_from_a_clearing_of_the_future_hides_nothing_for_long(world: SimWorld) -> None:
    clock = Clock(world)
    clock.ahead = 5 * 3600.0
    await world.start_daemon()
    world.slurm.drain_by_person("n3", "swap GPU 2")
    await world.run(20)
    world.slurm.resume_by_person("n3")
    await world.run(20)
    clock.ahead = 0.0
    await world.run(10)
    assert world.operator is not None
    assert world.operator.clearings.at["n3"] <= world.now


async def test_acts_are_looked_for_again_after_a_read_that_the_database_failed(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start_daemon()
    world.slurm.outage(5, "submit")
    await world.submit()
    await world.run(2)
    assert world.operator is not None

    def away(*args: object, **kwargs: object) -> object:
        raise StoreError("reading intents: the server is away")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "intents", away)
        for _ in range(40):
            try:
                await world.tick()
            except StoreError:
                break
        else:
            raise AssertionError("no act was looked for")
    assert world.operator._acts.due_at != NEVER
    await world.until(lambda: world.state() is JobState.RUNNING, "the job runs", within_s=60)


async def test_a_launcher_whose_node_is_set_back_is_still_heard(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    real, back = world.deliver, 3600.0
    monkeypatch.setattr(world, "deliver", lambda report: real(replace(report, at=report.at - back)))
    await world.run(5)
    seen = world.view().report
    assert seen is not None
    assert seen.at < world.now - 3000


async def test_a_report_that_was_overtaken_on_its_way_is_left(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.start_daemon()
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    real, newest = world.deliver, world.view().report
    assert newest is not None
    await real(replace(newest, at=newest.at - 5, message="late"))
    seen = world.view().report
    assert seen is not None
    assert seen.message != "late"
