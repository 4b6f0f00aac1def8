"""A Slurm job that stays COMPLETING (a hanging epilog, a process that nothing ends) is told, and not waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tol_sites import training
from tol_world import SimWorld
from transom_slurm.stuck import COMPLETING_S

from transomd.tol.lingering import seen_late
from transomd.tol.view import with_data
from transomd.words import JobState

NEVER = 1e6


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    """On a cluster where no epilog ever ends; twice as many nodes as the job needs."""
    async with training(7, completing_s=NEVER, accounting=False) as made:
        yield made


async def test_a_new_attempt_does_not_wait_for_an_epilog_that_never_ends(world: SimWorld) -> None:
    world.power_loss("n2")
    assert await world.end() is JobState.COMPLETED, world.story()
    first, second = world.store.attempts(1)
    assert (first.ended_at or 0.0) - first.created_at > COMPLETING_S
    assert set(second.excluded) <= {"n2"}, "Slurm gives no node away that is COMPLETING"
    assert not {"n1", "n2", "n3"} & set(second.nodes), world.story()


async def test_a_slurm_that_was_away_itself_is_given_its_time(world: SimWorld) -> None:
    """Its first answer may tell of a job that has been ending for long, whose nodes finish seconds later."""
    world.power_loss("n2")
    await world.until(lambda: "completing_since" in world.store.attempts(1)[0].data, "Slurm ends the job")
    view, late = world.view(), world.now + COMPLETING_S
    job = (await world.slurm.jobs())[1]
    assert seen_late(view, job, late)
    seen_first_now = with_data(view.attempt, completing_since=late)
    assert not seen_late(replace(view, attempts=(seen_first_now,)), job, late)


async def test_what_waits_for_such_a_job_says_so_and_what_to_type(world: SimWorld) -> None:
    """Whether a person's scancel ended it the flag hides, and what a person ended is not started again."""
    world.slurm.cancel_by_person(1)
    await world.until(lambda: "n[1-3] do not end (next: scontrol update nodename=n[1-3]" in world.job().reason)
    await world.run(3 * COMPLETING_S)
    assert world.state() is JobState.RECOVERING
    assert len(world.store.attempts(1)) == 1
    assert len(world.events("stuck")) == 1, world.story()


async def test_accounting_says_how_such_a_job_ended(world: SimWorld) -> None:
    world.slurm.accounting = True
    world.slurm.cancel_by_person(1)
    assert await world.end() is JobState.CANCELLED, world.story()
    assert len(world.store.attempts(1)) == 1


async def test_a_job_that_its_user_cancelled_does_not_wait_for_its_epilog(world: SimWorld) -> None:
    assert world.operator is not None
    await world.operator.cancel(1, "root")
    assert await world.end() is JobState.CANCELLED, world.story()
