"""An allocation that is being ended is past saving: what is recorded will be done, whenever Slurm answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tol_sites import started
from tol_views import NOW, recorded, views, worlds
from tol_world import SimWorld, quick_settings
from transom_sql.records import Intent

from transomd.tol.decide import decide
from transomd.words import IntentState, JobState

SITE = quick_settings()


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with started() as made:
        yield made


async def test_a_launcher_that_is_heard_again_does_not_hide_that_its_job_will_be_cancelled(world: SimWorld) -> None:
    """Its way to the daemon was cut, the job was given up, and scancel still waits for slurmctld: it will be done."""
    world.steps = 300
    await world.submit({"spares": 0})
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    launcher = world.launchers[0]
    launcher.deaf_until = world.now + 120
    world.slurm.outage(180, "cancel")
    await world.until(lambda: world.store.intents(kinds=["cancel"]), "the allocation is given up", 120)
    await world.until(lambda: world.now > launcher.deaf_until + 20, "the launcher is heard again", 120)
    assert world.state() is JobState.RECOVERING, world.story()
    assert await world.end(within_s=2000) is JobState.COMPLETED, world.story()
    assert len(world.store.attempts(1)) == 2, world.story()
    assert not any("nothing was done" in event.message for event in world.events()), world.story()


async def test_an_allocation_that_its_batch_script_does_not_end_is_given_back(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the slurmstepd of the batch script was killed: nobody is left to tell slurmctld of its end."""
    monkeypatch.setattr(world.slurm, "finish", lambda *_: None)
    await world.submit()
    await world.until(lambda: world.state() is JobState.COMPLETED)
    (job,) = world.slurm.all_jobs()
    await world.run(20)
    assert world.calls("cancel") == [], "a script gets time to end by itself"
    await world.until(lambda: world.slurm.all_jobs()[job].ended, "it is given back", 60)


async def test_what_a_job_that_is_done_has_not_in_storage_is_said_of_it(world: SimWorld) -> None:
    await world.submit()
    await world.until(lambda: world.state() is JobState.RUNNING)
    world.launchers[0].message = "step 60, which rank 0 on n1 saved last, is not in storage: no space"
    assert await world.end() is JobState.COMPLETED, world.story()
    assert world.job().reason.endswith("; step 60, which rank 0 on n1 saved last, is not in storage: no space")


async def test_nothing_is_cancelled_of_a_job_that_ended_by_itself(world: SimWorld) -> None:
    await world.submit()
    assert await world.end() is JobState.COMPLETED, world.story()
    await world.run(120)
    assert world.calls("cancel") == []


@pytest.mark.parametrize("fate", ["killed", "preempted"])
async def test_a_launch_that_went_with_its_allocation_is_not_told_as_completed(world: SimWorld, fate: str) -> None:
    """Its launcher's last word was that it runs; the job's next attempt completes."""
    world.steps = 40
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 5)
    at = world.now
    if fate == "killed":
        world.slurm.finish(1, 0, 9)
    else:
        world.slurm.preempt(1)
    assert await world.end() is JobState.COMPLETED, world.story()
    first, *_, last = world.store.launches(1)
    assert last.end_reason == "completed"
    assert first.end_reason not in ("", "completed"), first
    assert first.ended_at is not None
    assert at <= first.ended_at < last.started_at


async def test_a_program_that_heeds_slurms_notice_fails_of_nothing_else(world: SimWorld) -> None:
    """Preempted with a ``GraceTime``, it is told to end at once: no budget is spent, and nothing started meanwhile."""
    world.steps = 40
    await world.submit({"policy": {"max_restarts": 0}})
    await world.until(lambda: world.job().data.get("step", 0) > 5)
    world.slurm.preempt(1, grace_s=90)
    world.launchers[0].fail("exit", "srun ended with exit code 143")
    await world.until(lambda: "takes the nodes of job 1" in world.job().reason, "it is said", 60)
    assert await world.end(within_s=2000) is JobState.COMPLETED, world.story()
    assert [i.failure_class for i in world.incidents()] == ["preemption"], world.story()
    assert [x.attempt for x in world.store.launches(1)] == [1, 2]


async def test_an_end_that_nobody_told_of_names_no_step(world: SimWorld) -> None:
    await world.submit()
    await world.until(lambda: world.job().data.get("step", 0) > 3)
    await world.stop_daemon()
    await world.run(600)
    await world.start_daemon()
    assert await world.end() is JobState.COMPLETED, world.story()
    assert "exit code 0; the last step that was heard of is " in world.job().reason


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_recovery_goes_on_in_an_allocation_that_is_being_ended(data: st.DataObject) -> None:
    view = data.draw(views().filter(lambda v: v.state is JobState.RECOVERING and not v.job.cancel_requested_by))
    key = f"cancel:1:{view.attempt.number}"
    cancel = Intent(key=key, kind="cancel", state=IntentState.PENDING.value, created_at=NOW, job_id=1)
    view = replace(view, intents={**view.intents, key: cancel})
    world = data.draw(worlds(view.attempt))
    for _ in range(50):
        decision = decide(view, world, SITE, NOW)
        if not decision.writes(view):
            break
        view = recorded(view, decision)
        assert view.state is not JobState.RUNNING, view.job
