"""Budgets apart from one another, patience with what is nobody's fault, and submissions that may still be coming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tol_views import plain_job
from transom_slurm.types import JobBase, JobStatus, SlurmJob, SubmitRequest
from transom_sql.records import Attempt, Incident, Intent, Launch

from transomd.api.wire import LauncherReport
from transomd.settings import Settings
from transomd.spec import JobSpec, PolicySpec
from transomd.tee.types import Verdict
from transomd.tol import gate, recover
from transomd.tol.act import SETTLE_S, Actor
from transomd.tol.hearing import Hearing
from transomd.tol.policy import WAIT_S, make_plan
from transomd.tol.view import JobView, with_data
from transomd.words import Action, Blame, Confidence, FailureClass, IntentState


def verdict(failure_class: FailureClass, blame: Blame = Blame.UNKNOWN) -> Verdict:
    return Verdict(
        failure_class=failure_class, blame=blame, action=Action.RESTART, confidence=Confidence.HIGH, summary="so"
    )


def incident(failure_class: FailureClass, *, epoch: int = 1, attempt: int = 1, blame: str = "unknown") -> Incident:
    return Incident(
        job_id=1, attempt=attempt, epoch=epoch, detected_at=1.0, failure_class=failure_class.value, blame=blame
    )


def launch(epoch: int, step: int | None = None) -> Launch:
    return Launch(job_id=1, epoch=epoch, attempt=1, nodes=("n1",), started_at=float(epoch), last_step=step)


@pytest.mark.parametrize("failure_class", [FailureClass.PREEMPTION, FailureClass.TIME_LIMIT])
def test_what_slurm_takes_away_needs_no_budget(failure_class: FailureClass) -> None:
    plan = make_plan(verdict(failure_class, Blame.EXTERNAL), [], [launch(1, 5)], PolicySpec(max_restarts=0))
    assert plan.action is Action.RESTART


def test_a_fault_of_the_cluster_needs_budget() -> None:
    plan = make_plan(verdict(FailureClass.UNKNOWN), [], [launch(1, 5)], PolicySpec(max_restarts=0))
    assert plan.action is Action.STOP


def test_launches_that_slurm_did_not_start_say_nothing_of_the_job() -> None:
    earlier = [incident(FailureClass.LAUNCHER, epoch=epoch) for epoch in (2, 3, 4)]
    launches = [launch(1, 5), launch(2), launch(3), launch(4), launch(5)]
    policy = PolicySpec(no_progress_limit=2)
    assert make_plan(verdict(FailureClass.LAUNCHER), earlier, launches, policy).action is Action.RESTART
    assert make_plan(verdict(FailureClass.UNKNOWN), [], launches, policy).action is Action.STOP


def test_a_store_is_given_more_time_each_time() -> None:
    now = verdict(FailureClass.STORAGE)
    delays = [
        make_plan(now, [incident(FailureClass.STORAGE)] * seen, [launch(1, 5)], PolicySpec()).delay_s
        for seen in range(len(WAIT_S) + 2)
    ]
    assert delays == [*WAIT_S, WAIT_S[-1], WAIT_S[-1]]


def view(*incidents: Incident, attempts: int = 1) -> JobView:
    told = tuple(Attempt(job_id=1, number=n, tag=f"t-{n}", created_at=0.0) for n in range(1, attempts + 1))
    spec = JobSpec(name="train", command="true", nodes=1)
    return JobView(job=plain_job(), spec=spec, attempts=told, incidents=incidents, report_at=100.0)


def test_attempts_that_ended_at_their_time_limit_are_not_spent() -> None:
    ends = [incident(FailureClass.TIME_LIMIT, attempt=n) for n in (1, 2)]
    assert recover._attempts_spent(view(*ends, attempts=3)) == 1
    assert recover._attempts_spent(view(incident(FailureClass.HOST), attempts=3)) == 3


def test_no_launcher_is_silent_while_the_database_lets_nothing_in() -> None:
    hearing = Hearing(lambda: 130.0)
    views = {1: view()}
    assert hearing.after_a_wait(views, 0.5) is views
    assert hearing.after_a_wait(views, 20.0)[1].report_at == 120.0
    assert hearing.after_a_wait(views, 99.0)[1].report_at == 130.0, "never later than now"


@pytest.mark.parametrize(("answering", "barred"), [((), ()), (("n1",), ("n2", "n3"))])
def test_nodes_are_left_out_only_when_other_agents_came(answering: Sequence[str], barred: Sequence[str]) -> None:
    """Where not one agent has called, Slurm did not start them: three nodes do not fall silent at once."""
    attempt = Attempt(
        job_id=1, number=1, tag="t-1", created_at=0.0, slurm_job_id=7, generation=1, nodes=("n1", "n2", "n3")
    )
    report = LauncherReport(
        job_id=1,
        attempt=1,
        slurm_job_id=7,
        generation=1,
        host="n1",
        phase="gate",
        at=0.0,
        nodes=list(answering),
    )
    told = replace(view(), attempts=(with_data(attempt, checking_since=0.0),), report=report)
    decision = gate._too_few(told, [], set(), Settings(), 10_000.0)
    assert decision.attempts[0].barred == tuple(barred)


class Slow:
    """slurmctld as it comes back: an sbatch that it had not read before shows a moment later."""

    def __init__(self, answers: Sequence[Sequence[SlurmJob]]) -> None:
        self.answers = list(answers)
        self.submitted = 0

    async def find(self, name: str) -> Sequence[SlurmJob]:
        return self.answers.pop(0)

    async def submit(self, request: SubmitRequest) -> int:
        self.submitted += 1
        return 7


def actor(slurm: Any) -> Actor:
    reach: Any = SimpleNamespace(submission=lambda view, number: None)
    return Actor(slurm, reach, Settings(), lambda: 1000.0)


def submission(**more: Any) -> Intent:
    args = {"tag": "t-1", "attempt": 1}
    return Intent(key="submit:1:1", kind="submit", state="pending", **{"created_at": 1000.0, "args": args, **more})


OURS = SlurmJob(job_id=5, name="t-1", user="ada", status=JobStatus(JobBase.PENDING), state_text="PENDING")


async def test_a_fresh_submission_is_made_at_once() -> None:
    slurm = Slow([[]])
    assert (await actor(slurm).perform(submission(), view())).data["slurm_job_id"] == 7


@pytest.mark.parametrize("more", [{"tries": 1}, {"created_at": 900.0}])
async def test_what_may_still_be_coming_is_looked_for_twice(more: dict[str, Any]) -> None:
    slurm = Slow([[], [OURS]])
    first = await actor(slurm).perform(submission(**more), view())
    assert (first.state, first.again_s) == (IntentState.PENDING, SETTLE_S)
    again = await actor(slurm).perform(submission(tries=2, outcome=first.data), view())
    assert again.data["slurm_job_id"] == 5
    assert slurm.submitted == 0


async def test_what_does_not_come_is_submitted_again() -> None:
    slurm = Slow([[], []])
    made = actor(slurm)
    first = await made.perform(submission(tries=1), view())
    again = await made.perform(submission(tries=2, outcome=first.data), view())
    assert again.data["slurm_job_id"] == 7
