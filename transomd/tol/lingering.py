"""Slurm jobs that are over, but for processes or an epilog that does not end: they are COMPLETING for ever. Pure."""

from __future__ import annotations

from dataclasses import replace

from transom_slurm.nodesets import fold
from transom_slurm.statewords import job_ended
from transom_slurm.stuck import COMPLETING_S, completing_late, does_not_end
from transom_slurm.types import JobBase, JobStatus, SlurmJob

from transomd.tol.view import JobView, World


def hides_its_end(job: SlurmJob, now: float) -> bool:
    """Whether accounting is to be asked how a job ended that has been COMPLETING for too long."""
    return job.status.base is JobBase.UNKNOWN and completing_late(job, now)


def as_recorded(job: SlurmJob, record: SlurmJob) -> SlurmJob:
    """Return a COMPLETING job with the end that accounting has of it, if that is the same job: ids are reused."""
    if record.name != job.name:
        return job
    return replace(job, status=JobStatus(record.status.base, job.status.flags))


def without_epilog(job: SlurmJob, now: float, *, ours: bool) -> SlurmJob:
    """Return a job that has been COMPLETING for too long as it ended, where that is known; else the job as it is.

    Text hides how it ended behind the flag: then it is known only where transom ended it (``ours``). A person's scancel
    looks alike, and what a person ended is not to be started again.
    """
    if not completing_late(job, now):
        return job
    base = JobBase.CANCELLED if job.status.base is JobBase.UNKNOWN and ours else job.status.base
    seen = JobStatus(base, job.status.flags - {"COMPLETING"})
    return replace(job, status=seen) if job_ended(base.value, seen.flags, may_requeue=False) else job


def seen_late(view: JobView, job: SlurmJob, now: float) -> bool:
    """Whether Slurm has said for too long that it is ending the job: not only afterwards, when it was away itself."""
    since = view.attempt.data.get("completing_since")
    return since is not None and now - float(since) >= COMPLETING_S and completing_late(job, now)


def stuck_nodes(view: JobView, world: World, now: float) -> tuple[str, ...]:
    """Return the nodes of the current attempt on which Slurm has been ending its job for too long."""
    job = world.slurm.job(view.attempt)
    if not isinstance(job, SlurmJob) or not seen_late(view, job, now):
        return ()
    known = world.slurm.nodes or {}
    return tuple(n for n in job.nodes if n in known and "COMPLETING" in known[n].status.flags)


def sentence(view: JobView, world: World, now: float) -> str:
    """Say why the current attempt's Slurm job is not over, and what to type; empty where it is not stuck so."""
    job = world.slurm.job(view.attempt)
    if not isinstance(job, SlurmJob) or not seen_late(view, job, now):
        return ""
    stuck = does_not_end(job, (world.slurm.jobs or {}).values(), world.slurm.nodes or {}, now=now)
    where = stuck_nodes(view, world, now) or job.nodes
    what = f"Slurm does not come to the end of job {job.job_id}: processes or the epilog on {fold(where)} do not end"
    return f"{what} (next: {stuck.command})" if stuck else what
