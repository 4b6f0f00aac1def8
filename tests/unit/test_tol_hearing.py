"""Whether launchers are silent, or it is the daemon that does not hear."""

from __future__ import annotations

import pytest
from tol_views import plain_job
from transom_slurm.types import JobBase, JobStatus, SlurmJob
from transom_sql.records import Attempt

from transomd.settings import Settings
from transomd.spec import JobSpec
from transomd.tol.hearing import Hearing
from transomd.tol.view import JobView, SlurmView
from transomd.words import JobState

NOW = 10_000.0


def view(number: int, state: JobState, heard_at: float) -> JobView:
    attempt = Attempt(job_id=number, number=1, tag=f"t-{number}", created_at=0.0, slurm_job_id=number)
    spec = JobSpec(name="train", command="true", nodes=1)
    return JobView(job=plain_job(number, state), spec=spec, attempts=(attempt,), report_at=heard_at)


def slurm(base: JobBase | None, *flags: str) -> SlurmView:
    """Slurm with four jobs in this state; None: it does not answer."""
    if base is None:
        return SlurmView()
    jobs = {
        number: SlurmJob(number, f"t-{number}", "ada", JobStatus(base, frozenset(flags)), base.value)
        for number in range(1, 5)
    }
    return SlurmView(jobs=jobs, jobs_at=NOW)


def deaf(silent: JobState, answer: SlurmView) -> bool:
    """Whether three jobs that nobody has heard of for long, beside one that is heard, make the daemon deaf."""
    hearing = Hearing(lambda: NOW)
    views = [view(number, silent, 0.0) for number in (1, 2, 3)]
    hearing.count([*views, view(4, JobState.RUNNING, NOW)], answer, Settings())
    return hearing.deaf


def test_many_silent_launchers_are_no_fault_of_theirs() -> None:
    assert deaf(JobState.RUNNING, slurm(JobBase.RUNNING))
    assert deaf(JobState.RECOVERING, slurm(JobBase.RUNNING))


def test_what_is_not_known_excuses_launchers() -> None:
    assert deaf(JobState.RUNNING, slurm(None))
    assert deaf(JobState.RECOVERING, slurm(None))


@pytest.mark.parametrize(
    "answer", [slurm(JobBase.NODE_FAIL), slurm(JobBase.UNKNOWN, "COMPLETING"), SlurmView(jobs={}, jobs_at=NOW)]
)
def test_jobs_between_two_attempts_have_no_launcher_that_could_be_silent(answer: SlurmView) -> None:
    assert not deaf(JobState.RECOVERING, answer)
