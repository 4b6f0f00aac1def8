"""Attempts of transom's own that fall to a failed prolog, in virtual time."""

from __future__ import annotations

import pytest
from tol_world import SimWorld

from transomd.words import JobState


async def _started(world: SimWorld) -> tuple[int, tuple[str, ...]]:
    """Submit, and return the first attempt's Slurm job and its nodes as soon as it has some."""
    await world.start_daemon()
    job = await world.submit()
    await world.until(lambda: any(j.nodes for j in world.slurm.all_jobs().values()), "an allocation", 60)
    (slurm_job,) = world.slurm.all_jobs().values()
    assert job == 1
    return slurm_job.job_id, slurm_job.nodes


@pytest.mark.parametrize("requeue", [False, True], ids=["cancelled", "held"])
async def test_an_attempt_that_a_prolog_ended_is_replaced_without_its_node(requeue: bool) -> None:
    world = SimWorld(6)
    slurm_job, nodes = await _started(world)
    # transom submits with --no-requeue; an administrator may have changed that.
    world.slurm._jobs[slurm_job].may_requeue = requeue
    world.slurm.fail_launch(slurm_job, nodes[1])
    assert await world.end() is JobState.COMPLETED, world.story()
    first, second = world.store.attempts(1)
    assert nodes[1] in second.excluded
    (incident,) = world.store.incidents(1)
    assert (incident.failure_class, incident.blame, incident.nodes) == ("host", "node", (nodes[1],))
    assert len(world.slurm.all_jobs()) == 2, "released or replaced, once"
    assert world.slurm.all_jobs()[slurm_job].status.terminal, "nothing stays held"
    assert first.slurm_job_id == slurm_job


async def test_slurmctld_ends_the_job_before_it_drains_the_node() -> None:
    world = SimWorld(6)
    slurm_job, nodes = await _started(world)
    world.slurm.cancel_by_person(slurm_job)
    await world.run(2)
    world.slurm.drain_by_person(nodes[1], "Prolog error", user="root")
    assert await world.end() is JobState.COMPLETED, world.story()
    assert nodes[1] in world.store.attempts(1)[1].excluded


async def test_a_persons_scancel_is_no_prologs() -> None:
    world = SimWorld(6)
    slurm_job, _ = await _started(world)
    world.slurm.cancel_by_person(slurm_job)
    assert await world.end() is JobState.CANCELLED
    assert len(world.store.attempts(1)) == 1


async def test_a_prolog_that_failed_for_another_job_long_ago_is_not_blamed() -> None:
    world = SimWorld(6)
    world.slurm.drain_by_person("n6", "Prolog error", user="root")
    await world.run(30)
    slurm_job, nodes = await _started(world)
    assert "n6" not in nodes
    world.slurm.cancel_by_person(slurm_job)
    assert await world.end() is JobState.CANCELLED
