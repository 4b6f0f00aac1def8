"""Slurm refuses a job that it took before: that may pass, and ends no job of weeks over night."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tol_sites import started, training
from tol_world import SimWorld, quick_settings
from transom_slurm.errors import SlurmRejected
from transom_slurm.fake_world import SubmitFate
from transom_slurm.types import SlurmJob, SubmitRequest
from transom_sql.records import Intent

from transomd.settings import Settings
from transomd.tol.act import REFUSED_AGAIN_S, REFUSED_FOR_S, SETTLE_S, Actor
from transomd.words import IntentState, JobState


@pytest.fixture
async def world() -> AsyncIterator[SimWorld]:
    async with training() as made:
        yield made


async def test_a_refused_attempt_is_held_and_offered_again_until_it_is_taken(world: SimWorld) -> None:
    for _ in range(3):
        world.slurm.next_submit(SubmitFate.REJECTED)
    world.power_loss("n2")
    await world.until(lambda: world.state() is JobState.HELD, "held", 200)
    assert "Slurm refuses attempt 2 (scripted)" in world.job().reason
    assert "transom cancel 1" in world.job().reason
    assert await world.end() is JobState.COMPLETED, world.story()
    assert len(world.events("held")) == 1, world.story()
    assert len(world.store.attempts(1)) == 2


async def test_what_is_refused_for_the_nodes_left_out_is_offered_with_all_of_them() -> None:
    """The rule for how many may be left out cannot know what a constraint or a reservation leaves."""
    async with started() as world:
        world.slurm.refuses_to_leave_out = True
        await world.submit({"spares": 0})
        world.at_step(8, lambda _: world.power_loss("n2"))
        await world.until(lambda: len(world.store.attempts(1)) == 2, "a second attempt")
        world.off.clear()
        world.slurm.heal_node("n2")
        assert await world.end() is JobState.COMPLETED, world.story()
        assert "the next offer leaves none out" in world.story()
        assert world.events("held") == [], world.story()
        assert world.store.attempts(1)[-1].excluded == ()


async def test_only_nodes_of_the_jobs_own_partition_count_as_left() -> None:
    """The job names none, so Slurm's default is its own; it would wait for ever without the one node that is blamed."""
    partitions = {"gpu": ["n1", "n2", "n3"], "cpu": ["n4", "n5", "n6"]}
    async with started(6, partitions=partitions, settings=quick_settings(drain={"node_loss": "observe"})) as world:
        await world.submit({"spares": 0})
        world.at_step(8, lambda _: world.power_loss("n2"))
        await world.until(lambda: len(world.store.attempts(1)) == 2, "a second attempt")
        world.off.clear()
        world.slurm.heal_node("n2")
        assert await world.end() is JobState.COMPLETED, world.story()
        assert world.store.attempts(1)[-1].excluded == ()


async def test_a_refused_attempt_can_be_cancelled_and_is_not_offered_again(world: SimWorld) -> None:
    for _ in range(9):
        world.slurm.next_submit(SubmitFate.REJECTED)
    world.power_loss("n2")
    await world.until(lambda: world.state() is JobState.HELD, "held", 200)
    assert world.operator is not None
    await world.operator.cancel(1, "ann")
    assert await world.end(within_s=2 * REFUSED_AGAIN_S) is JobState.CANCELLED, world.story()
    assert len(world.slurm.accepted) == 1


async def test_a_job_that_was_cancelled_while_slurm_was_away_is_not_submitted_first() -> None:
    async with started() as world:
        world.slurm.outage(60)
        await world.submit()
        await world.run(10)
        assert world.operator is not None
        await world.operator.cancel(1, "ann")
        assert await world.end() is JobState.CANCELLED, world.story()
        assert world.slurm.accepted == []


class Refusing:
    """slurmctld that has no such job, and words for why it takes none."""

    def __init__(self, why: str) -> None:
        self._why = why
        self.asked = 0

    async def find(self, name: str) -> Sequence[SlurmJob]:
        return []

    async def submit(self, request: SubmitRequest) -> int:
        self.asked += 1
        raise SlurmRejected("sbatch", self._why)


def actor(slurm: Any, *, now: float = 1000.0, since: float = 0.0) -> Actor:
    times = iter([since])
    reach: Any = SimpleNamespace(submission=lambda view, number: None)
    return Actor(slurm, reach, Settings(), lambda: next(times, now))


def submission(attempt: int, **more: Any) -> Intent:
    args = {"tag": f"t-{attempt}", "attempt": attempt}
    made = {"created_at": 1000.0, "args": args, **more}
    return Intent(key=f"submit:1:{attempt}", kind="submit", state="pending", **made)


VIEW: Any = SimpleNamespace(
    job=SimpleNamespace(user="ada", cancel_requested_by=""), attempt=SimpleNamespace(excluded=("n2",))
)


@pytest.mark.parametrize(
    ("attempt", "age_s", "state"),
    [
        (1, 0.0, IntentState.FAILED),
        (2, 0.0, IntentState.PENDING),
        (2, REFUSED_FOR_S, IntentState.PENDING),
        (2, REFUSED_FOR_S + 1, IntentState.FAILED),
    ],
)
async def test_only_what_slurm_took_before_is_offered_again_and_not_for_ever(
    attempt: int, age_s: float, state: IntentState
) -> None:
    made = actor(Refusing("QOSMaxSubmitJobPerUserLimit"), now=1000.0 + age_s)
    told = await made.perform(submission(attempt), VIEW)
    if told.again_s == SETTLE_S:
        told = await made.perform(submission(attempt, outcome=told.data), VIEW)
    assert (told.state, told.data["error"]) == (state, "QOSMaxSubmitJobPerUserLimit")


async def test_what_an_earlier_daemon_may_have_begun_is_looked_for_however_soon_the_next_one_is_there() -> None:
    """``systemctl restart`` in the second in which sbatch runs: what it sent is still before slurmctld."""
    slurm = Refusing("no")
    told = await actor(slurm, now=1001.5, since=1001.0).perform(submission(2), VIEW)
    assert (told.again_s, slurm.asked) == (SETTLE_S, 0)
    looked = submission(2, tries=2, outcome={"looked_at": 1000.5})
    made = actor(slurm, now=1001.5, since=1001.0)
    told = await made.perform(looked, VIEW)
    assert (told.again_s, slurm.asked) == (SETTLE_S, 0), "the earlier daemon looked, and then called sbatch"
    await made.perform(submission(2, tries=3, outcome=told.data), VIEW)
    assert slurm.asked == 1
